"""Digests of byte strings that one rank holds whole, in any pieces: by the library, or by kernels on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpusync.digest.algorithms import Digest, new_digest
from gpusync.digest.blocks import block_digests
from gpusync.digest.exchange import Seat, run_alone
from gpusync.digest.fragments import byte_batches, copy_to_source, on_host, zeros_on
from gpusync.digest.intervals import ByTensor, Ints, span_stops
from gpusync.digest.routes import Routes
from gpusync.digest.supply import Source, Window
from gpusync_kernels.adler32 import MODULUS, adler32_checksums, adler32_partials, bind_adler32
from gpusync_kernels.buffers import Buffer, Bytes, byte_view
from gpusync_kernels.segments import Rows, SegmentTable, clip_source, per_source
from gpusync_kernels.xxh3 import SHORT_BYTES

READ_BYTES = 4 << 20  # copied at a time for the library, where bytes do not lie together on the host


def held_digests(
    algorithms: Sequence[str], nbytes: Ints, rows: Rows, source: Source, *, budget_bytes: int
) -> list[bytes]:
    """The digest of each of several strings: `rows`, of a layer of `source`, hold each byte of string `src` once."""
    digests = [b""] * len(nbytes)
    table = ByTensor(rows, len(nbytes))
    by_library = np.full(len(nbytes), True)
    if source.device is not None:
        long = (np.array(algorithms) == "xxh3-128") & (nbytes > SHORT_BYTES)
        adler32 = np.array(algorithms) == "adler32"
        by_library = ~(long | adler32)
        _put(digests, _on_device(np.flatnonzero(long), nbytes, table, source, budget_bytes))
        _put(digests, _adler32(np.flatnonzero(adler32), nbytes, table, source))
    numbers = np.flatnonzero(by_library)
    running = [new_digest(algorithms[number]) for number in numbers.tolist()]
    for window in source.windows(table.of(numbers)):
        _update(running, window, source.device, min(READ_BYTES, budget_bytes))
    found = {number: bytes.fromhex(each.hexdigest()) for number, each in zip(numbers.tolist(), running, strict=True)}
    _put(digests, found)
    return digests


def adler32_sums(rows: Rows, nbytes: Ints, source: Source) -> Ints:
    """The partials, int64 [strings, 2], of what these rows of a layer hold of strings of `nbytes` bytes."""
    total = np.zeros((len(nbytes), 2), np.int64)
    for window in source.windows(rows):
        total += adler32_partials(bind_adler32(SegmentTable(window.rows), nbytes, dst=window.buffers))
    return total % MODULUS


def _on_device(numbers: Ints, nbytes: Ints, table: ByTensor, source: Source, budget_bytes: int) -> dict[int, bytes]:
    """XXH3-128 as one rank alone."""
    if not len(numbers):
        return {}
    seat = Seat(rank=0, ranks=1, budget_bytes=budget_bytes)
    routes = Routes([table], numbers, nbytes, np.arange(len(nbytes)))
    found = run_alone(block_digests(routes, [table], source, seat))
    if seat.attempts.problem is not None:
        raise seat.attempts.problem
    return found


def _adler32(numbers: Ints, nbytes: Ints, table: ByTensor, source: Source) -> dict[int, bytes]:
    sizes = nbytes[numbers]
    checksums = adler32_checksums(sizes, adler32_sums(table.of(numbers), sizes, source)).tolist()
    return {number: value.to_bytes(4, "big") for number, value in zip(numbers.tolist(), checksums, strict=True)}


def _update(running: Sequence[Digest], window: Window, device: Any, step_bytes: int) -> None:
    """Feeds each digest, in order, what the window has of its string."""
    table = ByTensor(window.rows, len(running))
    copied = []
    for number in np.unique(window.rows["src"]).tolist():
        rows = table.slice(number)
        if device is None and (rows["rows"] == 1).all():
            for row in rows:
                buffer = _bytes_of(window.buffers[row["dst"]])
                running[number].update(buffer[row["dst_offset"] : row["dst_offset"] + row["row_bytes"]])
        else:
            copied.append(number)
    _update_from_copies(running, np.array(copied, np.int64), table, window, device, step_bytes)


def _update_from_copies(
    running: Sequence[Digest], numbers: Ints, table: ByTensor, window: Window, device: Any, step_bytes: int
) -> None:
    """The same for strings that have to be put together first, some bytes at a time."""
    begin, end = np.zeros(len(running), np.int64), np.zeros(len(running), np.int64)
    begin[numbers] = table.rows["src_offset"][table.starts[numbers]]
    np.maximum.at(end, table.rows["src"], span_stops(table.rows))
    for batch in byte_batches(numbers, end - begin, np.ones(len(running)), step_bytes):
        rows = table.of(batch.tensors)
        rows["src_offset"] -= begin[batch.tensors][rows["src"]]
        rows = clip_source(rows, per_source(batch.first, rows), per_source(batch.stop, rows))
        sizes = batch.stop - batch.first
        start = np.cumsum(sizes) - sizes
        rows["src_offset"] += (start - batch.first)[rows["src"]]
        target = zeros_on(device, int(sizes.sum()))
        copy_to_source(rows, target, window.buffers)
        copied = on_host(target)
        for number, first, size in zip(batch.tensors.tolist(), start.tolist(), sizes.tolist(), strict=True):
            running[number].update(copied[first : first + size])


def _bytes_of(buffer: Buffer) -> Bytes:
    """`byte_view`, at once where there is nothing to do: a string may be in thousands of buffers."""
    return buffer if isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8 else byte_view(buffer)


def _put(digests: list[bytes], found: dict[int, bytes]) -> None:
    for number, digest in found.items():
        digests[number] = digest
