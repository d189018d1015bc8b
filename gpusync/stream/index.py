"""`model.safetensors.index.json`: what a version is, and which shard holds which tensor. Reads no files.

Version numbers are written as zero-padded text, as slime does, and read as text or integers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpusync.digest import digest_of, is_payload_checksum
from gpusync.errors import NOWHERE, IndexFormatError, UnsupportedFormatError, Where
from gpusync.stream.formats import CHECKSUM_FORMATS, COMPRESSION_OF, GPUSYNC, NO_COMPRESSION
from gpusync.stream.header import METADATA_KEY
from gpusync.stream.limits import MAX_FILE_NAME_BYTES, MAX_INDEX_BYTES, MAX_NAME_BYTES, MAX_OFFSET, MAX_VERSION
from gpusync.stream.strict_json import parse_json

INDEX_NAME = "model.safetensors.index.json"
SHARD_SUFFIX = ".safetensors"

_VERSION_TEXT = re.compile(r"[0-9]{1,13}")
_MAX_TEXT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionIndex:
    """A valid index. What it did not say is None or empty.

    `version` is the directory's number, or what the index says where the directory has none. `digest` is the xxh3-128
    of the index's bytes (32 hex digits), `index_bytes` their number.
    """

    version: int | None
    base_version: int | None = None
    delta_encoding: str | None = None
    compression_format: str | None = None
    checksum_format: str | None = None
    stream_id: str | None = None
    shard_bytes: Mapping[str, int] = field(default_factory=dict)
    payload_checksums: Mapping[str, str] = field(default_factory=dict)
    weight_map: Mapping[str, str]
    digest: str
    index_bytes: int = 0

    @property
    def is_delta(self) -> bool:
        return self.delta_encoding is not None


def parse_index(raw: bytes, *, where: Where = NOWHERE) -> VersionIndex:
    """The index whose text is `raw`, found in the directory of version `where.version` (None: in no version's).

    Raises IndexFormatError, or UnsupportedFormatError for a format this reader does not know.
    """
    if len(raw) > MAX_INDEX_BYTES:
        raise IndexFormatError("index is too long", where=where, expected=f"at most {MAX_INDEX_BYTES}", found=len(raw))
    document = parse_json(raw, what="index", where=where, error=IndexFormatError)
    if not isinstance(document, dict):
        raise IndexFormatError("index is not an object", where=where)
    metadata = document.get("metadata", {})
    if not isinstance(metadata, dict):
        raise IndexFormatError("metadata is not an object", where=where, found=_shown(metadata))
    index = VersionIndex(
        version=_version(metadata, "version", where=where),
        base_version=_version(metadata, "base_version", where=where),
        delta_encoding=_text(metadata, "delta_encoding", where=where),
        compression_format=_text(metadata, "compression_format", where=where),
        checksum_format=_text(metadata, "checksum_format", where=where),
        stream_id=_text(metadata, "stream_id", where=where),
        shard_bytes=_shard_bytes(metadata.get("shard_bytes", {}), where=where),
        payload_checksums=_payload_checksums(metadata.get("payload_checksums", {}), where=where),
        weight_map=_weight_map(document.get("weight_map"), where=where),
        digest=digest_of("xxh3-128", raw),
        index_bytes=len(raw),
    )
    return _check(index, where=where)


def encode_index(
    *,
    version: int,
    weight_map: Mapping[str, str],
    base_version: int | None = None,
    delta_encoding: str | None = None,
    checksum_format: str | None = None,
    stream_id: str | None = None,
    shard_bytes: Mapping[str, int] | None = None,
    payload_checksums: Mapping[str, str] | None = None,
    total_size: int | None = None,
) -> bytes:
    """The text of an index; `compression_format` follows from `delta_encoding`. `total_size` is Hugging Face's: the
    bytes of all tensors of a full version.

    Raises IndexFormatError or UnsupportedFormatError for what `parse_index` would refuse.
    """
    metadata: dict[str, object] = {"version": f"{version:06d}"}
    if total_size is not None:
        metadata["total_size"] = total_size
    if base_version is not None:
        metadata["base_version"] = f"{base_version:06d}"
    if delta_encoding is not None:
        metadata["delta_encoding"] = delta_encoding
        metadata["compression_format"] = COMPRESSION_OF.get(delta_encoding, NO_COMPRESSION)
    optional = {
        "checksum_format": checksum_format,
        "stream_id": stream_id,
        "shard_bytes": None if shard_bytes is None else dict(shard_bytes),
        "payload_checksums": None if payload_checksums is None else dict(payload_checksums),
    }
    metadata.update((key, value) for key, value in optional.items() if value is not None)
    raw = json.dumps({"metadata": metadata, "weight_map": dict(weight_map)}).encode("ascii")
    parse_index(raw, where=Where(version=version))
    return raw


def _check(index: VersionIndex, *, where: Where) -> VersionIndex:
    """The rules that tie one key to another; the version is the directory's from here on."""
    if index.delta_encoding is not None:
        _check_delta(index, where=where)
    for key in ("base_version", "compression_format"):
        if index.delta_encoding is None and getattr(index, key) is not None:
            raise IndexFormatError(f"index has {key} but no delta_encoding", where=where)
    if index.checksum_format is not None and index.checksum_format not in CHECKSUM_FORMATS:
        raise UnsupportedFormatError(
            "unknown checksum_format", where=where, expected=" or ".join(CHECKSUM_FORMATS), found=index.checksum_format
        )
    if index.version is not None and where.version is not None and index.version != where.version:
        raise IndexFormatError(
            "index says another version than its directory", where=where, expected=where.version, found=index.version
        )
    for name in index.payload_checksums:
        if name not in index.weight_map:
            raise IndexFormatError(
                "payload_checksums names a tensor that weight_map does not", where=where, tensor=name
            )
    return index if index.version is not None else replace(index, version=where.version)


def _check_delta(index: VersionIndex, *, where: Where) -> None:
    encoding = index.delta_encoding or ""
    if encoding not in COMPRESSION_OF:
        raise UnsupportedFormatError(
            "unknown delta_encoding", where=where, expected=" or ".join(COMPRESSION_OF), found=encoding
        )
    for key in ("version", "base_version", "compression_format", "checksum_format"):
        if getattr(index, key) is None:
            raise IndexFormatError(f"index of a delta lacks {key}", where=where)
    if index.compression_format != COMPRESSION_OF[encoding]:
        raise UnsupportedFormatError(
            f"compression_format does not go with {encoding}",
            where=where,
            expected=COMPRESSION_OF[encoding],
            found=index.compression_format,
        )
    if index.version is not None and index.base_version is not None and index.base_version >= index.version:
        raise IndexFormatError(
            "base_version is not below version", where=where, expected=f"< {index.version}", found=index.base_version
        )
    if encoding == GPUSYNC:
        for name in index.weight_map:
            if name not in index.payload_checksums:
                raise IndexFormatError("tensor has no entry in payload_checksums", where=where, tensor=name)


def _version(metadata: Mapping[str, object], key: str, *, where: Where) -> int | None:
    if key not in metadata:
        return None
    value = metadata[key]
    if isinstance(value, str) and _VERSION_TEXT.fullmatch(value):
        value = int(value)
    # type(), not isinstance(): True is an int.
    if type(value) is not int or not 0 <= value <= MAX_VERSION:
        raise IndexFormatError(f"{key} is not a version number", where=where, found=_shown(value))
    return value


def _text(metadata: Mapping[str, object], key: str, *, where: Where) -> str | None:
    if key not in metadata:
        return None
    value = metadata[key]
    # printable: it ends up in logs and on terminals, where it must not pass for other lines
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT or not value.isprintable():
        raise IndexFormatError(
            f"{key} is not a text", where=where, expected=f"1..{_MAX_TEXT} printable characters", found=_shown(value)
        )
    return value


def _weight_map(weight_map: object, *, where: Where) -> dict[str, str]:
    if not isinstance(weight_map, dict):
        raise IndexFormatError("weight_map is not an object", where=where, found=_shown(weight_map))
    files: dict[str, str] = {}  # one text for each file, however many tensors it holds
    for name, file in weight_map.items():
        if not isinstance(file, str) or file not in files:
            files[_file_name(file, "weight_map", where=where)] = file
        if name == METADATA_KEY or len(name.encode("utf-8")) > MAX_NAME_BYTES:
            raise IndexFormatError("weight_map holds a name no tensor can have", where=where, tensor=name)
        weight_map[name] = files[file]
    return weight_map


def _shard_bytes(shard_bytes: object, *, where: Where) -> dict[str, int]:
    if not isinstance(shard_bytes, dict):
        raise IndexFormatError("shard_bytes is not an object", where=where, found=_shown(shard_bytes))
    for file, nbytes in shard_bytes.items():
        _file_name(file, "shard_bytes", where=where)
        if type(nbytes) is not int or not 0 <= nbytes <= MAX_OFFSET:
            raise IndexFormatError(f"shard_bytes of {file} is not a size", where=where, found=_shown(nbytes))
    return shard_bytes


def _payload_checksums(checksums: object, *, where: Where) -> dict[str, str]:
    if not isinstance(checksums, dict):
        raise IndexFormatError("payload_checksums is not an object", where=where, found=_shown(checksums))
    for name, checksum in checksums.items():
        if not is_payload_checksum(checksum):
            raise IndexFormatError(
                "payload checksum is malformed",
                where=where,
                tensor=name,
                expected="16 lowercase hex digits",
                found=_shown(checksum),
            )
    return checksums


def _file_name(value: object, key: str, *, where: Where) -> str:
    """A plain name of a safetensors file: it leads neither out of the directory nor onto some other file of it."""
    if (
        not isinstance(value, str)
        or any(character in value for character in "/\\\0")
        or not value.endswith(SHARD_SUFFIX)
        or len(value.encode("utf-8")) > MAX_FILE_NAME_BYTES
    ):
        raise IndexFormatError(
            f"{key} holds what is no plain name of a shard",
            where=where,
            expected=f"*{SHARD_SUFFIX}",
            found=_shown(value),
        )
    return value


def _shown(value: object, limit: int = 120) -> str:
    """A hostile value, short enough for one line."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
