"""Which directories a request may name. It reads the filesystem, which may hang: call it where waiting does no harm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpusync.endpoint.errors import ForbiddenPathError


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    """Directories below which a stream may be read, and a local checkpoint be written. None given: none allowed; "/"
    allows all. `places` are allowed themselves, and nothing below them: a directory that is followed must not get
    another one inside."""

    source: tuple[Path, ...] = field(default=())
    local: tuple[Path, ...] = field(default=())
    source_places: tuple[Path, ...] = field(default=())
    local_places: tuple[Path, ...] = field(default=())


def confine(path: str, roots: Sequence[Path], *, what: str, places: Sequence[Path] = ()) -> Path:
    """`path` with every `..` and symbolic link resolved, which is what the caller has to use from here on.

    Raises ForbiddenPathError unless it lies below a root, or is one, or is a place. It need not exist. The message does
    not tell where a link leads.
    """
    if not os.path.isabs(path) or "\0" in path:
        raise ForbiddenPathError(f"{what} is not an absolute path", found=path)
    try:
        resolved = Path(os.path.realpath(path))
        allowed = any(resolved.is_relative_to(os.path.realpath(root)) for root in roots) or any(
            resolved == Path(os.path.realpath(place)) for place in places
        )
    except (OSError, ValueError) as error:
        raise ForbiddenPathError(f"{what} cannot be resolved", path=path, found=error) from error
    if not allowed:
        told = [*(f"below {root}" for root in roots), *map(str, places)]
        raise ForbiddenPathError(
            f"{what} is not allowed", path=path, expected=" or ".join(told) or "no directory at all"
        )
    return resolved
