"""Every error that gpusync raises on purpose, and the one shape their texts share.

A text says what is wrong, where, what was expected and what was found, on one line. The same facts are attributes, so
that a caller can act on them and a test can assert them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The place an error speaks of. Whatever is unknown is None."""

    path: str | os.PathLike[str] | None = None
    version: int | None = None
    tensor: str | None = None


NOWHERE = Where()


class GpusyncError(Exception):
    """Root of all errors of this package.

    `what` is a clause without a full stop ("payload decompresses to more than declared"). `expected` and `found` may be
    of any type; they are kept as given and printed with `str`.
    """

    def __init__(
        self,
        what: str,
        *,
        where: Where = NOWHERE,
        path: str | os.PathLike[str] | None = None,
        version: int | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        self.what = what
        place = where.path if path is None else path
        self.path = None if place is None else os.fspath(place)
        self.version = where.version if version is None else version
        self.tensor = where.tensor if tensor is None else tensor
        self.expected = expected
        self.found = found
        super().__init__(self._text())

    def __reduce__(self) -> tuple[object, ...]:
        """Errors travel between our own processes, whatever their constructors ask for."""
        return _rebuilt, (type(self), self.args, self.__dict__)

    def _text(self) -> str:
        places = []
        if self.tensor is not None:
            places.append(f"tensor `{_short(self.tensor)}`")
        if self.path is not None:
            places.append(f"in {self.path}")
        if self.version is not None:
            places.append(f"version {self.version}")
        text = self.what
        if places:
            text += ": " + ", ".join(places)
        facts = {"expected": self.expected, "found": self.found}
        told = [f"{name} {fact}" for name, fact in facts.items() if fact is not None]
        if told:
            text += "; " + ", ".join(told)
        return _one_line(text)


class StreamError(GpusyncError):
    """The published bytes are wrong; retrying cannot help."""


class HeaderError(StreamError):
    """A safetensors header, or the length of its file, breaks the format."""


class IndexFormatError(StreamError):
    """A `model.safetensors.index.json` breaks the format or disagrees with its directory or its shards."""


class PayloadError(StreamError):
    """A payload does not decode to what its tensor needs."""


class UnsupportedFormatError(StreamError):
    """A format name, or a variant of a format, that this reader does not know."""


class SourceReadError(GpusyncError):
    """The filesystem failed while the stream was read (EIO, ESTALE, EACCES ...): may be retried."""


class VersionMissingError(GpusyncError):
    """Not there, or not there in full, yet: may be retried."""


class ChainError(GpusyncError):
    """No way from what is here to the target: no seed, a gap, a wrong base, a target behind the local version."""


class MissingLinkError(ChainError, VersionMissingError):
    """A version between the seed and the target is not there: pruned, or not visible yet. May be retried."""


class DigestMismatchError(GpusyncError):
    """The would-be state is not what was published. Nothing was changed."""


class LayoutError(GpusyncError):
    """A tensor without a placement, an overlap, or a size, shape or dtype that does not fit."""


class BackendUnavailableError(GpusyncError):
    """A device path was demanded and cannot be had."""


class PeerFailedError(GpusyncError):
    """This rank was fine, another was not. `ranks` maps each failed rank to its message."""

    def __init__(self, what: str, *, ranks: dict[int, str], where: Where = NOWHERE) -> None:
        self.ranks = dict(ranks)
        messages = "; ".join(f"rank {rank}: {message}" for rank, message in sorted(self.ranks.items()))
        super().__init__(f"{what} ({messages})", where=where)


class MirrorError(GpusyncError):
    """The host-local checkpoint cannot be read, written or trusted."""


class LockTimeoutError(MirrorError):
    """Another process held the local directory's lock for the whole time-out."""


class JournalError(MirrorError):
    """A redo journal is damaged."""


class PublishError(GpusyncError):
    """A version could not be published. Nothing became visible."""


class HookError(GpusyncError):
    """A user's hook cannot be loaded, or raised."""


class RefusedError(GpusyncError):
    """The engine's state forbids an update."""


def _rebuilt(kind: type[GpusyncError], args: tuple[object, ...], facts: dict[str, object]) -> GpusyncError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(facts)
    return error


def _short(name: str, limit: int = 256) -> str:
    return name if len(name) <= limit else f"{name[:limit]}... ({len(name)} characters)"


def _one_line(text: str) -> str:
    """Names come from hostile files: a control character must not forge a second log line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
