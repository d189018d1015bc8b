"""What a group of ranks raises about itself. A failure of a rank's own work is not here: it becomes a verdict."""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpusync.errors import GpusyncError


class GroupFailedError(GpusyncError):
    """The ranks cannot act together now. `missing` are those that did not come or did not answer."""

    def __init__(
        self, what: str, *, missing: Iterable[int] = (), expected: object = None, found: object = None
    ) -> None:
        self.missing = tuple(sorted(missing))
        super().__init__(what, expected=expected, found=found)


class HandshakeError(GroupFailedError):
    """The ranks came, and may not work together: gpusync stays off on all of them. The text names ranks and reasons."""


class StoreLostError(GroupFailedError):
    """The store on rank 0 does not answer."""


class InDoubtError(GroupFailedError):
    """This rank voted ok and does not know what was decided. It must serve nothing until it has resolved it."""

    def __init__(self, what: str, *, transaction: str, phase: str) -> None:
        self.transaction = transaction
        self.phase = phase
        super().__init__(what)


# gloo puts a place in its source in front, and advice behind.
_SOURCE_PLACE = re.compile(r"^\[\S*:\d+\] ")
_ADVICE = " This is typically caused by"


def first_line(error: BaseException) -> str:
    """The text of an error of torch, without C++ frames and the like."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return _SOURCE_PLACE.sub("", line).partition(_ADVICE)[0].rstrip(" .")
