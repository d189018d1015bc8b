"""What a local directory knows of itself: `.weight_sync/state.json` and `.weight_sync/checksums.json`.

`state.json` keeps the one key that slime's receiver reads and writes, `version` (zero-padded text), and adds our own
beside it; a file with that key alone is a state too. Its absence means that the tensor files may be torn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpusync.digest import ALGORITHMS
from gpusync.mirror import io

CONTROL_DIRECTORY = ".weight_sync"
STATE_FILE = "state.json"
CHECKSUMS_FILE = "checksums.json"
REMEMBERED_INDEXES = 256
MAX_VERSION = 10**12

DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""What reading one of our own files raises when it is not what we wrote. It is never relied on then, nor obeyed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMark:
    """How a managed file looked when we had finished with it."""

    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorState:
    """The version of the tensor files and where it came from. `files` is None in a directory that slime wrote."""

    version: int
    stream_id: str | None = None
    index_digests: Mapping[int, str] = field(default_factory=dict)
    base_identity: str | None = None
    files: Mapping[str, FileMark] | None = None


def read_state(control: Path) -> MirrorState | None:
    """The state, or None when there is none or it is damaged: the tensor files then belong to no known version.

    MirrorError when it cannot be read: that says nothing about the files.
    """
    try:
        told = json.loads(read_file(control / STATE_FILE))
        files = told.get("files")
        return MirrorState(
            version=version_number(told["version"]),
            stream_id=told.get("stream_id"),
            index_digests={int(version): str(digest) for version, digest in told.get("index_digests", {}).items()},
            base_identity=told.get("base_identity"),
            files=None
            if files is None
            else {plain_name(name): FileMark(nbytes=int(m[0]), mtime_ns=int(m[1])) for name, m in files.items()},
        )
    except DAMAGE:
        return None


def version_number(told: object) -> int:
    """ValueError for what no version can be."""
    number = int(str(told))
    if not 0 <= number <= MAX_VERSION:
        raise ValueError(f"no version number: {number}")
    return number


def plain_name(told: object) -> str:
    """The name of a file in the directory itself. ValueError for anything that could lead out of it."""
    if not isinstance(told, str) or told in ("", ".", "..") or "/" in told or "\0" in told:
        raise ValueError(f"no plain name: {told!r}")
    return told


def read_file(path: Path) -> bytes:
    """Its bytes; none when it is not there."""
    with io.explained("cannot read", path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""


def encode_state(state: MirrorState) -> bytes:
    newest = sorted(state.index_digests)[-REMEMBERED_INDEXES:]
    told = {
        "version": f"{state.version:06d}",
        "stream_id": state.stream_id,
        "index_digests": {f"{version:06d}": state.index_digests[version] for version in newest},
        "base_identity": state.base_identity,
        "files": None
        if state.files is None
        else {name: [mark.nbytes, mark.mtime_ns] for name, mark in state.files.items()},
    }
    return json.dumps(told, indent=1).encode()


def write_state(control: Path, state: MirrorState) -> None:
    io.write_durably(control / STATE_FILE, encode_state(state))


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    """A tensor's newest digest, as published or as computed while it was copied, and its algorithm's wire name."""

    algorithm: str
    value: str


def read_checksums(control: Path) -> dict[str, Checksum]:
    """The newest checksum of every tensor we know one of; empty when the file is missing or damaged.

    MirrorError when it cannot be read.
    """
    try:
        told = json.loads(read_file(control / CHECKSUMS_FILE))
        return decode_checksums(told["checksums"])
    except DAMAGE:
        return {}


def write_checksums(control: Path, version: int, checksums: Mapping[str, Checksum]) -> None:
    told = {"version": f"{version:06d}", "checksums": encode_checksums(checksums)}
    io.write_durably(control / CHECKSUMS_FILE, json.dumps(told, ensure_ascii=False).encode())


def encode_checksums(checksums: Mapping[str, Checksum]) -> dict[str, str]:
    return {tensor: f"{checksum.algorithm}:{checksum.value}" for tensor, checksum in checksums.items()}


def decode_checksums(told: Mapping[str, str]) -> dict[str, Checksum]:
    pairs = {tensor: text.split(":", 1) for tensor, text in told.items()}
    unknown = {pair[0] for pair in pairs.values()} - set(ALGORITHMS)
    if unknown:
        raise ValueError(f"no digest algorithm: {unknown}")
    return {tensor: Checksum(algorithm=pair[0], value=pair[1]) for tensor, pair in pairs.items()}
