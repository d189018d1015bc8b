"""What several commands print alike: sizes, tables, progress bars, JSON."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field

import click
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

SHOW_AFTER_S = 1.0
MIN_NAME_CHARACTERS = 20
GAP = "  "


@dataclass
class Told:
    """What a command has to say in JSON, until it is over: `answer`, and beside it `error`."""

    answer: dict[str, object] = field(default_factory=dict)
    error: dict[str, object] | None = None


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Whatever prints meanwhile, a hook or a process that it starts, prints to stderr."""
    out = sys.stdout
    out.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        out.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _keep_stdout_clean(context: click.Context, _option: click.Parameter, as_json: bool) -> bool:
    if as_json:
        context.with_resource(stdout_to_stderr())
    return as_json


json_option = click.option(
    "--json", "as_json", is_flag=True, callback=_keep_stdout_clean, help="Print one JSON object instead of text."
)


def print_json(told: Mapping[str, object]) -> None:
    """Printed when the command is over, together with the error if it ends with one."""
    click.get_current_context().find_object(Told).answer.update(told)  # type: ignore[union-attr]


def error_facts(error: Exception) -> dict[str, object]:
    """An error for machines. `expected` and `found` are text where JSON has nothing like them."""
    facts: dict[str, object] = {"type": type(error).__name__, "message": str(error)}
    for name in ("path", "version", "tensor", "expected", "found"):
        fact = getattr(error, name, None)
        facts[name] = fact if fact is None or isinstance(fact, (bool, int, float, str)) else str(fact)
    return facts


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
