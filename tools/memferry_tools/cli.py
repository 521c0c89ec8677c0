"""The `memferry` command: its exit status, and its errors as one line each."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .errors import ToolError
from .optional import require

USAGE = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows ``memferry`` on the command line; by default this process's own.

    Returns
    -------
    int
        0: done.  1: done, and the answer is no (a comparison failed).  2: something that the user can put
        right; one line on standard error says what.  130: interrupted from the keyboard.
    """
    try:
        return _run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; nothing may be written to it again, at exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(arguments: list[str]) -> int:
    from memferry_allocator import MemFerryError

    try:
        for module in ("typer", "rich"):
            require(module, what="the memferry command", install="'memferry-rt[tools]'")
        from .commands import invoke

        return invoke(arguments)
    except (ToolError, MemFerryError) as error:
        _say(f"error: {error}")
    except MemoryError as error:
        _say(f"error: this machine has not enough memory for that: {error}".rstrip(": "))
    return USAGE


def _say(text: str) -> None:
    """One line on standard error, whatever is in the text; of one process among several also which."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    rank = f" rank {os.environ.get('RANK', '?')}:" if several else ""
    print(f"memferry:{rank}", " ".join(text.split()), file=sys.stderr)
