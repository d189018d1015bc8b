"""One gloo process group of our own, with waits that end and that can be told to end.

Verdicts and data have a channel each: a rank that failed goes to its verdict while others still wait in an exchange of
data, and the two must not be taken for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    AllreduceOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    TCPStore,
    Work,
)

from gpusync.verdict.bounded import LIBRARY_ERRORS, Deadline, call_bounded
from gpusync.verdict.errors import GroupFailedError, first_line
from gpusync.verdict.link import Address

# How often a waiting rank looks whether there is still something to wait for.
_LOOK_EVERY_S = 0.1
# gloo's own time-out comes first; this is for the case that it does not.
_SLACK_S = 2.0


class Collectives(Protocol):
    """What is used of torch's ProcessGroupGloo, whose stubs leave it out."""

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions) -> Work: ...

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work: ...


Start = Callable[[Collectives, timedelta], Work]
# Asked while waiting; a text is the reason to stop.
Look = Callable[[], str | None]


class ChannelLostError(GroupFailedError):
    """This operation did not complete here, though it may have elsewhere. The channel is of no more use.

    `interrupted`: it was given up because `look` said so.
    """

    def __init__(self, what: str, *, interrupted: bool = False, timed_out: bool = False) -> None:
        self.interrupted = interrupted
        self.timed_out = timed_out
        super().__init__(what)


class Channel:
    def __init__(self, group: Collectives) -> None:
        self._group: Collectives | None = group

    def reduce_max(self, words: Sequence[int], *, deadline: Deadline, look: Look) -> list[int]:
        """The largest of all ranks' words, word by word. int64."""
        tensor = torch.tensor(words, dtype=torch.int64)
        self.run([_all_reduce(tensor, ReduceOp.MAX)], deadline=deadline, look=look)
        return [int(word) for word in tensor.tolist()]

    def sum_in_place(self, tensor: torch.Tensor, *, deadline: Deadline, look: Look) -> None:
        self.run([_all_reduce(tensor, ReduceOp.SUM)], deadline=deadline, look=look)

    def run(self, starts: Sequence[Start], *, deadline: Deadline, look: Look) -> None:
        """Start all operations, then wait for each.

        Raises ChannelLostError, and closes the channel: what the operations write to may be written to until they end.
        """
        problem = self._try(starts, deadline, look)
        if problem is not None:
            self.close()
            raise problem

    def _try(self, starts: Sequence[Start], deadline: Deadline, look: Look) -> ChannelLostError | None:
        """Returns its failure. An error raised here would keep this frame, with it the operations, and with these the
        connections: the other ranks would not see them closed.
        """
        if self._group is None:
            return ChannelLostError("the channel was closed after an earlier failure")
        try:
            timeout = timedelta(seconds=max(deadline.left_s(), 0.001))
            works = [start(self._group, timeout) for start in starts]
            hard = Deadline(deadline.left_s() + _SLACK_S)
            for work in works:
                _wait(work, hard, look)
        except ChannelLostError as problem:
            return problem.with_traceback(None)
        except RuntimeError as error:
            return ChannelLostError(first_line(error), timed_out=deadline.expired)
        return None

    def close(self) -> None:
        """Close the connections. An operation that was given up holds them until it ends, by its own time-out."""
        if self._group is None:
            return
        # Destroying a gloo group waits for what it still does: in a thread, which must have the last reference. Not a
        # daemon: at exit the group must not be torn down under its feet.
        grave = _Grave(self._group)
        self._group = None
        try:
            threading.Thread(target=grave.bury, name="gpusync-closing-group").start()
        except RuntimeError:
            # The interpreter is on its way out and starts no threads any more.
            grave.bury()


class _Grave:
    """Drops the last reference to a group in the thread that calls `bury`."""

    def __init__(self, group: Collectives) -> None:
        self._group: Collectives | None = group

    def bury(self) -> None:
        self._group = None


def _wait(work: Work, deadline: Deadline, look: Look) -> None:
    """Return when `work` has succeeded; RuntimeError when it has failed, ChannelLostError when it is given up."""
    while True:
        was_completed = work.is_completed()
        try:
            work.wait(timedelta(seconds=_LOOK_EVERY_S))
        except RuntimeError:
            # Either it failed, or it is only not done yet: what was complete before the wait has failed.
            if was_completed:
                raise
        else:
            return
        if work.is_completed():
            continue
        if (reason := look()) is not None:
            raise ChannelLostError(reason, interrupted=True)
        if deadline.expired:
            raise ChannelLostError("the operation does not end", timed_out=True)


def open_channels(
    address: Address, *, names: Sequence[str], generation: int, rank: int, size: int, deadline: Deadline
) -> list[Channel]:
    """One channel per name, connected to all ranks. Every rank has to call it. Raises GroupFailedError."""
    timeout = timedelta(seconds=max(deadline.left_s(), 0.001))

    def connect() -> list[Collectives]:
        # A connection of its own: connecting the ranks waits in the store, which would keep the link from it.
        store = TCPStore(address.host, address.port, is_master=False, wait_for_workers=False, timeout=timeout)
        # Under a new prefix, so that the addresses of an earlier generation are not taken for those of this one.
        prefixes = [PrefixStore(f"gloo/{generation}/{name}", store) for name in names]
        return [cast(Collectives, ProcessGroupGloo(prefix, rank, size, timeout)) for prefix in prefixes]

    try:
        groups = call_bounded(connect, timeout_s=deadline.left_s() + _SLACK_S, name="gpusync-connecting")
    except LIBRARY_ERRORS as error:
        raise GroupFailedError(
            f"the ranks cannot be connected within {deadline.timeout_s:.3g} s: {first_line(error)}"
        ) from error
    return [Channel(group) for group in groups]


def broadcast(tensor: torch.Tensor, *, source: int) -> Start:
    """To be `run`: rank `source`'s tensor into everybody's."""

    def start(group: Collectives, timeout: timedelta) -> Work:
        options = BroadcastOptions()
        options.rootRank = source
        options.rootTensor = 0
        options.timeout = timeout
        return group.broadcast([tensor], options)

    return start


def _all_reduce(tensor: torch.Tensor, operation: ReduceOp.RedOpType) -> Start:
    def start(group: Collectives, timeout: timedelta) -> Work:
        options = AllreduceOptions()
        options.reduceOp = operation  # type: ignore[assignment]
        options.timeout = timeout
        return group.allreduce([tensor], options)

    return start
