"""The leader's part of a prepare: decode each delta of a chain once for this host, tell its ranks what to apply."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpusync.codec import open_delta
from gpusync.errors import DigestMismatchError, LayoutError, Where
from gpusync.mirror.change import Delta, apply_change, checked_payload, pending_changes
from gpusync.mirror.look import Sources, read_published
from gpusync.mirror.state import Checksum
from gpusync.mirror.workers import for_each
from gpusync.store.compact import CompactWriter, Step, full_step
from gpusync.store.tensor_update import TensorUpdate
from gpusync.stream import (
    ByteSource,
    BytesSource,
    Checkpoint,
    OpenFiles,
    PublishedVersion,
    StoredTensor,
    check_against,
    compare_duplicates,
    element_bytes,
    is_float_order,
    read_checkpoint,
)

ReadTensor = Callable[[str], ByteSource]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a version lies: `directory` is the `source_dir` of the stream, or stands in for one that holds it alone."""

    directory: Path
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """`wire_bytes` were read of payloads; `compact_bytes` are kept for the ranks."""

    updates: Mapping[str, TensorUpdate]
    wire_bytes: int
    compact_bytes: int


def decode_chain(places: Sequence[Place], base_dir: Path, path: Path, *, workers: int) -> Decoded:
    """Decode the deltas at `places`, ascending, into a compact file at `path`: what they do to every tensor that they
    change, in a fixed order. `base_dir` is a checkpoint with the tensors that they change.

    Every check of the payloads' form is made here; whether the result is right is for the digests to say. Raises what
    reading a version and what decoders raise; the file is of no use then.
    """
    tensors = read_checkpoint(base_dir, follow_links=True).tensors
    versions = [_read(place, base_dir, tensors) for place in places]
    changes = pending_changes(tensors, versions)
    steps: dict[str, list[Step]] = {name: [] for name in changes}
    writer = CompactWriter(path)
    try:
        with OpenFiles() as files:

            def decode(_: int, name: str) -> None:
                for delta in changes[name].deltas:
                    steps[name].append(_decode(delta, changes[name].base, writer, files))

            for_each(changes, decode, workers=workers, size=lambda name: changes[name].base.nbytes)
    finally:
        writer.close()
    updates = {name: _update(changes[name].base, changes[name].deltas[-1], steps[name]) for name in sorted(changes)}
    wire_bytes = sum(payload.nbytes for version in versions for payload in version.tensors.values())
    return Decoded(updates=updates, wire_bytes=wire_bytes, compact_bytes=writer.nbytes)


def full_updates(full: Checkpoint, checksums: Mapping[str, Checksum], *, version: int) -> dict[str, TensorUpdate]:
    """What a full version on this host does: every tensor becomes what its file says, with these checksums."""
    return {
        name: TensorUpdate(
            nbytes=stored.nbytes,
            steps=(full_step(path=full.directory / stored.file, offset=stored.offset, nbytes=stored.nbytes),),
            algorithm=checksums[name].algorithm,
            checksum=checksums[name].value,
            where=Where(path=full.directory / stored.file, version=version, tensor=name),
        )
        for name, stored in sorted(full.tensors.items())
    }


def followed_by(updates: Mapping[str, TensorUpdate], chain: Mapping[str, TensorUpdate]) -> dict[str, TensorUpdate]:
    """One after the other."""
    joined = dict(updates)
    for name, update in chain.items():
        if name not in joined:
            raise LayoutError("a delta changes a tensor that its full version has not", where=update.where)
        joined[name] = replace(update, steps=(*joined[name].steps, *update.steps))
    return joined


def verify_rest(places: Sequence[Place], start: Checkpoint, read: ReadTensor, *, but: Collection[str]) -> None:
    """Verify what the deltas at `places` make of tensors that are in none of the ranks' hands: those of `start`, whose
    bytes `read` gives, but for the names in `but`. Raises DigestMismatchError, and what decoders raise."""
    versions = [_read(place, start.directory, start.tensors) for place in places]
    with OpenFiles() as files:
        for name, change in pending_changes(start.tensors, versions).items():
            if name not in but:
                apply_change(change, base=read(name), sources=files, sink=_nowhere, where=change.deltas[-1].where)


def _nowhere(_offset: int, _old: object, _new: object) -> None:
    """Where bytes go that are only digested."""


def _read(place: Place, base_dir: Path, tensors: Mapping[str, StoredTensor]) -> PublishedVersion:
    found = read_published(Sources(source_dir=place.directory, base_dir=base_dir), place.version)
    check_against(found, tensors)
    with OpenFiles() as files:
        compare_duplicates(found, files)
    return found


def _decode(delta: Delta, base: StoredTensor, writer: CompactWriter, files: OpenFiles) -> Step:
    width, where = element_bytes(base.dtype), delta.where
    with delta.version.open_payload(base.name, files) as payload:
        checked = checked_payload(payload, delta)
        encoding = str(delta.version.index.delta_encoding)
        is_kept = encoding == "gpusync" and not isinstance(checked, BytesSource)
        decoder = open_delta(
            writer.own(checked) if is_kept else checked,
            encoding=encoding,
            nbytes=base.nbytes,
            element_bytes=width,
            float_order=is_float_order(base.dtype),
            where=where,
        )
        return writer.add(decoder, nbytes=base.nbytes, element_bytes=width)


def _update(base: StoredTensor, newest: Delta, steps: Sequence[Step]) -> TensorUpdate:
    algorithm, checksum = newest.version.index.checksum_format, newest.payload.checksum
    if algorithm is None or checksum is None:
        raise DigestMismatchError("a delta has no checksum", where=newest.where)
    return TensorUpdate(
        nbytes=base.nbytes, steps=tuple(steps), algorithm=algorithm, checksum=checksum.lower(), where=newest.where
    )
