"""Digests of byte strings that one rank holds whole, in any pieces: by the library, or by kernels on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpusync.digest.algorithms import Digest, new_digest
from gpusync.digest.blocks import block_digests
from gpusync.digest.exchange import Seat, run_alone
from gpusync.digest.fragments import byte_batches, read_bytes
from gpusync.digest.intervals import ByTensor, Ints
from gpusync.digest.routes import Routes
from gpusync_kernels.adler32 import adler32_checksums, adler32_partials, bind_adler32
from gpusync_kernels.buffers import Buffer, device_of
from gpusync_kernels.segments import Rows, SegmentTable, clip_source, per_source
from gpusync_kernels.xxh3 import SHORT_BYTES

READ_BYTES = 4 << 20  # copied at a time for the library, where bytes do not lie together on the host


def held_digests(
    algorithms: Sequence[str], nbytes: Ints, rows: Rows, buffers: Sequence[Buffer], *, budget_bytes: int
) -> list[bytes]:
    """The digest of each of several strings: `rows` hold each byte of string `src` once, destinations in `buffers`."""
    digests = [b""] * len(nbytes)
    table = ByTensor(rows, len(nbytes))
    by_library = np.full(len(nbytes), True)
    if device_of(buffers) is not None:
        long = (np.array(algorithms) == "xxh3-128") & (nbytes > SHORT_BYTES)
        adler32 = np.array(algorithms) == "adler32"
        by_library = ~(long | adler32)
        _put(digests, _on_device(np.flatnonzero(long), nbytes, table, buffers, budget_bytes))
        _put(digests, _adler32(np.flatnonzero(adler32), nbytes, table, buffers))
    running = {number: new_digest(algorithms[number]) for number in np.flatnonzero(by_library).tolist()}
    _update(running, nbytes, table, buffers, budget_bytes)
    _put(digests, {number: bytes.fromhex(digest.hexdigest()) for number, digest in running.items()})
    return digests


def _on_device(
    numbers: Ints, nbytes: Ints, table: ByTensor, buffers: Sequence[Buffer], budget_bytes: int
) -> dict[int, bytes]:
    """XXH3-128 as one rank alone."""
    if not len(numbers):
        return {}
    seat = Seat(rank=0, ranks=1, budget_bytes=budget_bytes)
    routes = Routes([table], numbers, nbytes, np.arange(len(nbytes)))
    found = run_alone(block_digests(routes, [table], buffers, seat))
    if seat.attempts.problem is not None:
        raise seat.attempts.problem
    return found


def _adler32(numbers: Ints, nbytes: Ints, table: ByTensor, buffers: Sequence[Buffer]) -> dict[int, bytes]:
    if not len(numbers):
        return {}
    sizes = nbytes[numbers]
    sums = adler32_partials(bind_adler32(SegmentTable(table.of(numbers)), sizes, dst=buffers))
    checksums = adler32_checksums(sizes, sums).tolist()
    return {number: value.to_bytes(4, "big") for number, value in zip(numbers.tolist(), checksums, strict=True)}


def _update(
    running: dict[int, Digest], nbytes: Ints, table: ByTensor, buffers: Sequence[Buffer], budget_bytes: int
) -> None:
    """Feeds each digest its string, in order."""
    copied = []
    for number, digest in running.items():
        rows = table.slice(number)
        if device_of(buffers) is None and (rows["rows"] == 1).all():
            for row in rows:
                buffer = buffers[row["dst"]]
                digest.update(buffer[row["dst_offset"] : row["dst_offset"] + row["row_bytes"]])
        else:
            copied.append(number)
    step = min(READ_BYTES, budget_bytes)
    for batch in byte_batches(np.array(copied, np.int64), nbytes, np.ones(len(nbytes)), step):
        rows = table.of(batch.tensors)
        rows = clip_source(rows, per_source(batch.first, rows), per_source(batch.stop, rows))
        sizes = batch.stop - batch.first
        start = np.cumsum(sizes) - sizes
        rows["src_offset"] += (start - batch.first)[rows["src"]]
        window = read_bytes(rows, buffers, int(sizes.sum()))
        for number, first, size in zip(batch.tensors.tolist(), start.tolist(), sizes.tolist(), strict=True):
            running[number].update(window[first : first + size])


def _put(digests: list[bytes], found: dict[int, bytes]) -> None:
    for number, digest in found.items():
        digests[number] = digest
