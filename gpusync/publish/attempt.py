"""One attempt to publish one version, on this rank: its steps in order, and their undoing.

Every step is taken by all ranks together. The index comes last: before it nothing is visible to a reader, and whatever
fails removes this attempt's files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpusync.errors import GpusyncError, HookError, PeerFailedError, Where
from gpusync.hooks import run_hook
from gpusync.publish.changes import Change
from gpusync.publish.duplicates import Manifest, Seen, check_agreement, choose_owners, stored_in_vain
from gpusync.publish.encode import Encoded, TensorEncoder
from gpusync.publish.fill import fill_full, fill_shortcut
from gpusync.publish.opening import Intent, check_intents, check_names, check_target, open_older, tell_unknown
from gpusync.publish.outcome import (
    Settings,
    Target,
    Written,
    make_report,
    merge_changed,
    merge_forms,
    merge_index,
    merge_moved,
)
from gpusync.publish.pool import drain, map_in_order
from gpusync.publish.ranks import GroupFailedError, Ranks, take_step
from gpusync.publish.report import PublishReport, Stopwatch
from gpusync.publish.shards import ShardSet, remove_leftovers
from gpusync.publish.side_files import copy_side_file, list_side_files
from gpusync.publish.snapshot import Advance, Snapshot, StreamSnapshot
from gpusync.publish.state import PublishedState
from gpusync.publish.tensors import NamedTensors, Offer, Source, TensorForm, iterate_offers, open_source
from gpusync.stream import INDEX_NAME, make_version_directory, remove_file, version_path, write_index

logger = logging.getLogger("gpusync.publish")


@dataclass(slots=True, kw_only=True)
class _Mine:
    """What this rank has found so far."""

    manifest: dict[str, Seen] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


class Attempt:
    """Good for one `run`."""

    def __init__(self, *, settings: Settings, ranks: Ranks, snapshot: Snapshot, target: Target) -> None:
        self._settings = settings
        self._ranks = ranks
        self._snapshot = snapshot
        self._target = target
        self._directory = version_path(settings.source_dir, target.version)
        self._where = Where(path=self._directory, version=target.version)
        self._older: PublishedState | None = None
        self._watch = Stopwatch()
        self._mine = _Mine()
        self._shards: ShardSet | None = None
        self._side_files: list[Path] = []
        self._hook_problem: HookError | None = None

    def run(self, source: Source) -> PublishReport:
        """Publish, and advance the snapshot. If it raises nothing of this attempt is visible, but for the two cases
        that `_commit` and `GroupFailedError` tell of, and the snapshot is where it was.
        """
        try:
            named_tensors, owners = self._begin(source)
            manifests = self._encode(named_tensors, owners)
            written = self._settle(manifests)
        except BaseException:
            self._abandon()
            raise
        try:
            outcomes = self._commit(manifests, written)
        except GroupFailedError:
            # In doubt: another rank may have published. Its files must stay; whoever resumes the stream will see.
            raise
        except BaseException:
            self._abandon()
            raise
        self._advance(manifests, written)
        self._raise_hook_problem(outcomes)
        return make_report(
            target=self._target,
            settings=self._settings,
            manifests=manifests,
            written=written,
            index_bytes=sum(nbytes for nbytes, _ in outcomes),
            path=self._directory,
            seconds=self._watch.seconds(),
            warnings=self._mine.warnings,
        )

    def close(self) -> None:
        """Let go of the files of an older state, and of this attempt's own."""
        if self._shards is not None:
            self._shards.close()
        if self._older is not None:
            self._older.close()

    def _begin(self, source: Source) -> tuple[NamedTensors, dict[str, int]]:
        """Agree on what is published; make the directory. Returns the tensors, and which rank writes which, where that
        is known.
        """
        opened: list[NamedTensors] = []

        def look() -> tuple[Intent, list[str] | None]:
            check_target(self._target, self._snapshot, self._directory, where=self._where)
            self._older = open_older(self._snapshot, self._target, self._settings, where=self._where)
            opened.append(named_tensors := open_source(source))
            names = list(named_tensors) if isinstance(named_tensors, Mapping) else None
            return (self._target, self._settings.checksum, self._settings.stream_id), names

        plans = take_step(self._ranks, "looking at the version", look, where=self._where)
        check_intents([intent for intent, _ in plans], where=self._where)
        if all(names is not None for _, names in plans):
            check_names([names or () for _, names in plans], self._target, self._snapshot, where=self._where)
        take_step(self._ranks, "making the version directory", self._make_directory, where=self._where)
        return opened[0], choose_owners([names for _, names in plans])

    def _make_directory(self) -> None:
        make_version_directory(self._directory)
        stubborn = remove_leftovers(self._directory, rank=self._ranks.rank, size=self._ranks.size)
        for name in stubborn:
            self._warn(f"{self._directory / name} of an earlier attempt cannot be removed")
        self._shards = ShardSet(
            self._directory,
            is_full=self._target.is_full,
            rank=self._ranks.rank,
            size=self._ranks.size,
            shard_bytes=self._settings.shard_bytes,
        )

    def _encode(self, named_tensors: NamedTensors, owners: Mapping[str, int]) -> Sequence[Manifest]:
        encoder = self._encoder()

        def encode(offer: Offer) -> Encoded:
            is_mine = owners.get(offer.name, self._ranks.rank) == self._ranks.rank
            return encoder.encode(offer) if is_mine else encoder.identify_only(offer)

        def work() -> Manifest:
            is_mapping = isinstance(named_tensors, Mapping)
            named = iter(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
            try:
                offers = self._timed(iterate_offers(named, copy=not is_mapping))
                for encoded in map_in_order(encode, offers, workers=self._settings.workers):
                    self._take(encoded)
            except Exception:
                # Others may wait in a collective that the iterator's next step would take part in.
                if self._ranks.size > 1:
                    drain(named)
                raise
            return self._mine.manifest

        manifests = take_step(self._ranks, "encoding", work, where=self._where)
        check_agreement(manifests)
        check_names(manifests, self._target, self._snapshot, where=self._where)
        if self._mine.unknown:
            self._warn(tell_unknown(self._mine.unknown, offered=len(self._mine.manifest)))
        return manifests

    def _encoder(self) -> TensorEncoder:
        return TensorEncoder(
            snapshot=self._snapshot,
            base=self._snapshot if self._older is None else StreamSnapshot(self._older),
            encoding=self._target.encoding,
            checksum=self._settings.checksum,
            identify=self._ranks.size > 1,
            watch=self._watch,
            version=self._target.version,
        )

    def _timed(self, offers: Iterator[Offer]) -> Iterator[Offer]:
        """What the trainer takes to make its tensors ready, and the copy to the host, is a stage too."""
        while True:
            with self._watch.stage("offer"):
                offer = next(offers, None)
            if offer is None:
                return
            yield offer

    def _take(self, encoded: Encoded) -> None:
        self._mine.manifest[encoded.name] = Seen(
            form=encoded.form,
            identity=encoded.identity,
            written_as=encoded.written_as,
            changed_bytes=encoded.changed_bytes,
            moved=encoded.moved,
        )
        if encoded.first and not self._target.is_full and self._snapshot.lacks(encoded.name):
            self._mine.unknown.append(encoded.name)
        change = encoded.change
        if change is not None and self._snapshot.keeps and (encoded.moved or encoded.first):
            self._mine.changes[encoded.name] = change
        if encoded.stored is not None:
            with self._watch.stage("write"):
                self._open_shards().add(encoded.stored)

    def _settle(self, manifests: Sequence[Manifest]) -> Sequence[Written]:
        """Write what is left to write, each tensor on one rank; then the hook, on every rank that wrote."""
        shards = self._open_shards()

        def work() -> Written:
            filled: dict[str, TensorForm] = {}
            with self._watch.stage("write"):
                shards.drop(stored_in_vain(manifests, self._ranks.rank))
                if self._ranks.rank == 0:
                    filled = self._fill(manifests)
                    self._copy_side_files()
                shards.flush()
            if shards.files:
                self._run_hook()
            # Each rank its own: another's files may become visible here late.
            shards.check()
            return Written(
                files=shards.files,
                weight_map=shards.weight_map,
                payload_checksums=shards.payload_checksums,
                filled=filled,
            )

        return take_step(self._ranks, "writing", work, where=self._where)

    def _fill(self, manifests: Sequence[Manifest]) -> dict[str, TensorForm]:
        """A tensor that no rank offered is as in the newest version, which a delta on that need not say."""
        if not (self._target.is_full or self._target.is_shortcut):
            return {}
        names = set(self._snapshot.names).difference(*manifests)
        encoder, keep = self._encoder(), self._open_shards().add
        if self._target.is_full:
            return fill_full(names, encoder=encoder, snapshot=self._snapshot, keep=keep, where=self._where)
        workers = self._settings.workers
        return fill_shortcut(
            names, encoder=encoder, snapshot=self._snapshot, keep=keep, where=self._where, workers=workers
        )

    def _copy_side_files(self) -> None:
        if self._target.side_files is None:
            return
        for path in list_side_files(self._target.side_files):
            self._side_files.append(self._directory / path.name)
            copy_side_file(path, self._directory)

    def _commit(self, manifests: Sequence[Manifest], written: Sequence[Written]) -> list[tuple[int, str | None]]:
        """Publish: the index, by rank 0, and the hook once more. Returns (bytes of the index, problem) by rank.

        If the hook fails the index is withdrawn. Where the filesystem does not let it be removed the version stays
        published, and the problem is returned instead of raised.
        """

        def work() -> tuple[int, str | None]:
            if self._ranks.rank != 0:
                return 0, None
            index = merge_index(
                target=self._target,
                settings=self._settings,
                forms=merge_forms(manifests, written),
                written=written,
                where=self._where,
            )
            with self._watch.stage("write"):
                write_index(self._directory, index)
            try:
                self._run_hook()
            except HookError as problem:
                if remove_file(self._directory / INDEX_NAME):
                    raise
                self._hook_problem = problem
                return len(index), f"{problem} (and the index cannot be withdrawn: the version is published)"
            return len(index), None

        return take_step(self._ranks, "publishing the index", work, where=self._where)

    def _run_hook(self) -> None:
        with self._watch.stage("hook"):
            run_hook(self._settings.hook, str(self._directory), what="post_write_hook", where=self._where)

    def _raise_hook_problem(self, outcomes: Sequence[tuple[int, str | None]]) -> None:
        failed = {rank: problem for rank, (_, problem) in enumerate(outcomes) if problem is not None}
        if self._hook_problem is not None:
            raise self._hook_problem
        if failed:
            raise PeerFailedError("the hook failed on another rank after the index", ranks=failed, where=self._where)

    def _abandon(self) -> None:
        """Remove the files of this attempt, as far as the filesystem lets it, and the directory if it is empty."""
        for path in self._side_files:
            remove_file(path)
        if self._shards is not None:
            self._shards.remove()
        with suppress(OSError):
            self._directory.rmdir()

    def _advance(self, manifests: Sequence[Manifest], written: Sequence[Written]) -> None:
        self._snapshot.advance(
            Advance(
                version=self._target.version,
                is_full=self._target.is_full,
                changes=self._mine.changes,
                forms=merge_forms(manifests, written),
                changed=merge_changed(manifests, written),
                moved=merge_moved(manifests),
                older=self._older,
            )
        )

    def _warn(self, text: str) -> None:
        logger.warning("%s", text)
        self._mine.warnings.append(text)

    def _open_shards(self) -> ShardSet:
        if self._shards is None:
            raise GpusyncError("no version directory was made", where=self._where)
        return self._shards
