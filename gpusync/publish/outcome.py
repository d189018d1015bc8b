"""What a version is to be, and what became of it, put together from what every rank says. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpusync.errors import PublishError, Where
from gpusync.hooks import Hook
from gpusync.publish.duplicates import Manifest, Seen
from gpusync.publish.report import PublishReport
from gpusync.publish.tensors import TensorForm
from gpusync.stream import encode_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What stays the same from version to version. `hook` is the post-write hook."""

    source_dir: Path
    encoding: str
    checksum: str
    stream_id: str
    shard_bytes: int
    workers: int
    hook: Hook | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The version to be published. `encoding` None: a full version, with the side files of a directory.

    `newest` is the version before it, `base_version` the one it is made on: the same, but for a shortcut.
    """

    version: int
    base_version: int
    newest: int
    encoding: str | None
    side_files: Path | None = None

    @property
    def is_full(self) -> bool:
        return self.encoding is None

    @property
    def is_shortcut(self) -> bool:
        return not self.is_full and self.base_version != self.newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files of one rank, complete. `filled` are tensors nobody offered, taken from the snapshot."""

    files: Mapping[str, int]
    weight_map: Mapping[str, str]
    payload_checksums: Mapping[str, str]
    filled: Mapping[str, TensorForm]


def merge_forms(manifests: Sequence[Manifest], written: Sequence[Written]) -> dict[str, TensorForm]:
    """The forms of all tensors that were offered on any rank, and of those that were filled in."""
    forms = {name: seen.form for manifest in manifests for name, seen in manifest.items()}
    for rank in written:
        forms.update(rank.filled)
    return forms


def merge_changed(manifests: Sequence[Manifest], written: Sequence[Written]) -> set[str]:
    """The tensors in which a byte changed, since the version that the new one is made on."""
    offered = {name for manifest in manifests for name, seen in manifest.items() if seen.changed_bytes}
    return offered.union(*(rank.filled for rank in written))


def merge_moved(manifests: Sequence[Manifest]) -> set[str]:
    """The tensors in which a byte changed since the newest version."""
    return {name for manifest in manifests for name, seen in manifest.items() if seen.moved}


def merge_index(
    *, target: Target, settings: Settings, forms: Mapping[str, TensorForm], written: Sequence[Written], where: Where
) -> bytes:
    """The text of the version's index. Raises PublishError for a full version that readers would take for a delta."""
    weight_map = {name: file for rank in written for name, file in rank.weight_map.items()}
    if target.is_full and all(_is_byte_vector(forms[name]) for name in weight_map):
        raise PublishError("a full version of byte vectors only cannot be told from a delta", where=where)
    return encode_index(
        version=target.version,
        base_version=None if target.is_full else target.base_version,
        delta_encoding=target.encoding,
        checksum_format=settings.checksum,
        stream_id=settings.stream_id,
        weight_map=dict(sorted(weight_map.items())),
        shard_bytes={file: nbytes for rank in written for file, nbytes in rank.files.items()},
        payload_checksums={name: value for rank in written for name, value in rank.payload_checksums.items()},
        total_size=sum(form.nbytes for form in forms.values()) if target.is_full else None,
    )


def make_report(
    *,
    target: Target,
    settings: Settings,
    manifests: Sequence[Manifest],
    written: Sequence[Written],
    index_bytes: int,
    path: Path,
    seconds: Mapping[str, float],
    warnings: Sequence[str],
) -> PublishReport:
    """Counts every tensor once, as the rank that wrote it saw it."""
    offered: dict[str, Seen] = {}
    for manifest in manifests:
        for name, seen in manifest.items():
            if name not in offered or (seen.written_as and not offered[name].written_as):
                offered[name] = seen
    return PublishReport(
        version=target.version,
        base_version=None if target.is_full else target.base_version,
        kind="full" if target.is_full else "delta",
        encoding=target.encoding,
        checksum=settings.checksum,
        stream_id=settings.stream_id,
        path=str(path),
        ranks=len(manifests),
        tensors_offered=len(offered),
        tensors_changed=sum(1 for seen in offered.values() if seen.changed_bytes),
        bytes_offered=sum(seen.form.nbytes for seen in offered.values()),
        bytes_changed=sum(seen.changed_bytes for seen in offered.values()),
        wire_bytes=index_bytes + sum(nbytes for rank in written for nbytes in rank.files.values()),
        shards=sum(len(rank.files) for rank in written),
        forms=dict(Counter(seen.written_as for seen in offered.values() if seen.written_as)),
        seconds=seconds,
        warnings=tuple(warnings),
    )


def _is_byte_vector(form: TensorForm) -> bool:
    return form.dtype == "U8" and len(form.shape) == 1
