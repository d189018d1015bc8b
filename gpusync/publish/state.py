"""What the readers of a stream hold at one version, read back from what was published: anchor and deltas after it.

The anchor is a whole checkpoint: the engines' base, or the newest full version. Read tensor by tensor, in pieces where
no delta touched it. Writes nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from gpusync.codec import U8, DeltaDecoder, Payload, open_delta, would_be
from gpusync.digest import new_digest
from gpusync.errors import ChainError, DigestMismatchError, VersionMissingError
from gpusync.plan import Applied, Link, plan_pull
from gpusync.publish.tensors import TensorForm
from gpusync.stream import (
    Checkpoint,
    OpenFiles,
    PublishedVersion,
    StoredTensor,
    check_against,
    element_bytes,
    is_float_order,
    read_checkpoint,
    read_index,
    read_version,
)


class PublishedState:
    """The tensors of version `version`. Several threads may read; `resume` and `follow` come between publishes only.

    Without a base and before the first full version nothing is known: `is_known` is False then.
    """

    def __init__(
        self, source_dir: str | os.PathLike[str], *, base_dir: str | os.PathLike[str] | None, base_version: int = 0
    ) -> None:
        """At `base_version`, whose state `base_dir` holds. Errors as `read_checkpoint`."""
        self._source_dir = Path(source_dir)
        self._base_dir = base_dir
        self._base_version = base_version
        self._anchor: Checkpoint | PublishedVersion | None = None
        self._anchor_version = base_version
        self._forms: Mapping[str, TensorForm] | None = None
        self._chain: list[int] = []
        self._touched: set[str] = set()
        self._lock = threading.RLock()
        self._files: OpenFiles | None = None
        self._deltas: dict[int, PublishedVersion] = {}
        self.version = base_version
        if base_dir is not None:
            self._anchor = read_checkpoint(base_dir, follow_links=True)
            self._forms = _forms(self._anchor.tensors)

    @property
    def is_known(self) -> bool:
        return self._forms is not None

    @property
    def names(self) -> Collection[str]:
        return () if self._forms is None else self._forms.keys()

    def form(self, name: str) -> TensorForm | None:
        return None if self._forms is None else self._forms.get(name)

    def open(self, name: str) -> U8 | Payload | None:
        """The tensor's bytes, None for a tensor that is not there. What is read stays valid until `close`.

        Raises what reading a stream raises, and DigestMismatchError if the stream does not give what it promises.
        """
        form = self.form(name)
        if form is None:
            return None
        with self._lock:
            anchor, files = self._read_anchor(), self._open_files()
        with anchor.open_tensor(name, files) as source:
            return self._rebuild(name, form, source, files) if name in self._touched else source

    def resume(self, version: int) -> None:
        """Be at `version`, along the chain that its readers follow. Errors as `plan_pull`; ChainError if the chain
        starts at a checkpoint that is not here.
        """
        start = self._anchor_version if self.is_known else None
        plan = plan_pull(applied=Applied(version=start), target=version, lookup=self._look_up)
        if plan.seed == "full":
            self._anchor = anchor = read_version(self._source_dir, plan.seed_version)
            self._move_anchor(plan.seed_version, _forms(anchor.tensors))
        elif not self.is_known or plan.seed_version != self._anchor_version:
            raise ChainError(
                "cannot resume the stream: its deltas start at a checkpoint that is not here",
                version=version,
                expected=f"the checkpoint of version {plan.seed_version}",
                found=f"that of version {self._anchor_version}" if self.is_known else "no base_dir",
            )
        for link in plan.chain:
            self.follow(link, changed=self._delta(link).tensors)

    def follow(self, version: int, *, changed: Collection[str]) -> None:
        """Be at `version`, a delta just published on top of this one; `changed` names its payloads. Reads nothing."""
        if self.is_known:
            self._chain.append(version)
            self._touched.update(changed)
        self.version = version

    def follow_full(self, version: int, *, forms: Mapping[str, TensorForm]) -> None:
        """Be at `version`, a full version just published that holds `forms`. Reads nothing: another rank's files may
        not be visible here yet.
        """
        self._anchor = None
        self._move_anchor(version, forms)

    def branch(self, version: int) -> PublishedState:
        """The state of an older version, read back as `resume` does; this one stays as it is. Errors as `resume`."""
        if self._base_dir is None or version < self._base_version:
            older = PublishedState(self._source_dir, base_dir=None)
        else:
            older = PublishedState(self._source_dir, base_dir=self._base_dir, base_version=self._base_version)
        if not (older.is_known and version == self._base_version):
            older.resume(version)
        return older

    def adopt(self, other: PublishedState) -> None:
        """Be where `other`, a state of the same stream, is. `other` is of no further use."""
        self.close()
        self._anchor, self._anchor_version = other._anchor, other._anchor_version
        self._forms, self._chain, self._touched = other._forms, other._chain, other._touched
        self.version = other.version

    def close(self) -> None:
        """Close files and forget headers; the next `open` reads them again."""
        with self._lock:
            if self._files is not None:
                self._files.close()
            self._files = None
            self._deltas.clear()

    def _move_anchor(self, version: int, forms: Mapping[str, TensorForm]) -> None:
        self.close()
        self._anchor_version = self.version = version
        self._forms = forms
        self._chain.clear()
        self._touched.clear()

    def _read_anchor(self) -> Checkpoint | PublishedVersion:
        if self._anchor is None:
            self._anchor = read_version(self._source_dir, self._anchor_version)
        return self._anchor

    def _open_files(self) -> OpenFiles:
        if self._files is None:
            self._files = OpenFiles()
        return self._files

    def _look_up(self, version: int) -> Link | None:
        try:
            index = read_index(self._source_dir, version)
        except VersionMissingError:
            return None
        return Link(version=version, base_version=index.base_version, digest=index.digest, stream_id=index.stream_id)

    def _delta(self, version: int) -> PublishedVersion:
        with self._lock:
            found = self._deltas.get(version)
            if found is None:
                found = self._deltas[version] = read_version(self._source_dir, version)
                check_against(found, self._read_anchor().tensors)
            return found

    def _rebuild(self, name: str, form: TensorForm, source: Payload, files: OpenFiles) -> U8:
        deltas = [delta for delta in map(self._delta, self._chain) if name in delta.tensors]
        decoders = [_open_decoder(delta, name, form, files) for delta in deltas]
        rebuilt = np.empty(form.nbytes, np.uint8)
        for offset, _, new in would_be(source, decoders, nbytes=form.nbytes):
            rebuilt[offset : offset + len(new)] = new
        _verify(rebuilt, deltas[-1], name)
        return rebuilt


def _forms(tensors: Mapping[str, StoredTensor]) -> dict[str, TensorForm]:
    return {name: TensorForm(dtype=t.dtype, shape=tuple(t.shape), nbytes=t.nbytes) for name, t in tensors.items()}


def _open_decoder(delta: PublishedVersion, name: str, form: TensorForm, files: OpenFiles) -> DeltaDecoder:
    with delta.open_payload(name, files) as payload:
        return open_delta(
            payload,
            encoding=delta.index.delta_encoding or "",
            nbytes=form.nbytes,
            element_bytes=element_bytes(form.dtype),
            float_order=is_float_order(form.dtype),
            where=delta.where(delta.tensors[name]),
        )


def _verify(rebuilt: U8, delta: PublishedVersion, name: str) -> None:
    stored = delta.tensors[name]
    digest = new_digest(delta.index.checksum_format or "")
    digest.update(rebuilt)
    if stored.checksum != digest.hexdigest():
        raise DigestMismatchError(
            "the stream does not give the state it promises, or its base is another one",
            where=delta.where(stored),
            expected=stored.checksum,
            found=digest.hexdigest(),
        )
