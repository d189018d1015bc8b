"""`gpusync inspect`: a stream, or one version of it, as a table. Reads headers and payload heads, decodes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from gpusync.cli.output import json_option, print_json, print_table, printable, size_text
from gpusync.codec.describe import summarise_payload
from gpusync.errors import GpusyncError
from gpusync.stream import (
    OpenFiles,
    PublishedVersion,
    list_versions,
    parse_version_dir_name,
    read_checkpoint,
    read_version,
)

Row = dict[str, object]
# key in JSON: heading of the column
STREAM_COLUMNS = {
    "version": "version",
    "kind": "kind",
    "base": "base",
    "encoding": "encoding",
    "checksum": "checksum",
    "tensors": "tensors",
    "wire_bytes": "wire",
    "percent_of_checkpoint": "of full",
    "stream_id": "stream",
}
VERSION_COLUMNS = {
    "tensor": "tensor",
    "form": "form",
    "stored_bytes": "stored",
    "tensor_bytes": "of",
    "percent_of_tensor": "%",
}
SAID_ABOVE = ("checksum", "stream_id")
NUMBERS = (
    "version",
    "base",
    "tensors",
    "wire_bytes",
    "percent_of_checkpoint",
    "stored_bytes",
    "tensor_bytes",
    "percent_of_tensor",
)
ID_CHARACTERS = 8


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--base-dir", type=click.Path(path_type=Path), help="Checkpoint that percentages refer to.")
@json_option
def inspect_command(path: Path, base_dir: Path | None, as_json: bool) -> None:
    """Show a stream by version, or a version by tensor.

    PATH is the stream or one version's directory in it. A version that cannot be read is told with its error; the exit
    code is then 1. The checksum of each tensor is in --json only.
    """
    number = parse_version_dir_name(path.resolve().name)
    if number is not None:
        _inspect_version(path, number, as_json=as_json)
        return
    rows = describe_stream(path, base_dir)
    if as_json:
        print_json({"versions": rows})
    else:
        _print_stream(path, rows)
    if any("error" in row for row in rows):
        raise GpusyncError("the stream holds versions that cannot be read", path=path)


def _inspect_version(path: Path, number: int, *, as_json: bool) -> None:
    version = read_version(path.resolve().parent, number)
    rows, base, checksum = describe_version(version), version.index.base_version, version.index.checksum_format
    if as_json:
        print_json({"version": number, "kind": _kind(version), "base": base, "checksum": checksum, "tensors": rows})
        return
    place = "full" if base is None else f"delta on version {base}"
    click.echo(f"{printable(str(path))}: version {number}, {place}, checksum {checksum or 'none'}")
    if rows:
        columns = [key for key in VERSION_COLUMNS if any(row[key] is not None for row in rows)]
        print_table(
            [VERSION_COLUMNS[key] for key in columns],
            [[_cell(key, row[key]) for key in columns] for row in rows],
            right=[VERSION_COLUMNS[key] for key in NUMBERS if key in columns],
            cut_first=True,
        )


def _print_stream(path: Path, rows: Sequence[Row]) -> None:
    """What all versions share in a line above, a table of the rest, and below it the versions that cannot be read."""
    readable = [row for row in rows if "error" not in row]
    shared = {key: {row[key] for row in readable} for key in SAID_ABOVE}
    uniform = {key: next(iter(values)) for key, values in shared.items() if len(values) == 1}
    facts = [f"{STREAM_COLUMNS[key]} {value}" for key, value in uniform.items() if value is not None]
    what = f"{len(rows)} version{'' if len(rows) == 1 else 's'}" if rows else "no versions here"
    click.echo(f"{printable(str(path))}: {', '.join([what, *facts])}")
    if readable:
        columns = [key for key in STREAM_COLUMNS if key not in uniform]
        print_table(
            [STREAM_COLUMNS[key] for key in columns],
            [[_cell(key, row[key]) for key in columns] for row in readable],
            right=[STREAM_COLUMNS[key] for key in NUMBERS if key in columns],
        )
    for row in rows:
        if "error" in row:
            click.echo(f"version {row['version']} cannot be read: {row['error']}")


def describe_stream(source_dir: Path, base_dir: Path | None = None) -> list[Row]:
    """One row a version, ascending. A version that cannot be read has `version` and `error` only."""
    rows: list[Row] = []
    whole = None if base_dir is None else _checkpoint_bytes(base_dir)
    for number in list_versions(source_dir):
        try:
            version = read_version(source_dir, number)
        except GpusyncError as error:
            rows.append({"version": number, "error": str(error)})
            continue
        if not version.is_delta:
            whole = sum(tensor.nbytes for tensor in version.tensors.values())
        index = version.index
        rows.append(
            {
                "version": number,
                "kind": _kind(version),
                "base": index.base_version,
                "encoding": index.delta_encoding,
                "checksum": index.checksum_format,
                "tensors": len(version.tensors),
                "wire_bytes": version.wire_bytes,
                "percent_of_checkpoint": None if not whole else 100 * version.wire_bytes / whole,
                "stream_id": index.stream_id,
            }
        )
    return rows


def describe_version(version: PublishedVersion) -> list[Row]:
    """One row a tensor, in the order of the shards."""
    rows: list[Row] = []
    with OpenFiles() as files:
        for tensor in version.tensors.values():
            form, whole = f"{tensor.dtype}{list(tensor.shape)}", tensor.nbytes
            if version.is_delta:
                with version.open_payload(tensor.name, files) as payload:
                    encoding = str(version.index.delta_encoding)
                    summary = summarise_payload(payload, encoding=encoding, where=version.where(tensor))
                form, whole = summary.form, summary.tensor_bytes or 0
            rows.append(
                {
                    "tensor": tensor.name,
                    "form": form,
                    "stored_bytes": tensor.nbytes,
                    "tensor_bytes": whole or None,
                    "percent_of_tensor": 100 * tensor.nbytes / whole if whole else None,
                    "checksum": tensor.checksum,
                }
            )
    return rows


def _kind(version: PublishedVersion) -> str:
    return "delta" if version.is_delta else "full"


def _checkpoint_bytes(directory: Path) -> int:
    return sum(tensor.nbytes for tensor in read_checkpoint(directory, follow_links=True).tensors.values())


def _cell(key: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and key.endswith("_bytes"):
        return size_text(value)
    if isinstance(value, float):
        text = f"{value:.3g}" if value < 100 else f"{value:.0f}"
        return text if key == "percent_of_tensor" else f"{text} %"
    if key == "stream_id":
        return str(value)[:ID_CHARACTERS]
    return str(value)
