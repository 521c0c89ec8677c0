"""Making a device's context current for the length of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import SUCCESS

if TYPE_CHECKING:
    from .core import CudaCore


class Current:
    """For a thread in which the right context is current already; there is nothing to do or undo."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class Pushed:
    """Pushes a context, and pops it at the end."""

    __slots__ = ("_before", "_context", "_device", "_driver")

    def __init__(self, driver: CudaCore, device: int, context: int) -> None:
        self._driver = driver
        self._device = device
        self._context = context

    def __enter__(self) -> None:
        code = self._driver._library.cuCtxPushCurrent_v2(self._context)
        if code != SUCCESS:
            raise self._driver._error(self._device, code, "push context")
        answers = self._driver._answers
        self._before, answers.held = answers.held, None

    def __exit__(self, *_: object) -> None:
        answers = self._driver._answers
        answers.held = self._before
        self._driver._library.cuCtxPopCurrent_v2(answers.context)


class Held:
    """Keeps a device's context current for several calls, which need not ask for it any more."""

    __slots__ = ("_before", "_context", "_device", "_driver")

    def __init__(self, driver: CudaCore, device: int) -> None:
        self._driver = driver
        self._device = device
        self._context = driver._on(device)

    def __enter__(self) -> None:
        self._context.__enter__()
        answers = self._driver._answers
        self._before, answers.held = answers.held, self._device

    def __exit__(self, *_: object) -> None:
        self._driver._answers.held = self._before
        self._context.__exit__()


CURRENT = Current()
