"""`gpusync inspect`: a stream, or one version of it, as a table. Reads headers and payload heads, decodes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpusync.cli.output import json_option, print_json, size_text
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
STREAM_COLUMNS = ("version", "kind", "base", "encoding", "checksum", "tensors", "wire", "% of checkpoint", "stream")
VERSION_COLUMNS = ("tensor", "form", "stored", "tensor size", "%", "checksum")


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--base-dir", type=click.Path(path_type=Path), help="Checkpoint that percentages refer to.")
@json_option
def inspect_command(path: Path, base_dir: Path | None, as_json: bool) -> None:
    """Show the stream in PATH, version by version, or the version directory PATH, tensor by tensor.

    A version that cannot be read is a row with its error; the exit code is then 1.
    """
    number = parse_version_dir_name(path.resolve().name)
    if number is not None:
        version = read_version(path.resolve().parent, number)
        rows = describe_version(version)
        told: Row = {"version": number, "kind": _kind(version), "base": version.index.base_version, "tensors": rows}
        _show(told if as_json else None, path.name, VERSION_COLUMNS, rows)
        return
    rows = describe_stream(path, base_dir)
    _show({"versions": rows} if as_json else None, str(path), STREAM_COLUMNS, rows)
    if any("error" in row for row in rows):
        raise GpusyncError("the stream holds versions that cannot be read", path=path)


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
                "wire": version.wire_bytes,
                "% of checkpoint": None if not whole else 100 * version.wire_bytes / whole,
                "stream": index.stream_id,
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
                    "stored": tensor.nbytes,
                    "tensor size": whole or None,
                    "%": 100 * tensor.nbytes / whole if whole else None,
                    "checksum": tensor.checksum,
                }
            )
    return rows


def _kind(version: PublishedVersion) -> str:
    return "delta" if version.is_delta else "full"


def _checkpoint_bytes(directory: Path) -> int:
    return sum(tensor.nbytes for tensor in read_checkpoint(directory, follow_links=True).tensors.values())


def _show(told: Row | None, title: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
    if told is not None:
        print_json(told)
        return
    table = Table(title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(
            column, justify="right" if column in ("wire", "stored", "tensor size") or "%" in column else "left"
        )
    for row in rows:
        if "error" in row:
            table.add_row(str(row["version"]), Text(str(row["error"]), style="red"))
        else:
            table.add_row(*(Text(_cell(column, row[column])) for column in columns))
    Console().print(table)


def _cell(column: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and column in ("wire", "stored", "tensor size"):
        return size_text(value)
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)
