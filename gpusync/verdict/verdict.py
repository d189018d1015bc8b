"""One rank's result, and what the group makes of all of them. Pure, but for `guard`, which runs a rank's work.

A verdict is ok or failed. A decision is ok only when every verdict was, and every rank knows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gpusync.errors import NOWHERE, GpusyncError, PeerFailedError, Where
from gpusync.verdict.errors import GroupFailedError

MAX_MESSAGE_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`message` is None when all went well. `error` stays on this rank; everything else is told to the others.

    `is_consequence`: the rank gave up because another one had failed already, which is the failure to speak of.
    """

    message: str | None = None
    tensor: str | None = None
    error_type: str | None = None
    is_consequence: bool = False
    error: Exception | None = field(default=None, compare=False, repr=False)

    @property
    def ok(self) -> bool:
        return self.message is None

    @classmethod
    def failed(cls, message: str, *, tensor: str | None = None, error_type: str | None = None) -> Verdict:
        return cls(message=message, tensor=tensor, error_type=error_type)

    @classmethod
    def of(cls, error: Exception) -> Verdict:
        known = isinstance(error, GpusyncError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        return cls(
            message=message[:MAX_MESSAGE_CHARACTERS],
            tensor=error.tensor if isinstance(error, GpusyncError) else None,
            error_type=type(error).__name__,
            is_consequence=isinstance(error, PeerFailedError),
            error=error,
        )


OK = Verdict()


def guard(work: Callable[[], object]) -> Verdict:
    """Run `work`: the rank boundary. Whatever `Exception` it ends in is the verdict, with the error in it.

    The error keeps its traceback, and so whatever the frames below hold, until it is dropped or raised.
    """
    try:
        work()
    # A rank that left here with an exception would keep the others waiting in the next collective: out of memory, a
    # failed kernel launch and a bug alike have to become a verdict.
    except Exception as error:  # noqa: BLE001
        return Verdict.of(error)
    return OK


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why the group failed, as far as one rank is to blame. `host` is its name, for people."""

    rank: int
    host: str
    message: str
    tensor: str | None = None
    error_type: str | None = None

    @property
    def text(self) -> str:
        return f"on {self.host}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the group decided on (transaction, phase): the same on every rank that knows it. `rank` is the reader."""

    transaction: str
    phase: str
    rank: int
    failures: tuple[Failure, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.failures

    @property
    def messages(self) -> dict[int, str]:
        return {failure.rank: failure.text for failure in self.failures}

    def check(self, mine: Verdict, *, what: str, where: Where = NOWHERE) -> None:
        """Return if all is well. Else raise on every rank.

        The rank whose work failed raises its own error again, one that was late or gave up GroupFailedError or
        PeerFailedError, and a healthy rank PeerFailedError with the messages of those at fault.
        """
        if self.ok:
            return
        if mine.error is not None and not mine.is_consequence:
            raise mine.error
        if mine.message is not None and not mine.is_consequence:
            raise GpusyncError(mine.message, where=where, tensor=mine.tensor)
        if mine.ok and set(self.messages) == {self.rank}:
            raise GroupFailedError(f"{what} failed because of this rank, {self.messages[self.rank]}")
        raise PeerFailedError(f"{what} failed on another rank", ranks=self.messages, where=where)


def encode_verdict(verdict: Verdict, *, transaction: str, phase: str) -> str:
    """What is posted: which decision it is for, and the verdict without its error."""
    facts: dict[str, object] = {"transaction": transaction, "phase": phase}
    if not verdict.ok:
        facts |= {"message": verdict.message, "tensor": verdict.tensor, "error_type": verdict.error_type}
        facts |= {"is_consequence": verdict.is_consequence}
    return json.dumps(facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedVerdict:
    transaction: str
    phase: str
    verdict: Verdict


def parse_verdict(text: str) -> PostedVerdict:
    facts = json.loads(text)
    verdict = Verdict(
        message=facts.get("message"),
        tensor=facts.get("tensor"),
        error_type=facts.get("error_type"),
        is_consequence=facts.get("is_consequence", False),
    )
    return PostedVerdict(transaction=facts["transaction"], phase=facts["phase"], verdict=verdict)


def encode_failures(failures: Iterable[Failure]) -> str:
    """A decision's record. An empty list is the decision that all is well."""
    names = ("rank", "host", "message", "tensor", "error_type")
    return json.dumps([{name: getattr(failure, name) for name in names} for failure in failures])


def parse_failures(text: str) -> tuple[Failure, ...]:
    return tuple(Failure(**facts) for facts in json.loads(text))


def find_failures(posted: Mapping[int, PostedVerdict], *, hosts: Mapping[int, str]) -> tuple[Failure, ...]:
    """Of the failed verdicts those that are not the consequence of another; if all claim to be, all of them."""
    failed = {rank: post.verdict for rank, post in sorted(posted.items()) if not post.verdict.ok}
    roots = {rank: verdict for rank, verdict in failed.items() if not verdict.is_consequence}
    return tuple(
        Failure(
            rank=rank,
            host=hosts[rank],
            message=str(verdict.message),
            tensor=verdict.tensor,
            error_type=verdict.error_type,
        )
        for rank, verdict in (roots or failed).items()
    )
