"""Receiving a full version into the inbox: copied once, verified on the way, ready to be put in place by renames."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpusync.errors import JournalError
from gpusync.mirror import io
from gpusync.mirror.inbox import Entry, new_entry
from gpusync.mirror.journal import Journal
from gpusync.mirror.local import LocalDirectory, checkpoint_identity
from gpusync.mirror.look import as_checkpoint
from gpusync.mirror.move import side_files_of
from gpusync.mirror.seed import prepare_seed
from gpusync.mirror.state import (
    CONTROL_DIRECTORY,
    DAMAGE,
    Checksum,
    MirrorState,
    decode_checksums,
    encode_checksums,
    plain_name,
)
from gpusync.stream import Checkpoint, OpenFiles, PublishedVersion

RECEIPT_FILE = "receipt.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was found out while a full version was copied; stands beside the copy."""

    install: tuple[str, ...]
    checksums: Mapping[str, Checksum]
    base_identity: str


def receive_full(
    version: PublishedVersion, *, base: Checkpoint, control: Path, session: str, files: OpenFiles, workers: int
) -> Entry:
    """Copy a full version into the inbox and sync it. It is a candidate then. Raises DigestMismatchError if a published
    checksum does not fit; tensors without one are digested all the same."""
    entry = new_entry(version.index, version.version, kind="full", nbytes=version.wire_bytes, session=session)
    start = as_checkpoint(version)
    copied = prepare_seed(
        start,
        {},
        into=entry.path(control),
        side_files=side_files_of(start, base=base, is_base=False, copy_code=False),
        sources=files,
        workers=workers,
        progress=lambda _nbytes: None,
    )
    told = {
        "install": copied.install,
        "checksums": encode_checksums(copied.checksums),
        "base_identity": checkpoint_identity(base),
    }
    io.write_durably(entry.directory(control) / RECEIPT_FILE, json.dumps(told, ensure_ascii=False).encode())
    return entry


def installation(entry: Entry, local: LocalDirectory) -> Journal:
    """The journal that puts a received full version in place."""
    receipt = read_receipt(entry, local.control)
    return Journal(
        state=MirrorState(
            version=entry.version,
            stream_id=entry.stream_id,
            index_digests={entry.version: entry.digest},
            base_identity=receipt.base_identity,
        ),
        managed=receipt.install,
        checksums=receipt.checksums,
        install=receipt.install,
        install_from=str(entry.path(local.control).relative_to(local.path / CONTROL_DIRECTORY)),
        remove=tuple(name for name in local.managed if name not in receipt.install),
    )


def read_receipt(entry: Entry, control: Path) -> Receipt:
    """What was found out about a received full version. Raises JournalError."""
    path = entry.directory(control) / RECEIPT_FILE
    try:
        told = json.loads(path.read_bytes())
        return Receipt(
            install=tuple(plain_name(name) for name in told["install"]),
            checksums=decode_checksums(told["checksums"]),
            base_identity=told["base_identity"],
        )
    except (OSError, *DAMAGE) as error:
        raise JournalError(f"the receipt of a full version cannot be read ({error})", path=path) from error
