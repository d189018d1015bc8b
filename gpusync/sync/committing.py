"""Committing what was prepared, on all ranks or on none."""

from __future__ import annotations

from gpusync.beside import without_collection
from gpusync.errors import DigestMismatchError, MirrorError, RefusedError
from gpusync.sync.rank import Rank
from gpusync.sync.report import Clock, Prepared
from gpusync.verdict import guard


@without_collection()
def commit_in_place(rank: Rank, prepared: Prepared, clock: Clock) -> None:
    """A collective. Where it raises, the old version is live on this rank again, unless it is an InDoubtError: then
    this rank has committed, and does not know whether the others have."""
    update, live = prepared.update, rank.live
    if update is None:
        raise RefusedError("nothing was prepared", version=prepared.version)

    def write() -> None:
        live.store.commit(update)
        live.recompute(update.names)
        with clock.stage("fingerprint"):
            wrong = live.store.verify(update) if rank.verifies_after else None
        if wrong is not None:
            raise DigestMismatchError(
                "live bytes are not what was verified before the commit", tensor=wrong, version=prepared.version
            )

    verdict = guard(write)
    decision = rank.team.agree(verdict, "commit")
    if not decision.ok:
        roll_back(rank, prepared, distrusts_live=isinstance(verdict.error, DigestMismatchError))
    decision.check(verdict, what=f"committing version {prepared.version}")


def roll_back(rank: Rank, prepared: Prepared, *, distrusts_live: bool = False) -> None:
    """Undo this rank's commit. Where that fails, or what was live before had been damaged, it says so: no version is
    live here, and none on the others once they hear of it at the next call. What a leader holds stays held: other ranks
    may still be reading old bytes."""
    update = prepared.update

    def undo() -> None:
        if update is not None:
            rank.live.store.roll_back(update)
            rank.live.recompute(update.names)

    if not guard(undo).ok or (distrusts_live and rank.live.identify() != rank.live.version):
        rank.live.forget()
    prepared.close()


def commit_by_reload(rank: Rank, prepared: Prepared, clock: Clock) -> None:
    """The engine's ordinary reload from the local checkpoint, once that holds the version. A collective."""
    with clock.stage("fold"):
        rank.team.step("folding the local checkpoint", lambda: rank.flush(rank.team.timeout_s), "flush")
    rank.live.forget()
    rank.team.step("reloading", lambda: rank.reload(rank.local_checkpoint_dir), "reload")
    rank.attach_again()
    if rank.live.version != prepared.version:
        raise MirrorError(
            "the reload did not bring the weights to the version",
            path=rank.local_checkpoint_dir,
            version=prepared.version,
            found=rank.live.version,
        )
