"""The trainer's side of a stream: publish one version after another, deltas or full, from one process or many ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gpusync.digest import ALGORITHMS
from gpusync.errors import PublishError
from gpusync.hooks import Hook, load_hook
from gpusync.publish.attempt import Attempt
from gpusync.publish.base_check import check_base
from gpusync.publish.encode import PUBLISH_ENCODINGS
from gpusync.publish.outcome import Settings, Target
from gpusync.publish.ranks import open_ranks, take_step
from gpusync.publish.report import PublishReport
from gpusync.publish.snapshot import MemorySnapshot, Snapshot, StreamSnapshot
from gpusync.publish.start import Start, choose_start
from gpusync.publish.state import PublishedState
from gpusync.publish.tensors import Source

_MAX_WORKERS = 16


class Publisher:
    """Publishes to `source_dir`. Every rank of a `group` makes one and calls the same methods in the same order.

    `base_dir` is the checkpoint the engines start from, as bytes: deltas are made against it, whatever the trainer's
    own export looks like. It may be left out where the stream begins, or is resumed, with a full version. It is
    compared with the checksums in the stream, when a stream is resumed, else before the first delta.

    - `encoding`: "gpusync" is our own, the smallest form; "xor" and "overwrite" are read by slime's receiver too.
    - `checksum`: "xxh3-128", "blake3" or "adler32", of each tensor's new state.
    - `group`: a `torch.distributed` process group; None is this process alone.
    - `post_write_hook(version_dir)`: a callable or an import path; runs on each rank after its shards, and on rank 0
      again after the index.
    - `workers`: threads that encode; each holds one tensor at a time.
    - `shard_bytes`: a shard is written when so many bytes have come together; bounds memory.
    - `stream_id`: a UUID by default; tells this run's versions from another's.
    - `resume`: go on after the newest version in `source_dir`, in its stream; a new stream where there is none. Reads
      what the stream's checksums speak of in `base_dir`.
    - `full_every`: every n-th version is a full one; 0: none is.
    - `base_version`: the version whose state `base_dir` holds, if that is not the engines' own base.
    - `keep_snapshot`: hold the readers' state in memory. False reads it back from `base_dir` and the stream for every
      publish: slower, in the memory of a few tensors.

    What it cannot begin with raises a GpusyncError, on every rank: PublishError for a base that is not the version it
    is taken for.
    """

    def __init__(
        self,
        source_dir: str | os.PathLike[str],
        *,
        base_dir: str | os.PathLike[str] | None = None,
        encoding: str = "gpusync",
        checksum: str = "xxh3-128",
        group: Any | None = None,
        post_write_hook: str | Hook | None = None,
        workers: int | None = None,
        shard_bytes: int = 1 << 30,
        stream_id: str | None = None,
        resume: bool = False,
        full_every: int = 0,
        base_version: int = 0,
        keep_snapshot: bool = True,
    ) -> None:
        self._ranks = open_ranks(group)
        self._base_dir = None if base_dir is None else Path(base_dir)
        self._base_version = base_version
        self._full_every = full_every

        def begin() -> Start:
            _check_arguments(encoding=encoding, checksum=checksum, shard_bytes=shard_bytes, full_every=full_every)
            self._hook = load_hook(post_write_hook, what="post_write_hook")
            self._state = PublishedState(source_dir, base_dir=base_dir, base_version=base_version)
            return choose_start(source_dir, stream_id=stream_id, resume=resume, base_version=base_version)

        # Rank 0's start counts: another rank may not see the newest version yet.
        start = take_step(self._ranks, "opening the publisher", begin)[0]
        self._snapshot: Snapshot = MemorySnapshot(self._state) if keep_snapshot else StreamSnapshot(self._state)
        self._settings = Settings(
            source_dir=Path(source_dir),
            encoding=encoding,
            checksum=checksum,
            stream_id=start.stream_id,
            shard_bytes=shard_bytes,
            workers=min(_MAX_WORKERS, os.cpu_count() or 1) if workers is None else workers,
            hook=self._hook,
        )
        self._is_base_checked = False
        if start.resumes:
            self._check_base(start.version)
            take_step(self._ranks, "resuming the stream", lambda: self._state.resume(start.version, base_needed=False))

    @property
    def version(self) -> int:
        """The newest version published; before the first, what it will build on: 0, or where the stream is resumed."""
        return self._state.version

    @property
    def stream_id(self) -> str:
        """What tells this stream from another in the same place."""
        return self._settings.stream_id

    def publish(
        self, named_tensors: Source, *, version: int | None = None, base_version: int | None = None
    ) -> PublishReport:
        """Publish what changed since the last version, as a delta (or, by `full_every`, a full version).

        `named_tensors`: a mapping, an iterable of (name, tensor) or a checkpoint directory. A tensor is a torch tensor,
        a numpy array (bfloat16: of ml_dtypes) or `StoredBytes`. Those that are missing are unchanged; a version may
        change nothing. Each rank may offer its own; what two ranks offer must be equal, and is written once. `version`:
        by default the next one.

        `base_version`: an older version to make a delta on instead, whatever `full_every` says: a shortcut for readers
        that are still there. All others reach it too, from where that version's chain starts; later deltas build on it.
        Its state is read back from `base_dir` and the stream, tensor by tensor; a tensor that no rank offers is
        compared with it as well.

        A tensor that the readers' checkpoint does not have is left out, with a warning: `publish_full` adds it. If it
        has none of those offered, that is an error.

        A tensor that changes while it is published may be published as a mixture of both states, which every reader
        gets alike; the next publish makes it good.

        On return the version is durable. On any error nothing is visible and the same can be tried again: PublishError
        (taken version, another publisher that seems to write it, nothing to make a delta against, a wrong base, write
        failure, different bytes on two ranks ...),
        LayoutError (a tensor of another form than the readers hold), ChainError (a `base_version` that cannot be read
        back), HookError; PeerFailedError on the ranks that were not at fault. What an iterator raises is raised as it
        is. There is one exception: if the hook fails after the index, and the filesystem does not let the index be
        removed, the version is published, `version` says so, and HookError is raised.
        """
        version = self.version + 1 if version is None else version
        if base_version is None and self._full_every and version % self._full_every == 0:
            return self.publish_full(named_tensors, version=version)
        base_version = self.version if base_version is None else base_version
        target = Target(
            version=version, base_version=base_version, newest=self.version, encoding=self._settings.encoding
        )
        # Nothing is published yet: afterwards the state is that of the stream, not of the base.
        if not self._is_base_checked and self.version == self._base_version:
            self._check_base(self.version)
        return self._attempt(named_tensors, target)

    def publish_full(
        self, named_tensors: Source, *, side_files: str | os.PathLike[str] | None = None, version: int | None = None
    ) -> PublishReport:
        """Publish a full version, which readers can start from; later deltas build on it. Otherwise as `publish`.

        A tensor that the readers hold and no rank offers is written as it is, which takes `base_dir` or a full version
        before this one; one they do not hold is new. Side files
        (`*.json *.txt *.model *.jinja`, no index, never code) come from the directory `side_files`, by default from
        `base_dir`.
        """
        version = self.version + 1 if version is None else version
        directory = self._base_dir if side_files is None else Path(side_files)
        target = Target(
            version=version, base_version=self.version, newest=self.version, encoding=None, side_files=directory
        )
        return self._attempt(named_tensors, target)

    def _check_base(self, newest: int) -> None:
        def check() -> None:
            if self._state.base is None:
                return
            check_base(
                self._state.base,
                base_version=self._base_version,
                source_dir=self._settings.source_dir,
                newest=newest,
                rank=self._ranks.rank,
                size=self._ranks.size,
                workers=self._settings.workers,
            )

        take_step(self._ranks, "checking the base", check)
        self._is_base_checked = True

    def _attempt(self, named_tensors: Source, target: Target) -> PublishReport:
        attempt = Attempt(settings=self._settings, ranks=self._ranks, snapshot=self._snapshot, target=target)
        try:
            return attempt.run(named_tensors)
        finally:
            attempt.close()
            self._snapshot.close()


def publish_directories(
    source_dir: str | os.PathLike[str],
    *,
    base_dir: str | os.PathLike[str] | None,
    new_dir: str | os.PathLike[str],
    full: bool = False,
    version: int | None = None,
    **settings: Any,
) -> PublishReport:
    """Publish one version that turns the checkpoint in `base_dir` into the one in `new_dir`; holds neither in memory.

    `full`: the whole of `new_dir` with its side files; `base_dir` may be None then, if `new_dir` has all tensors of the
    stream. `settings` are the Publisher's
    (`encoding`, `checksum`, `resume`, `base_version` ...). Errors as Publisher and its `publish`.
    """
    publisher = Publisher(source_dir, base_dir=base_dir, keep_snapshot=False, **settings)
    if full:
        return publisher.publish_full(new_dir, side_files=new_dir, version=version)
    return publisher.publish(new_dir, version=version)


def _check_arguments(*, encoding: str, checksum: str, shard_bytes: int, full_every: int) -> None:
    for what, known, found in (("encoding", PUBLISH_ENCODINGS, encoding), ("checksum", ALGORITHMS, checksum)):
        if found not in known:
            raise PublishError(f"unknown {what}", expected=f"one of {', '.join(known)}", found=found)
    if shard_bytes < 1 or full_every < 0:
        expected = "shard_bytes of 1 or more, full_every of 0 or more"
        raise PublishError("impossible size", expected=expected, found=f"{shard_bytes}, {full_every}")
