"""The header of a safetensors file.

    header length u8 | JSON, padded with spaces | the tensors' bytes, back to back

The JSON maps each tensor's name to `{"dtype", "shape", "data_offsets": [begin, end]}`, relative to the end of the
header, and `__metadata__` to texts. The ranges cover the rest of the file, each byte once.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from gpusync.errors import NOWHERE, HeaderError, Where
from gpusync.stream.dtypes import DTYPE_BITS
from gpusync.stream.files import SourceFile
from gpusync.stream.limits import MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_OFFSET, MAX_RANK
from gpusync.stream.strict_json import parse_json

METADATA_KEY = "__metadata__"
LENGTH_BYTES = 8

_DTYPE_NAME = re.compile(r"[A-Z0-9_]{1,32}")


class ShortShardError(HeaderError):
    """A file ends before what its header (or its length field) says: cut, or not there in full yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """A tensor of one file. `offset` counts from the start of the file; `nbytes` may be 0."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """A valid header. `tensors` stand in the header's order, `file_bytes` is the length the header implies."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorRange]
    data_offset: int
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_header(file: SourceFile, *, where: Where = NOWHERE) -> ShardHeader:
    """The header of an open file whose length is exactly what the header implies.

    Raises ShortShardError (expected and found in bytes) for a file that ends too early, HeaderError for one that is
    wrong. `where` gives the version; the path is the file's.
    """
    where = Where(path=file.path, version=where.version, tensor=where.tensor)
    header = parse_header(read_header_bytes(file, where=where), where=where)
    if file.nbytes < header.file_bytes:
        raise ShortShardError(
            "file is shorter than its header says", where=where, expected=header.file_bytes, found=file.nbytes
        )
    if file.nbytes > header.file_bytes:
        raise HeaderError(
            "file goes on after its last tensor", where=where, expected=header.file_bytes, found=file.nbytes
        )
    return header


def read_header_bytes(file: SourceFile, *, where: Where = NOWHERE) -> bytes:
    """The header's JSON text, not looked at. Errors as `read_header`."""
    where = Where(path=file.path, version=where.version, tensor=where.tensor)
    if file.nbytes < LENGTH_BYTES:
        raise ShortShardError(
            "file is shorter than the length field", where=where, expected=LENGTH_BYTES, found=file.nbytes
        )
    (length,) = struct.unpack("<Q", file.read_at(0, LENGTH_BYTES, where=where))
    if length > MAX_HEADER_BYTES:
        raise HeaderError("header is too long", where=where, expected=f"at most {MAX_HEADER_BYTES}", found=length)
    if file.nbytes < LENGTH_BYTES + length:
        raise ShortShardError(
            "file ends inside its header", where=where, expected=LENGTH_BYTES + length, found=file.nbytes
        )
    return file.read_at(LENGTH_BYTES, length, where=where)


def parse_header(raw_json: bytes, *, where: Where = NOWHERE) -> ShardHeader:
    """The header whose JSON text is `raw_json` (without the length field). Raises HeaderError."""
    if not raw_json.startswith(b"{"):
        raise HeaderError("header does not start with a brace", where=where, found=ascii(raw_json[:16]))
    entries = parse_json(raw_json, what="header", where=where, error=HeaderError)
    if not isinstance(entries, dict):
        raise HeaderError("header is not an object", where=where)
    metadata = _parse_metadata(entries.pop(METADATA_KEY, {}), where=where)
    data_offset = LENGTH_BYTES + len(raw_json)
    tensors = {
        name: _parse_tensor(name, entry, data_offset=data_offset, where=where) for name, entry in entries.items()
    }
    end = _check_contiguous(tensors.values(), data_offset=data_offset, where=where)
    return ShardHeader(metadata=metadata, tensors=tensors, data_offset=data_offset, file_bytes=end)


def encode_header(tensors: Iterable[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Length field and header of a file that holds `tensors` back to back in this order; a multiple of 8 bytes.

    Raises HeaderError for what `parse_header` would refuse.
    """
    entries: dict[str, object] = {}
    if metadata:
        entries[METADATA_KEY] = dict(metadata)
    begin = 0
    for tensor in tensors:
        if tensor.name in entries or tensor.name == METADATA_KEY:
            raise HeaderError("tensor cannot be named so, or twice", tensor=tensor.name)
        end = begin + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise HeaderError("header is too long", expected=f"at most {MAX_HEADER_BYTES}", found=len(text))
    parse_header(text)
    return struct.pack("<Q", len(text)) + text


def _parse_metadata(metadata: object, *, where: Where) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError(f"{METADATA_KEY} is not an object of texts", where=where)
    return metadata


def _parse_tensor(name: str, entry: object, *, data_offset: int, where: Where) -> TensorRange:
    wrong = partial(HeaderError, where=where, tensor=name)
    if len(name) > MAX_NAME_BYTES or len(name.encode("utf-8")) > MAX_NAME_BYTES:
        raise wrong("tensor name is too long", expected=f"at most {MAX_NAME_BYTES} bytes")
    if not isinstance(entry, dict):
        raise wrong("tensor is not described by an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or not (dtype in DTYPE_BITS or _DTYPE_NAME.fullmatch(dtype)):
        raise wrong("tensor has no dtype", found=_shown(dtype))
    shape, offsets = (_sizes(entry.get(what), what, where=where, tensor=name) for what in ("shape", "data_offsets"))
    if len(shape) > MAX_RANK:
        raise wrong("tensor has too many dimensions", expected=MAX_RANK, found=len(shape))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong("data_offsets are no range", found=_shown(offsets))
    begin, end = offsets
    bits = DTYPE_BITS.get(dtype)
    needed = None if bits is None else math.prod(shape) * bits
    if needed is not None and needed != (end - begin) * 8:
        raise wrong(
            "shape and dtype disagree with data_offsets",
            expected=f"{(end - begin) * 8} bits",
            found=f"{needed if needed <= MAX_OFFSET else 'far too many'} for {dtype}{list(shape)}",
        )
    return TensorRange(name=name, dtype=dtype, shape=shape, offset=data_offset + begin, nbytes=end - begin)


def _sizes(values: object, what: str, *, where: Where, tensor: str) -> tuple[int, ...]:
    # type(), not isinstance(): True is an int.
    if not isinstance(values, list) or not all(type(value) is int and 0 <= value <= MAX_OFFSET for value in values):
        raise HeaderError(f"{what} is not a list of sizes", where=where, tensor=tensor, found=_shown(values))
    return tuple(values)


def _check_contiguous(tensors: Iterable[TensorRange], *, data_offset: int, where: Where) -> int:
    """Where the last range ends. Sorted by begin and end, each range must start where the one before it ends."""
    end = data_offset
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != end:
            raise HeaderError(
                "ranges leave a gap" if tensor.offset > end else "ranges overlap",
                where=Where(path=where.path, version=where.version, tensor=tensor.name),
                expected=f"data_offsets from {end - data_offset}",
                found=tensor.offset - data_offset,
            )
        end = tensor.end
    return end


def _shown(value: object, limit: int = 80) -> str:
    """A hostile value, short enough for one line."""
    text = ascii(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
