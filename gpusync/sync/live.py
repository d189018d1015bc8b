"""The model that serves, as one rank sees it: where its tensors live, which version they are, what they were before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gpusync.digest import DigestReport, Shards
from gpusync.errors import GpusyncError, LayoutError
from gpusync.layout import (
    DerivedRegistry,
    LayoutMap,
    ReadTensor,
    attach,
    compare,
    identify,
    named_tensors,
    trace,
)
from gpusync.mirror.local import read_local_version
from gpusync.mirror.look import Sources
from gpusync.plan import Applied
from gpusync.store.casts import CastStore
from gpusync.store.memory import Memory
from gpusync.store.rank import RankStore
from gpusync.stream import ByteSource, Checkpoint, OpenFiles, StoredTensor, read_checkpoint
from gpusync.sync.checkpoints import reader_of, torch_tensors

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
POLL_S = 0.05


class LiveModel:
    """`applied` is what is live and verified; its version is None when that is unknown."""

    layout: LayoutMap
    params: Mapping[str, torch.Tensor]
    tensors: Mapping[str, StoredTensor]
    store: RankStore

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        load_weights: LoadWeights,
        twin: torch.nn.Module | None,
        layout: LayoutMap | None,
        derived: DerivedRegistry,
        sources: Sources,
        local_checkpoint_dir: Path,
        choose_memory: Callable[[Mapping[str, torch.Tensor]], Memory],
    ) -> None:
        self._model, self._load_weights, self._twin, self._derived = model, load_weights, twin, derived
        self._sources, self._local = sources, local_checkpoint_dir
        self._choose_memory = choose_memory
        self._traced = layout
        self.applied = Applied()

    @property
    def version(self) -> int | None:
        return self.applied.version

    def trace(self) -> None:
        """Find out where the loader puts every tensor of the base, and that it is there in the model that serves."""
        base = self._sources.read_base()
        if self._traced is None:
            traced, is_twin = (self._model, False) if self._twin is None else (self._twin, True)
            self._traced = trace(traced, self._load_weights, base.tensors, derived=self._derived, is_twin=is_twin)
        self._traced.check_tensors(base.tensors)
        self.tensors = base.tensors
        self.bind()

    def bind(self) -> None:
        """The traced map with the params as they are now."""
        if self._traced is None:
            raise LayoutError("the layout was not traced")
        self.params = named_tensors(self._model)
        self.layout = attach(self._traced, self.params)[0]
        patched = {p.param for each in self.layout.placements.values() if each.is_patched for p in each.pieces}
        self.memory = self._choose_memory({name: self.params[name] for name in sorted(patched)})
        self.memory.warm_up()

    def identify(self) -> int | None:
        """Which known version the live bytes are."""
        with OpenFiles() as files:
            candidates = [(version, reader_of(checkpoint, files)) for version, checkpoint, _ in self._known_versions()]
            return identify(self.layout, self.params, candidates)

    def judge(
        self, version: int | None, digest: Callable[[Shards], DigestReport], *, staging_bytes: int
    ) -> dict[str, int]:
        """Judge the placements by the bytes of the version that all ranks are at, and make the store. Returns what
        this rank holds and can patch."""
        self.applied = Applied()
        casts = CastStore(self.layout, self.params, memory=self.memory)
        for known, checkpoint, applied in self._known_versions():
            if known == version:
                with OpenFiles() as files:
                    read = reader_of(checkpoint, files)
                    self.layout = self.layout.demoted(compare(self.layout, self.params, read))
                    casts = CastStore(self.layout, self.params, memory=self.memory)
                    casts.fill(read)
                self.applied = applied
                break
        self.store = RankStore(
            self.layout, self.params, memory=self.memory, casts=casts, digest=digest, staging_bytes=staging_bytes
        )
        return self.store.held_bytes()

    def forget(self) -> None:
        """What is live is not known any more."""
        self.applied = Applied()

    def open_base(self, files: OpenFiles, *, timeout_s: float) -> ReadTensor | None:
        """Reads the bytes of the live version, from this host's files, while `files` is open. Waits up to `timeout_s`
        for a fold that is behind; None where they do not hold it and will not."""
        deadline = time.monotonic() + timeout_s
        while True:
            for version, checkpoint, applied in self._known_versions():
                if version == self.version and dict(applied.digests).get(version) == self.applied.digests.get(version):
                    return reader_of(checkpoint, files)
            found = read_local_version(self._local)
            if (found is not None and (found[0].version or 0) > (self.version or 0)) or time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)

    def recompute(self, names: Iterable[str]) -> None:
        """Bring up to date what the engine derives from these tensors."""
        self._derived.recompute(self._model, self.layout.derived_modules(names))

    def load(self, directory: Path) -> None:
        """The ordinary reload where the engine has none of its own: all tensors through `load_weights`."""
        if self._twin is not None:
            raise GpusyncError("a reload needs the engine's own function where a twin was traced", path=directory)
        checkpoint = read_checkpoint(directory, follow_links=True)
        with OpenFiles() as files, torch.no_grad():
            self._load_weights(torch_tensors(checkpoint, files))
        self.recompute(self.tensors)

    def _known_versions(self) -> Iterator[tuple[int, Checkpoint, Applied]]:
        """Versions whose bytes this host has: what the mirror's files hold, and the base."""
        known = read_local_version(self._local)
        if known is not None:
            yield known[0].version or 0, known[1], known[0]
        yield 0, self._sources.read_base(), Applied(version=0)


class LazyBase:
    """A `ReadTensor` that is looked for when it is first needed."""

    def __init__(self, live: LiveModel, *, timeout_s: float) -> None:
        self._live, self._timeout_s = live, timeout_s
        self._files = OpenFiles()
        self._read: ReadTensor | None = None
        self._looked = False

    @property
    def reader(self) -> ReadTensor | None:
        if not self._looked:
            self._files.__enter__()
            self._read, self._looked = self._live.open_base(self._files, timeout_s=self._timeout_s), True
        return self._read

    def __call__(self, name: str) -> ByteSource:
        reader = self.reader
        if reader is None:
            raise GpusyncError("the bytes of the live version are not on this host", tensor=name)
        return reader(name)

    def close(self) -> None:
        if self._looked:
            self._files.__exit__(None, None, None)
            self._looked, self._read = False, None
