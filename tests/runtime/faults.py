"""Calls that fail when a test wants them to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


class FaultError(Exception):
    """What the test makes fail."""


class Fault:
    """Lets calls fail: so many, after so many that do not."""

    def __init__(self, make: Callable[[], Exception] = FaultError) -> None:
        self.after = 0
        self.times = 0
        self._make = make

    def arm(self, after: int, times: int = 1) -> None:
        self.after, self.times = after, times

    def disarm(self) -> bool:
        """Whether any call has failed."""
        struck, self.times = self.after < 0, 0
        return struck

    def strike(self) -> None:
        if self.times:
            self.after -= 1
            if self.after < 0:
                self.times -= 1
                raise self._make()

    def hit(self, monkeypatch: pytest.MonkeyPatch, owner: type, call: str) -> None:
        real = getattr(owner, call)

        @functools.wraps(real)
        def failing(*arguments: Any, **options: Any) -> Any:
            self.strike()
            return real(*arguments, **options)

        monkeypatch.setattr(owner, call, failing)
