"""Collectives of data among the ranks, for the work between two agreements.

Whoever waits here is told when another rank has failed, so that nobody waits for a rank that has gone on to its
verdict. After a failure no data is exchanged until the group is rebuilt.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gpusync.errors import GpusyncError, PeerFailedError
from gpusync.verdict.bounded import Deadline
from gpusync.verdict.channel import ChannelLostError, broadcast
from gpusync.verdict.decide import ROLL_CALL_S
from gpusync.verdict.errors import GroupFailedError, StoreLostError
from gpusync.verdict.generation import Generation
from gpusync.verdict.group import Int64s, Readable, Traffic
from gpusync.verdict.ledger import Ledger

_LOOK_S = 0.5
_STORE_S = 2.0


class Exchange:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.traffic = Traffic()

    def sum_int64(self, generation: Generation, array: Int64s, deadline: Deadline) -> Int64s:
        if array.dtype != np.int64:
            raise GpusyncError("only int64 is summed", found=array.dtype)
        # A copy: an operation that was given up may still write for a while.
        total = torch.from_numpy(array.copy())
        began = time.monotonic()
        with self._told(generation, f"a sum of {array.size} int64", deadline) as look:
            generation.data.sum_in_place(total, deadline=deadline, look=look)
        self._count(array.nbytes, began)
        summed: Int64s = total.numpy()
        return summed

    def broadcast_bytes(self, generation: Generation, data: Readable | None, source: int, deadline: Deadline) -> bytes:
        mine = b"" if data is None or source != generation.rank else bytes(data)
        began = time.monotonic()
        with self._told(generation, f"a broadcast from rank {source}", deadline) as look:
            length = torch.tensor([len(mine)], dtype=torch.int64)
            generation.data.run([broadcast(length, source=source)], deadline=deadline, look=look)
            buffer = _buffer(mine, int(length.item()))
            if buffer.numel():
                generation.data.run([broadcast(buffer, source=source)], deadline=deadline, look=look)
        self._count(buffer.numel(), began)
        return buffer.numpy().tobytes()

    def gather(self, generation: Generation, data: Readable, deadline: Deadline) -> list[bytes]:
        size = len(generation.roster.members)
        mine = bytes(data)
        began = time.monotonic()
        with self._told(generation, "a gather", deadline) as look:
            lengths = torch.zeros(size, dtype=torch.int64)
            lengths[generation.rank] = len(mine)
            generation.data.sum_in_place(lengths, deadline=deadline, look=look)
            buffers = [
                _buffer(mine if rank == generation.rank else b"", int(length)) for rank, length in enumerate(lengths)
            ]
            # One broadcast for each, because lengths may differ by a lot; all under way at once.
            starts = [broadcast(buffer, source=rank) for rank, buffer in enumerate(buffers) if buffer.numel()]
            if starts:
                generation.data.run(starts, deadline=deadline, look=look)
        self._count(sum(buffer.numel() for buffer in buffers), began)
        return [buffer.numpy().tobytes() for buffer in buffers]

    def gather_objects(self, generation: Generation, value: Any, deadline: Deadline) -> list[Any]:
        return [json.loads(text) for text in self.gather(generation, json.dumps(value).encode(), deadline)]

    @contextlib.contextmanager
    def _told(self, generation: Generation, what: str, deadline: Deadline) -> Iterator[Callable[[], str | None]]:
        """Gives what a waiting operation has to ask now and then; makes an error of its failure that says who."""
        reason = generation.lost or generation.stale
        if reason is not None:
            raise GroupFailedError(f"{what} needs a group that is rebuilt: {reason}")
        try:
            yield lambda: self._look(generation)
        except ChannelLostError as error:
            generation.stale = str(error)
            raise self._explain(generation, what, error, deadline) from error
        except BaseException:
            generation.stale = f"{what} was interrupted"
            raise

    def _look(self, generation: Generation) -> str | None:
        """Why there is nothing to wait for. A store that does not answer is no reason."""
        with contextlib.suppress(StoreLostError):
            upcoming, deadline = generation.upcoming, Deadline(_LOOK_S)
            alarm = self._ledger.read_alarm(upcoming, deadline=deadline)
            lost = self._ledger.read_lost(upcoming, deadline=deadline)
            if alarm is not None or lost is not None:
                return lost if alarm is None else alarm.message
        return generation.tell_gone()

    def _explain(self, generation: Generation, what: str, error: ChannelLostError, deadline: Deadline) -> GpusyncError:
        upcoming = generation.upcoming
        try:
            alarm = self._ledger.read_alarm(upcoming, deadline=Deadline(_STORE_S))
            silent: set[int] = set()
            if alarm is None:
                # One name for all exchanges before the same agreement: some may have failed in the next one.
                roll = f"exchange{upcoming.number}"
                silent = self._ledger.call_roll(
                    upcoming, roll, find_gone=generation.find_gone, deadline=Deadline(ROLL_CALL_S)
                )
                alarm = self._ledger.read_alarm(upcoming, deadline=Deadline(_STORE_S))
        except StoreLostError as lost:
            return GroupFailedError(f"{what} failed: {error}; {lost}", missing=lost.missing)
        if alarm is not None:
            return PeerFailedError(f"{what} was given up", ranks={alarm.rank: alarm.message})
        if not silent:
            return GroupFailedError(f"{what} failed: {error}")
        waited = f"waited {deadline.timeout_s:.3g} s for" if error.timed_out else "lost its connection to"
        blamed = generation.blame(silent, "")
        named = ", ".join(f"rank {failure.rank} on {failure.host}{failure.message}" for failure in blamed)
        return GroupFailedError(f"{what} {waited} {named}", missing=[failure.rank for failure in blamed])

    def _count(self, nbytes: int, began: float) -> None:
        self.traffic = Traffic(
            nbytes=self.traffic.nbytes + nbytes,
            calls=self.traffic.calls + 1,
            seconds=self.traffic.seconds + time.monotonic() - began,
        )


def _buffer(data: bytes, nbytes: int) -> torch.Tensor:
    """`nbytes` of memory of our own, beginning with `data`."""
    buffer = np.zeros(nbytes, dtype=np.uint8)
    buffer[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    return torch.from_numpy(buffer)
