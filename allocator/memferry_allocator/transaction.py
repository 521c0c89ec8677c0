"""Several driver calls that happen together or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from .errors import AllocatorError


class Transaction:
    """Undoes, last first, what was done in its block if the block raises; a context manager.

    `push` an undo only once its step has succeeded.  An undo that fails is told in the error, which stays the
    one that was raised.
    """

    def __init__(self) -> None:
        self._undo: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count()

    def push(self, undo: Callable[..., object], *arguments: Any, **options: Any) -> int:
        """Note how to undo a step, and return a number by which it can be forgotten."""
        number = next(self._numbers)
        self._undo[number] = lambda: undo(*arguments, **options)
        return number

    def forget(self, number: int) -> None:
        """A step was taken back on purpose."""
        del self._undo[number]

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        for undo in reversed(self._undo.values()):
            try:
                undo()
            except AllocatorError as second:
                error.args = (f"{error}; and undoing it failed: {second}", *error.args[1:])
