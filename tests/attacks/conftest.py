"""A sound delta version, laid out as plain Python values: an attack changes one of them and writes it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpusync.errors import GpusyncError
from gpusync.stream import INDEX_NAME, StoredTensor, read_version

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CHECKSUM = "0123456789abcdef" * 2


def payload_entry(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


@dataclass
class Draft:
    """`headers` are JSON values, or bytes to be written as they are; `lengths` overrides a header's length field."""

    source_dir: Path
    number: int = 1
    metadata: Any = field(
        default_factory=lambda: {
            "version": "000001",
            "base_version": "000000",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
    )
    weight_map: Any = field(default_factory=lambda: {"a.weight": FIRST, "b.weight": FIRST, "c.weight": SECOND})
    headers: dict[str, Any] = field(
        default_factory=lambda: {
            FIRST: {
                "__metadata__": {"a.weight": CHECKSUM, "b.weight": CHECKSUM},
                "a.weight": payload_entry(0, 20),
                "b.weight": payload_entry(20, 33),
            },
            SECOND: {"__metadata__": {"c.weight": CHECKSUM}, "c.weight": payload_entry(0, 7)},
        }
    )
    data: dict[str, bytes] = field(default_factory=lambda: {FIRST: bytes(range(33)), SECOND: b"payload"})
    lengths: dict[str, int] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        return self.source_dir / f"weight_v{self.number:06d}"

    @property
    def index_path(self) -> Path:
        return self.directory / INDEX_NAME

    def write_shard(self, name: str) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        header = self.headers[name]
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = self.directory / name
        path.write_bytes(struct.pack("<Q", self.lengths.get(name, len(text))) + text + self.data[name])
        return path

    def write_index(self, raw: bytes | None = None) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        document = {"metadata": self.metadata, "weight_map": self.weight_map}
        self.index_path.write_bytes(json.dumps(document).encode() if raw is None else raw)
        return self.index_path

    def write(self) -> Draft:
        for name in self.headers:
            self.write_shard(name)
        self.write_index()
        return self

    def make_full(self) -> Draft:
        """The same names as a full version of F32 tensors, without checksums."""
        self.metadata = {"version": "000001"}
        for name, header in self.headers.items():
            header["__metadata__"] = {"format": "pt"}
            tensors = [key for key in header if key != "__metadata__"]
            for i, tensor in enumerate(tensors):
                header[tensor] = {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8]}
            self.data[name] = bytes(8 * len(tensors))
        return self


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    return Draft(tmp_path / "source")


@pytest.fixture
def refused(draft: Draft) -> Callable[..., GpusyncError]:
    """Writes the draft unless told not to, reads it, and gives the error back once its class and fields are right.

    The class is compared exactly: a retryable error where none is due makes a trainer wait for nothing.
    """

    def check(
        kind: type[GpusyncError],
        *,
        write: bool = True,
        path: Path | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        text: str = "",
    ) -> GpusyncError:
        if write:
            draft.write()
        with pytest.raises(GpusyncError) as caught:
            read_version(draft.source_dir, draft.number)
        error = caught.value
        assert type(error) is kind, error
        assert error.version == draft.number
        assert error.path is not None
        assert Path(error.path) == (path or draft.index_path)
        assert error.tensor == tensor
        assert expected is None or error.expected == expected
        assert found is None or error.found == found
        assert text in str(error)
        assert "\n" not in str(error)
        return error

    return check


@pytest.fixture
def base() -> dict[str, StoredTensor]:
    """What the draft applies to: three tensors of 64 bytes."""
    return {
        name: StoredTensor(name=name, dtype="BF16", shape=(32,), file="model.safetensors", offset=0, nbytes=64)
        for name in ("a.weight", "b.weight", "c.weight")
    }
