"""How one decision comes about, seen from one rank.

A verdict is posted to the store, then all verdicts are all-reduced, then the decision is recorded in the store. The
record is the decision: the first to write it wins, and everybody returns what is written. `ok` is written only by a
rank whose all-reduce completed and showed no failure, so it needs every rank's ok. From that follows what a rank knows
without the store: if it failed, or did not take part, or saw a failure, the decision cannot be `ok`. Only a rank that
gave its ok and can then not reach the store is in doubt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from gpusync.verdict.bounded import Deadline
from gpusync.verdict.channel import ChannelLostError
from gpusync.verdict.errors import InDoubtError, StoreLostError
from gpusync.verdict.generation import Generation
from gpusync.verdict.ledger import Agreement, Ledger
from gpusync.verdict.verdict import OK, Decision, Failure, PostedVerdict, Verdict, find_failures

# For the store, beyond the time-out of an agreement, which is for the ranks to come.
STORE_GRACE_S = 5.0
# In which those who saw a collective fail say that they are alive. Others look every 0.1 s.
ROLL_CALL_S = 2.0
_LOOK_S = 0.5


def decide(
    verdict: Verdict, agreement: Agreement, *, generation: Generation, ledger: Ledger, timeout_s: float
) -> Decision:
    """The decision on `agreement`. Every rank has to call it.

    Takes at most `timeout_s` for the ranks to come, ROLL_CALL_S to find out who did not, and about STORE_GRACE_S for
    each of posting and recording. Raises InDoubtError.
    """
    return _Voter(agreement, generation=generation, ledger=ledger, timeout_s=timeout_s).decide(verdict)


class _Voter:
    def __init__(self, agreement: Agreement, *, generation: Generation, ledger: Ledger, timeout_s: float) -> None:
        self._agreement = agreement
        self._generation = generation
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._grace: Deadline | None = None
        self._vote = OK

    @property
    def _store_deadline(self) -> Deadline:
        """One for all that is asked of the store once the ranks have come, or not come."""
        if self._grace is None:
            self._grace = Deadline(STORE_GRACE_S)
        return self._grace

    def decide(self, verdict: Verdict) -> Decision:
        vote = self._vote = self._post(verdict)
        if self._generation.lost is not None:
            return self._decide_as_outcast(self._generation.lost)
        try:
            failed, stale, high, low = self._reduce(vote)
        except ChannelLostError as error:
            return self._decide_without_all(vote, error)
        if stale and self._generation.stale is None:
            self._generation.stale = "another rank gave up an exchange of data"
        if high != -low:
            self._generation.lost = "the ranks decided on different things"
            return self._decide_failed(self._find_strays, certain=True)
        if failed:
            return self._decide_failed(self._find_failed, certain=True)
        return self._decide_ok()

    def _post(self, verdict: Verdict) -> Verdict:
        """What this rank votes: its verdict, or failed if the store cannot be told."""
        try:
            budget_s = min(STORE_GRACE_S, self._timeout_s / 2)
            self._ledger.post(self._agreement, verdict, deadline=Deadline(budget_s))
        except StoreLostError as error:
            return Verdict.of(error) if verdict.ok else verdict
        return verdict

    def _reduce(self, vote: Verdict) -> list[int]:
        """The largest of every rank's words: failed, stale, what is decided on and its negative."""
        tag = self._agreement.tag
        words = [int(not vote.ok), int(self._generation.stale is not None), tag, -tag]
        return self._generation.verdicts.reduce_max(words, deadline=Deadline(self._timeout_s), look=self._look)

    def _look(self) -> str | None:
        lost = None
        with contextlib.suppress(StoreLostError):
            lost = self._ledger.read_lost(self._agreement, deadline=Deadline(_LOOK_S))
        return lost or self._generation.tell_gone()

    def _decide_ok(self) -> Decision:
        try:
            decision = self._ledger.record(self._agreement, [], deadline=self._store_deadline)
        except StoreLostError as error:
            raise self._in_doubt(error) from error
        with contextlib.suppress(StoreLostError):
            self._ledger.sweep(self._agreement, deadline=self._store_deadline)
        return decision

    def _decide_failed(self, find: Callable[[], list[Failure]], *, certain: bool) -> Decision:
        """Failed, unless it was decided otherwise. `certain`: it cannot have been, though the store cannot be asked."""
        try:
            held = self._ledger.read_decision(self._agreement, deadline=self._store_deadline)
            if held is not None:
                return held
            failures = find() or [self._failure(self._generation.rank, "found no reason for a failure")]
            return self._ledger.record(self._agreement, failures, deadline=self._store_deadline)
        except StoreLostError as error:
            if not certain:
                raise self._in_doubt(error) from error
            mine = self._vote.message or f"cannot know which rank failed: {error}"
            return Decision(
                transaction=self._agreement.transaction,
                phase=self._agreement.phase,
                rank=self._generation.rank,
                failures=(self._failure(self._generation.rank, mine),),
            )

    def _decide_as_outcast(self, reason: str) -> Decision:
        """This rank cannot take part. The others may not know it yet, and wait for it."""
        self._mark_lost(reason)
        mine = self._failure(self._generation.rank, f"had lost its connections: {reason}")
        return self._decide_failed(lambda: [mine], certain=True)

    def _decide_without_all(self, vote: Verdict, error: ChannelLostError) -> Decision:
        """The all-reduce did not complete here. It may have elsewhere, and then the decision may stand already."""
        self._generation.lost = str(error)
        self._mark_lost(str(error))
        return self._decide_failed(lambda: self._find_silent(error), certain=not vote.ok)

    def _mark_lost(self, reason: str) -> None:
        with contextlib.suppress(StoreLostError):
            self._ledger.mark_lost(self._agreement, reason, deadline=self._store_deadline)

    def _find_silent(self, error: ChannelLostError) -> list[Failure]:
        """Whoever posted no verdict, or a failed one; if there is nobody, whoever went silent since."""
        find_gone, roll_call = self._generation.find_gone, Deadline(ROLL_CALL_S)
        name = f"agreement{self._agreement.number}"
        silent = self._ledger.call_roll(self._agreement, name, find_gone=find_gone, deadline=roll_call)
        posted, unposted = self._read_posted()
        failures = list(find_failures(posted, hosts=self._names))
        if unposted:
            when = f"within {self._timeout_s:.3g} s" if error.timed_out else "before the connections were lost"
            failures += self._generation.blame(unposted | find_gone(), f"posted no verdict on {self._agreement} {when}")
        if not failures:
            failures += self._generation.blame(silent, f"went silent after its verdict on {self._agreement}")
        return failures or [self._failure(self._generation.rank, f"lost its connections: {error}")]

    def _find_failed(self) -> list[Failure]:
        posted, unposted = self._read_posted()
        mute = [self._failure(rank, "took part without the group's store") for rank in sorted(unposted)]
        return [*find_failures(posted, hosts=self._names), *mute]

    def _find_strays(self) -> list[Failure]:
        """Ranks that decide on something else than rank 0 does."""
        posted, unposted = self._read_posted()
        subjects = {rank: f"phase `{post.phase}` of transaction `{post.transaction}`" for rank, post in posted.items()}
        subjects |= dict.fromkeys(unposted, "something else")
        return [
            self._failure(rank, f"decides on {subject}, not on {subjects[0]}")
            for rank, subject in sorted(subjects.items())
            if subject != subjects[0]
        ]

    def _read_posted(self) -> tuple[dict[int, PostedVerdict], set[int]]:
        """What was posted, and who posted nothing."""
        posted = self._ledger.read_posted(self._agreement, deadline=self._store_deadline)
        return posted, set(range(len(self._generation.roster.members))) - set(posted)

    @property
    def _names(self) -> dict[int, str]:
        return self._generation.roster.hosts.names

    def _failure(self, rank: int, message: str) -> Failure:
        return Failure(rank=rank, host=self._names[rank], message=message)

    def _in_doubt(self, error: StoreLostError) -> InDoubtError:
        return InDoubtError(
            f"the decision on {self._agreement} is not known here: {error}",
            transaction=self._agreement.transaction,
            phase=self._agreement.phase,
        )
