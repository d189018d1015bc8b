"""One tensor's way to its new state: base bytes, the pending deltas in order, and the proof that it is right.

What a fold does with the new bytes (spool them, or write them to a fresh file) is its own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from gpusync.codec import open_delta, would_be
from gpusync.digest import new_digest, payload_checksum
from gpusync.errors import DigestMismatchError, PayloadError, Where
from gpusync.mirror.state import Checksum
from gpusync.stream import (
    ByteSource,
    BytesSource,
    OpenFiles,
    PublishedVersion,
    StoredTensor,
    VersionIndex,
    element_bytes,
    is_float_order,
)

WINDOW_BYTES = 2 * 2**20
PAYLOAD_IN_MEMORY_BYTES = 16 * 2**20
DEFAULT_ALGORITHM = "xxh3-128"

Bytes = npt.NDArray[np.uint8]
Sink = Callable[[int, Bytes, Bytes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One pending delta of a tensor: the version that publishes it and its payload there."""

    version: PublishedVersion
    payload: StoredTensor

    @property
    def where(self) -> Where:
        return Where(path=self.version.path / self.payload.file, version=self.version.version, tensor=self.payload.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """A tensor as it is (`base`, in whatever file) and the deltas to apply to it, oldest first; there may be none.

    `published` is the checksum of `base` itself, where the full version that holds it publishes one.
    """

    base: StoredTensor
    deltas: Sequence[Delta]
    published: Checksum | None = None

    @property
    def expected(self) -> Checksum | None:
        """The newest published checksum, if anyone published one."""
        if not self.deltas:
            return self.published
        newest = self.deltas[-1]
        return published_checksum(newest.version.index, newest.payload)


def published_checksum(index: VersionIndex | None, tensor: StoredTensor) -> Checksum | None:
    """The checksum that a version publishes of a tensor's new state; a plain checkpoint publishes none."""
    if index is None or index.checksum_format is None or tensor.checksum is None:
        return None
    return Checksum(algorithm=index.checksum_format, value=tensor.checksum)


def pending_changes(
    tensors: Mapping[str, StoredTensor], versions: Iterable[PublishedVersion]
) -> dict[str, TensorChange]:
    """For every tensor that `versions` (ascending) change, its state in `tensors` and its deltas in order."""
    deltas: dict[str, list[Delta]] = {}
    for version in versions:
        for name, payload in version.tensors.items():
            deltas.setdefault(name, []).append(Delta(version=version, payload=payload))
    return {name: TensorChange(base=tensors[name], deltas=tuple(found)) for name, found in deltas.items()}


def apply_change(change: TensorChange, *, base: ByteSource, sources: OpenFiles, sink: Sink, where: Where) -> Checksum:
    """Make the tensor's new state window by window, hand each `(offset, old, new)` to `sink`, and digest it.

    Windows ascend without gaps and are only valid during the call. Returns the digest once everything has been handed
    over. Raises DigestMismatchError when it is not the published one: what the sink got must not be used then.
    """
    expected = change.expected
    algorithm = expected.algorithm if expected is not None else DEFAULT_ALGORITHM
    digest = new_digest(algorithm)
    tensor = change.base
    with ExitStack() as stack:
        decoders = []
        for delta in change.deltas:
            payload = stack.enter_context(delta.version.open_payload(tensor.name, sources))
            decoders.append(
                open_delta(
                    checked_payload(payload, delta, in_memory_bytes=PAYLOAD_IN_MEMORY_BYTES // len(change.deltas)),
                    encoding=str(delta.version.index.delta_encoding),
                    nbytes=tensor.nbytes,
                    element_bytes=element_bytes(tensor.dtype),
                    float_order=is_float_order(tensor.dtype),
                    where=delta.where,
                )
            )
        for offset, old, new in would_be(base, decoders, nbytes=tensor.nbytes, window_bytes=WINDOW_BYTES):
            digest.update(new)
            sink(offset, old, new)
    found = Checksum(algorithm=algorithm, value=digest.hexdigest())
    if expected is not None and found.value != expected.value.lower():
        raise DigestMismatchError(
            f"the {algorithm} digest of the would-be state is not the published checksum; nothing was changed",
            where=change.deltas[-1].where if change.deltas else where,
            expected=expected.value,
            found=found.value,
        )
    return found


def check_payloads(version: PublishedVersion) -> None:
    """Compare every payload of a delta with its own checksum, where the index has one. Raises PayloadError."""
    with OpenFiles() as files:
        for some in _neighbours(version.tensors.values()):
            first, stop = some[0], max(stored.offset + stored.nbytes for stored in some)
            path, where = version.path / first.file, version.where(first)
            with files.open_range(
                path, offset=first.offset, nbytes=stop - first.offset, follow_links=version.follow_links, where=where
            ) as span:
                if len(some) == 1:
                    checked_payload(span, Delta(version=version, payload=first))
                    continue
                data = np.empty(span.nbytes, np.uint8)
                span.read_into(0, data)
            for stored in some:
                part = data[stored.offset - first.offset :][: stored.nbytes]
                checked_payload(BytesSource(part), Delta(version=version, payload=stored))


def _neighbours(tensors: Iterable[StoredTensor]) -> Iterator[list[StoredTensor]]:
    """Those that have a checksum of their own, in the order of their files: what is read at once, mostly many small
    ones within a window."""
    found: list[StoredTensor] = []
    checked = (stored for stored in tensors if stored.payload_checksum is not None)
    for stored in sorted(checked, key=lambda stored: (stored.file, stored.offset)):
        end = stored.offset + stored.nbytes
        if found and (stored.file != found[0].file or end - found[0].offset > WINDOW_BYTES):
            yield found
            found = []
        found.append(stored)
    if found:
        yield found


def checked_payload(payload: ByteSource, delta: Delta, *, in_memory_bytes: int = PAYLOAD_IN_MEMORY_BYTES) -> ByteSource:
    """The payload, in memory if it has at most so many bytes, after its own checksum (if any) has been compared."""
    if payload.nbytes <= in_memory_bytes and not isinstance(payload, BytesSource):
        data = np.empty(payload.nbytes, np.uint8)
        payload.read_into(0, data)
        payload = BytesSource(data)
    expected = delta.payload.payload_checksum
    if expected is None:
        return payload
    found = payload_checksum(payload.data) if isinstance(payload, BytesSource) else _checksum_of(payload)
    if found != expected:
        raise PayloadError(
            "the stored payload is damaged: its xxh3-64 differs from the index",
            where=delta.where,
            expected=expected,
            found=found,
        )
    return payload


def _checksum_of(payload: ByteSource) -> str:
    """`payload_checksum` of what is too long for memory."""
    digest = xxhash.xxh3_64()
    window = np.empty(min(WINDOW_BYTES, payload.nbytes), np.uint8)
    for offset in range(0, payload.nbytes, WINDOW_BYTES):
        part = window[: min(WINDOW_BYTES, payload.nbytes - offset)]
        payload.read_into(offset, part)
        digest.update(part)
    return digest.hexdigest()
