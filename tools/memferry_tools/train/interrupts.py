"""Ctrl-C at a moment at which everything can be released."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """While open, Ctrl-C waits for the next `check`; a second one does not wait.

    An exception in the middle of an arbitrary line, or in a callback from C++, can leave copies and hooks
    half done.  Does nothing in other threads than the main one, and nothing if somebody else handles Ctrl-C.
    """

    def __init__(self) -> None:
        self._asked = False
        self._installed = False

    def __enter__(self) -> Interrupts:
        mine = threading.current_thread() is threading.main_thread()
        if mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._ask)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt here, if it was asked for."""
        if self._asked:
            raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
