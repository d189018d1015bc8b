"""What several commands print alike: sizes, tables, progress bars, JSON."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

SHOW_AFTER_S = 1.0
MIN_NAME_CHARACTERS = 20
GAP = "  "

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")


def print_json(told: object) -> None:
    click.echo(json.dumps(told, ensure_ascii=False))


def size_text(nbytes: int) -> str:
    """Bytes for people, in decimal units: 1234567 is "1.23 MB"."""
    if nbytes < 1000:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in ("kB", "MB", "GB"):
        amount /= 1000
        if amount < 1000:
            return f"{amount:.3g} {unit}" if amount < 100 else f"{amount:.0f} {unit}"
    return f"{amount / 1000:.3g} TB"


def count_text(number: int, noun: str) -> str:
    """ "1 tensor", "2 tensors"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Names come from files of others: their control characters must not reach a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def cut_middle(text: str, characters: int) -> str:
    """At most `characters` of it: names of tensors differ at both ends."""
    if len(text) <= characters:
        return text
    kept = max(0, characters - len("..."))
    end = kept * 2 // 5  # the number of the layer stands in the first half
    return text[: kept - end] + "..." + text[len(text) - end :]


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), cut_first: bool = False
) -> None:
    """A table without line breaks in cells. With `cut_first` the first column gives way where the width is short."""
    texts = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(headings, *texts, strict=True)]
    if cut_first:
        room = shutil.get_terminal_size().columns - sum(widths[1:]) - len(GAP) * (len(widths) - 1)
        widths[0] = min(widths[0], max(MIN_NAME_CHARACTERS, room))
        texts = [[cut_middle(row[0], widths[0]), *row[1:]] for row in texts]
    for row in (headings, ["-" * width for width in widths], *texts):
        cells = []
        for heading, text, width in zip(headings, row, widths, strict=True):
            space = " " * (width - cell_len(text))
            cells.append(space + text if heading in right else text + space)
        click.echo(GAP.join(cells).rstrip())


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A callback for `progress(done, total)` in bytes. The bar appears on a terminal once a second has passed."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _done, _total: None
        return
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    began = time.monotonic()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None, visible=False)
        yield lambda done, total: bar.update(
            task, completed=done, total=total, visible=time.monotonic() - began > SHOW_AFTER_S
        )
