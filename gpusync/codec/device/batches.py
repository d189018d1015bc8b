"""Frames cut into batches, and pieces of bytes into chunks, so that no buffer on a device's side has to grow. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from gpusync.codec.stored_frames import OUTPUT_ALIGN, StoredFrame

Piece = tuple[int, memoryview]
"""Where bytes go in a buffer, and the bytes."""


@dataclass(slots=True)
class FrameBatch:
    """Frames that are decoded together. `pieces`: their stored bytes, laid out one after the other, each aligned."""

    pieces: list[Piece] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    stored_bytes: int = 0
    decoded_bytes: int = 0

    def add(self, frame: StoredFrame) -> None:
        self.pieces.append((self.stored_bytes, frame.stored))
        self.offsets.append(frame.offset)
        self.sizes.append(frame.nbytes)
        self.stored_bytes += aligned(len(frame.stored))
        self.decoded_bytes += frame.nbytes


def cut_batches(frames: Iterable[StoredFrame], *, stored_bytes: int, decoded_bytes: int) -> Iterator[FrameBatch]:
    """Batches within both limits, in order; a frame that is larger than a limit is a batch of its own. Frames of no
    bytes are left out: there is nothing to decode.
    """
    batch = FrameBatch()
    for frame in frames:
        if frame.nbytes == 0:
            continue
        too_much = (
            batch.stored_bytes + aligned(len(frame.stored)) > stored_bytes
            or batch.decoded_bytes + frame.nbytes > decoded_bytes
        )
        if batch.sizes and too_much:
            yield batch
            batch = FrameBatch()
        batch.add(frame)
    if batch.sizes:
        yield batch


def cut_chunks(pieces: Sequence[Piece], chunk_bytes: int) -> Iterator[tuple[int, int, list[Piece]]]:
    """(start, nbytes, parts) of chunks that together hold all pieces, which ascend and do not overlap; a part's place
    counts from its chunk's start. Between pieces there may be gaps: chunks cover short ones.

    pieces of 3 bytes at 0 and 16, chunks of 17: (0, 17, [(0, 3 bytes), (16, 1 byte)]), (17, 2, [(0, 2 bytes)])
    """
    parts: list[Piece] = []
    start = stop = 0
    for at, data in pieces:
        done = 0
        while done < len(data):
            if parts and at + done - start >= chunk_bytes:
                yield start, stop - start, parts
                parts = []
            if not parts:
                start = at + done
            take = min(len(data) - done, chunk_bytes - (at + done - start))
            parts.append((at + done - start, data[done : done + take]))
            done += take
            stop = at + done
    if parts:
        yield start, stop - start, parts


def aligned(nbytes: int) -> int:
    return -(-nbytes // OUTPUT_ALIGN) * OUTPUT_ALIGN
