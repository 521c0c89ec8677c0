"""What commands show: on a terminal with colour and live progress, elsewhere as plain lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Row = tuple[str, str]

_LABEL = 11
_WIDEST = 400  # columns of a table that goes to a file
_LINES = 24  # of a progress that a terminal keeps; elsewhere every step is a line


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # for the command to end by, not for rich to leave the process


class Screen:
    """Standard output.  Without a terminal there are no control characters, whatever the environment says.

    Parameters
    ----------
    quiet : bool
        Show nothing: another process of the same job does.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._terminal = sys.stdout.isatty() and not quiet
        self._console = _Console(
            force_terminal=self._terminal, highlight=False, width=None if self._terminal else _WIDEST, quiet=quiet
        )

    def title(self, text: str) -> None:
        self._print(Text(text, style="bold"))

    def rows(self, rows: Sequence[Row]) -> None:
        """Labels and what there is to say of them, one line each."""
        for label, value in rows:
            self._print(Text.assemble((f"  {label:<{_LABEL}}", "cyan"), value))

    def lines(self, text: str) -> None:
        """Text that has its lines already."""
        for line in text.splitlines():
            self._print(Text(f"  {line}"))

    def table(self, head: Sequence[str], lines: Sequence[Sequence[str]], *, words: int = 1) -> None:
        """A table; the first columns, as many as hold `words`, to the left, the others to the right."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
        for number, name in enumerate(head):
            table.add_column(Text(name), justify="left" if number < words else "right", no_wrap=not self._terminal)
        for line in lines:
            table.add_row(*(Text(cell) for cell in line))
        self._console.print(Padding(table, (0, 0, 0, 2), expand=False))

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[str, str], None]]:
        """Show how far something is.

        Yields
        ------
        callable
            To be called after each of `total` steps, with a line on it, and the most important of it in a few
            words for beside the bar.
        """
        if not self._terminal:
            yield lambda line, words: self._print(Text(f"  {line}"))
            return
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[words]}"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(what, total=total, words="")
            every = -(-total // _LINES)

            def show(line: str, words: str) -> None:
                progress.update(task, advance=1, words=words)
                if progress.tasks[0].completed % every == 0:
                    self._print(Text(f"  {line}"))

            yield show

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)
