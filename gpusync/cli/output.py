"""What several commands print alike: sizes, progress bars, JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

SHOW_AFTER_S = 1.0

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
