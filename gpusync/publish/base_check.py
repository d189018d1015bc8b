"""Whether a base checkpoint is the version it is taken for, told by the checksums that the stream has published.

A delta on another state is one that no reader can apply. Reads the tensors that the stream speaks of; writes nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from gpusync.codec import would_be
from gpusync.digest import new_digest
from gpusync.errors import PublishError
from gpusync.publish.chain import iterate_chain, open_decoder
from gpusync.publish.pool import map_in_order
from gpusync.publish.tensors import TensorForm
from gpusync.stream import Checkpoint, OpenFiles, PublishedVersion, StoredTensor

# For full versions of writers that publish no checksums: their bytes are compared by this one.
_OWN_ALGORITHM = "xxh3-128"
_ABSENT = "no such tensor"

# By tensor: the version whose checksum speaks of it.
_Speaking = dict[str, PublishedVersion]


def check_base(
    base: Checkpoint,
    *,
    base_version: int,
    source_dir: str | os.PathLike[str],
    newest: int,
    rank: int,
    size: int,
    workers: int,
) -> None:
    """Raises PublishError, naming the first tensor that differs, if `base` is not the state of `base_version`.

    A tensor must have the newest checksum that was published for it up to `base_version`. One that has none there, but
    a payload on the way to `newest`, must have that version's checksum when the payload is applied. Of all others the
    stream says nothing. Rank `rank` of `size` checks its share. Errors also as `iterate_chain` and the decoders.
    """
    before, after = _newest_checksums(base, source_dir, base_version), _first_payloads(source_dir, newest, base_version)
    with OpenFiles() as files:
        check = _TensorCheck(base=base, base_version=base_version, before=before, after=after, files=files)
        names = sorted({*before, *after})[rank::size]
        for _ in map_in_order(check.check, iter(names), workers=workers):
            pass


def _newest_checksums(base: Checkpoint, source_dir: str | os.PathLike[str], version: int) -> _Speaking:
    found: _Speaking = {}
    for published in iterate_chain(source_dir, version):
        for name in published.tensors:
            found.setdefault(name, published)
        if not published.is_delta:
            _check_forms(base, published, version)
        if base.tensors.keys() <= found.keys():
            break
    return found


def _first_payloads(source_dir: str | os.PathLike[str], newest: int, version: int) -> _Speaking:
    """Empty if the chain of `newest` does not pass through `version`: `base` is no part of its state then."""
    found: _Speaking = {}
    at: int | None = version
    for published in iterate_chain(source_dir, newest):
        if published.version <= version or not published.is_delta:
            break
        found.update(dict.fromkeys(published.tensors, published))
        at = published.index.base_version
    return found if at == version else {}


def _check_forms(base: Checkpoint, full: PublishedVersion, version: int) -> None:
    for name in sorted({*base.tensors, *full.tensors}):
        expected, found = _form(full.tensors.get(name)), _form(base.tensors.get(name))
        if expected != found:
            raise _not_the_version(base, version, name, expected or _ABSENT, found or _ABSENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorCheck:
    base: Checkpoint
    base_version: int
    before: _Speaking
    after: _Speaking
    files: OpenFiles

    def check(self, name: str) -> None:
        published = self.before.get(name) or self.after[name]
        form = _form(self.base.tensors.get(name))
        if form is None:
            raise _not_the_version(self.base, self.base_version, name, f"as in version {published.version}", _ABSENT)
        expected = published.tensors[name].checksum or self._digest(published, name, form)
        applied = None if name in self.before else published
        algorithm = published.index.checksum_format or _OWN_ALGORITHM
        found = self._digest(self.base, name, form, applied=applied, algorithm=algorithm)
        if found != expected:
            raise _not_the_version(self.base, self.base_version, name, expected, found, applied=applied)

    def _digest(
        self,
        holder: Checkpoint | PublishedVersion,
        name: str,
        form: TensorForm,
        *,
        applied: PublishedVersion | None = None,
        algorithm: str = _OWN_ALGORITHM,
    ) -> str:
        decoders = [] if applied is None else [open_decoder(applied, name, form, self.files)]
        digest = new_digest(algorithm)
        with holder.open_tensor(name, self.files) as source:
            for _, _, new in would_be(source, decoders, nbytes=form.nbytes):
                digest.update(new)
        return digest.hexdigest()


def _form(stored: StoredTensor | None) -> TensorForm | None:
    if stored is None:
        return None
    return TensorForm(dtype=stored.dtype, shape=tuple(stored.shape), nbytes=stored.nbytes)


def _not_the_version(
    base: Checkpoint,
    version: int,
    name: str,
    expected: object,
    found: object,
    *,
    applied: PublishedVersion | None = None,
) -> PublishError:
    what = f"the base is not version {version}"
    if applied is not None:
        what += f", which version {applied.version} was made on"
    return PublishError(what, path=base.directory, version=version, tensor=name, expected=expected, found=found)
