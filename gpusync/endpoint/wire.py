"""Errors as JSON, and back: a caller on the other side of a process or a network sees the class, text and fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpusync.endpoint.errors import RemoteError
from gpusync.errors import GpusyncError

FIELDS = ("what", "path", "version", "tensor", "expected", "found")


def error_as_dict(error: BaseException) -> dict[str, object]:
    """`type` holds the error's class and those above it, nearest first, so that a reader finds one that it knows."""
    names = [each.__name__ for each in type(error).__mro__ if issubclass(each, GpusyncError)]
    facts: dict[str, object] = {"type": names or [type(error).__name__]}
    if not isinstance(error, GpusyncError):
        return facts | {"message": " ".join(f"{type(error).__name__}: {error}".split())}
    facts["message"] = str(error)
    for name in FIELDS:
        facts[name] = _as_json(getattr(error, name))
    ranks, missing = getattr(error, "ranks", None), getattr(error, "missing", None)
    if isinstance(ranks, Mapping):
        facts["ranks"] = {str(rank): str(message) for rank, message in ranks.items()}
    if isinstance(missing, tuple):
        facts["missing"] = list(missing)
    return facts


def error_from_dict(facts: Mapping[str, object]) -> GpusyncError:
    """The error that `facts` tell of, of the nearest class known here; its text is the text it had.

    Facts may come from a server that is not ours: whatever is missing is None.
    """
    names = facts.get("type")
    known = {each.__name__: each for each in _classes(GpusyncError)}
    found = (
        known[name] for name in (names if isinstance(names, list) else []) if isinstance(name, str) and name in known
    )
    kind = next(found, RemoteError)
    error = kind.__new__(kind)
    Exception.__init__(error, str(facts.get("message")))  # the text is made already, and each class has its own way
    for name in FIELDS:
        setattr(error, name, facts.get(name))
    ranks, missing = facts.get("ranks"), facts.get("missing")
    if isinstance(ranks, Mapping):
        told = {str(rank): str(message) for rank, message in ranks.items()}
        vars(error)["ranks"] = {int(rank): message for rank, message in told.items() if rank.isdecimal()}
    if isinstance(missing, list):
        vars(error)["missing"] = tuple(missing)
    return error


def _nearest_class(names: object) -> type[GpusyncError]:
    known = {each.__name__: each for each in _classes(GpusyncError)}
    told = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return next((known[name] for name in told if name in known), RemoteError)


def _as_json(fact: object) -> object:
    return fact if fact is None or isinstance(fact, bool | int | float | str) else str(fact)


def _classes(top: type[GpusyncError]) -> Iterator[type[GpusyncError]]:
    yield top
    for below in top.__subclasses__():
        yield from _classes(below)
