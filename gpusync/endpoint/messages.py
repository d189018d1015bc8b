"""What callers ask for, as plain data: parsed from JSON, checked field by field, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from gpusync.endpoint.errors import RequestError
from gpusync.errors import NOWHERE, StreamError
from gpusync.stream.limits import MAX_VERSION
from gpusync.stream.strict_json import parse_json

T = TypeVar("T")

MAX_PATH_CHARACTERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRequest:
    """Bring the ranks to a version: prepared, or committed too. A directory that is None is the endpoint's own."""

    target_version: int
    source_dir: str | None = None
    local_checkpoint_dir: str | None = None
    commit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """Make the version live that is prepared. It is named, so that asking twice commits once."""

    target_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """Drop what is prepared: whatever it is, or only if it is this version."""

    target_version: int | None = None


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object of a request; no body is an empty one."""
    if not body.strip():
        return {}
    try:
        value = parse_json(body, what="request", where=NOWHERE, error=StreamError)
    except StreamError as error:
        raise RequestError(error.what, found=error.found, expected=error.expected) from error
    if not isinstance(value, dict):
        raise RequestError("request is not a JSON object", found=type(value).__name__)
    return value


def parse_pull(body: bytes) -> PullRequest:
    fields = parse_object(body)
    return PullRequest(
        target_version=_required(fields, "target_version", parse_version(fields)),
        source_dir=_path(fields, "source_dir"),
        local_checkpoint_dir=_path(fields, "local_checkpoint_dir"),
        commit=_flag(fields, "commit"),
    )


def parse_commit(body: bytes) -> CommitRequest:
    fields = parse_object(body)
    return CommitRequest(target_version=_required(fields, "target_version", parse_version(fields)))


def parse_abort(body: bytes) -> AbortRequest:
    return AbortRequest(target_version=parse_version(parse_object(body)))


def parse_version(fields: Mapping[str, object], name: str = "target_version") -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_VERSION:
        raise RequestError(f"{name} is not a version number", expected=f"0..{MAX_VERSION}", found=_shown(value))
    return value


def _path(fields: Mapping[str, object], name: str) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value or "\0" in value or len(value) > MAX_PATH_CHARACTERS:
        raise RequestError(f"{name} is not a path", found=_shown(value))
    return value


def _flag(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{name} is neither true nor false", found=_shown(value))
    return value


def _required(fields: Mapping[str, object], name: str, value: T | None) -> T:
    if value is None:
        raise RequestError(f"{name} is missing", found=", ".join(sorted(fields))[:200] or "an empty request")
    return value


def _shown(value: object) -> str:
    return repr(value)[:80]
