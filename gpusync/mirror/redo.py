"""The redo spool: verified new values that wait to be written into the tensor files.

A spool is a sequence of records, each the new values of one window of one file. They are absolute, so that replaying a
record twice, or over a half-written page, gives the same bytes. Layout of a record, little-endian:

    "RW01" | word u1 | 0 u1 | file u2 | offset u8 | span u8 | count u4 | 0 u4 | checksum u8 | body

`file` counts in the journal's list of files; `offset` is the window's place in that file and `span` its bytes. With
`word` 1, 2, 4 or 8 the body is `positions u4 x count | words (word bytes) x count`, positions counted in words from
the window's start; with `word` 0 it is the window's `span` bytes. `checksum` is the xxh3-64 of everything else in the
record.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from gpusync.codec.compact import changed_positions, elements
from gpusync.errors import JournalError
from gpusync.mirror import io

MAGIC = b"RW01"
HEADER = struct.Struct("<4sBBHQQII")
CHECKSUM = struct.Struct("<Q")
MAX_SPAN_BYTES = 64 * 2**20
FLUSH_BYTES = 4 * 2**20

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """New values of `span` bytes at `offset` of the journal's file number `file`. Raw when `word_bytes` is 0."""

    file: int
    offset: int
    span: int
    word_bytes: int
    positions: npt.NDArray[np.uint32]
    words: npt.NDArray[np.unsignedinteger]

    def apply(self, window: Bytes) -> None:
        """Write the new values into `window`, which holds the span's bytes, old or new or a mixture."""
        if self.word_bytes == 0:
            window[:] = self.words
        else:
            elements(window, element_bytes=self.word_bytes)[self.positions] = self.words


class RedoWriter:
    """Appends records to one spool file. Not thread-safe: one writer a worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.elements_changed = 0
        self._file = io.WritableFile(path, create=True)
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    @property
    def nbytes(self) -> int:
        return self._file.nbytes + self._pending_bytes

    def add(self, *, file: int, offset: int, old: Bytes, new: Bytes, element_bytes: int) -> None:
        """Record the difference of two equally long windows; equal windows leave no record."""
        positions = changed_positions(old, new, element_bytes=element_bytes)
        count = len(positions)
        if not count:
            return
        self.elements_changed += count
        if count * (4 + element_bytes) < new.size:
            words = elements(new, element_bytes=element_bytes)[positions]
            body = (positions.tobytes(), words.tobytes())
            head = HEADER.pack(MAGIC, element_bytes, 0, file, offset, new.size, count, 0)
        else:
            body = (new.tobytes(), b"")
            head = HEADER.pack(MAGIC, 0, 0, file, offset, new.size, 0, 0)
        digest = xxhash.xxh3_64(head)
        for part in body:
            digest.update(part)
        self._pending += [head, CHECKSUM.pack(digest.intdigest()), *body]
        self._pending_bytes += len(head) + CHECKSUM.size + len(body[0]) + len(body[1])
        if self._pending_bytes >= FLUSH_BYTES:
            self._flush()

    def finish(self) -> int:
        """Sync and close; returns the spool's length in bytes."""
        self._flush()
        self._file.fsync()
        self._file.close()
        return self._file.nbytes

    def close(self) -> None:
        self._file.close()

    def _flush(self) -> None:
        if self._pending:
            self._file.append(b"".join(self._pending))
        self._pending, self._pending_bytes = [], 0


def read_records(path: Path, *, nbytes: int) -> Iterator[Record]:
    """The records of a spool of exactly `nbytes` bytes, in order. MirrorError, or JournalError when one is damaged."""
    with io.explained("cannot read", path), path.open("rb", buffering=1024 * 1024) as spool:
        found = os.fstat(spool.fileno()).st_size
        if found != nbytes:
            raise JournalError("a redo spool has the wrong length", path=path, expected=nbytes, found=found)
        while head := spool.read(HEADER.size):
            yield _read_record(spool.read, head, path)


def _read_record(read: Callable[[int], bytes], head: bytes, path: Path) -> Record:
    if len(head) != HEADER.size:
        raise JournalError("a redo record is cut short", path=path, expected=HEADER.size, found=len(head))
    magic, word, _, file, offset, span, count, _ = HEADER.unpack(head)
    fits = word in (0, 1, 2, 4, 8) and span <= MAX_SPAN_BYTES and count * max(word, 1) <= span
    if magic != MAGIC or not fits:
        raise JournalError("a redo record has a damaged head", path=path)
    (checksum,) = CHECKSUM.unpack(read(CHECKSUM.size).ljust(CHECKSUM.size, b"\0"))
    body = read(count * (4 + word) if word else span)
    digest = xxhash.xxh3_64(head)
    digest.update(body)
    if digest.intdigest() != checksum:
        raise JournalError("a redo record is damaged", path=path, expected=f"{checksum:016x}", found=digest.hexdigest())
    positions = np.frombuffer(body, "<u4", count)
    words = np.frombuffer(body, f"<u{word or 1}", count if word else span, offset=4 * count)
    return Record(file=file, offset=offset, span=span, word_bytes=word, positions=positions, words=words)
