"""The format of allocation logs, version 1.

Text, one line an entry, columns separated by commas.  The first line is ``# memferry allocation log,
version 1``, the second names the columns:

=========  =========================================================================================
action     ``allocate``, ``free``, or ``refuse`` for a request that ran out of memory
seconds    since the log began
thread     the number of the thread, as the operating system's library names it
id         number of the allocation, from 1; a ``free`` has that of its ``allocate``; 0 for ``refuse``
pointer    hexadecimal, ``0x0`` for ``refuse``
nbytes     as it was asked for
stream     number of the stream, from 0
=========  =========================================================================================

A later version may add columns at the end; a reader refuses versions that it does not know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from ..errors import InvalidRequestError

VERSION = 1
HEADER = f"# memferry allocation log, version {VERSION}"
COLUMNS = "action,seconds,thread,id,pointer,nbytes,stream"


class Action(Enum):
    """What happened."""

    ALLOCATE = "allocate"
    FREE = "free"
    REFUSE = "refuse"


class LogEntry(NamedTuple):
    """One line; see the module."""

    action: Action
    seconds: float
    thread: int
    id: int
    pointer: int
    nbytes: int
    stream: int


class LogWriter:
    """Writes entries to a file.  Not thread-safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "w", encoding="ascii", newline="\n")  # noqa: SIM115  # open until `close`
        self._file.write(f"{HEADER}\n{COLUMNS}\n")

    def write(self, entry: LogEntry) -> None:
        """Append an entry; after `close` it is dropped."""
        action, seconds, thread, number, pointer, nbytes, stream = entry
        if not self._file.closed:
            self._file.write(f"{action.value},{seconds:.9f},{thread},{number},{pointer:#x},{nbytes},{stream}\n")

    def close(self) -> None:
        """Write what is still buffered; a second call does nothing."""
        self._file.close()


def read_log(path: str | os.PathLike[str]) -> Iterator[LogEntry]:
    """The entries of a log, in their order.

    Raises
    ------
    InvalidRequestError
        Not a log of a version this reader knows, or a line that is none.
    """
    with open(path, encoding="ascii", errors="replace") as file:
        header, columns = file.readline().rstrip("\n"), file.readline().rstrip("\n")
        if header != HEADER or columns != COLUMNS:
            raise InvalidRequestError(f"{os.fspath(path)}: not an allocation log; it should begin {HEADER!r}")
        for number, line in enumerate(file, start=3):
            try:
                action, seconds, thread, block, pointer, nbytes, stream = line.rstrip("\n").split(",")
                yield LogEntry(
                    Action(action),
                    float(seconds),
                    int(thread),
                    int(block),
                    int(pointer, 16),
                    int(nbytes),
                    int(stream),
                )
            except ValueError as error:
                raise InvalidRequestError(
                    f"{os.fspath(path)}, line {number}: {line.rstrip()!r} is no entry of the columns {COLUMNS}"
                ) from error
