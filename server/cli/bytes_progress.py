"""A bar of bytes written, on a terminal; nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def bytes_progress(console: Console, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Gives what is to be called with the bytes done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("weights", total=num_bytes)
        yield lambda written: progress.advance(bar, written)
