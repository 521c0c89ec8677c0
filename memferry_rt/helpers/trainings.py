"""Which devices train in this process, and which of them are helped by which."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary, WeakSet

from memferry_allocator import Driver

from ..errors import UnsupportedError


class Training:
    """One model that trains on a device; forgotten when it is closed, or nobody has it any more.

    Attributes
    ----------
    device : int
    named : tuple of int
        Devices that it was told to use as helpers, busy or not.
    """

    def __init__(self, driver: Driver, device: int, named: tuple[int, ...]) -> None:
        self.device, self.named = device, named
        self._driver = driver

    def end(self) -> None:
        """Forget it; a second call does nothing."""
        with _lock:
            _trainings.get(self._driver, WeakSet()).discard(self)


_lock = threading.Lock()
_trainings: WeakKeyDictionary[Driver, WeakSet[Training]] = WeakKeyDictionary()


def begin_training(driver: Driver, device: int, named: tuple[int, ...]) -> Training:
    """Let others know of a model that trains from now on, until `Training.end`."""
    training = Training(driver, device, named)
    with _lock:
        _trainings.setdefault(driver, WeakSet()).add(training)
    return training


def training_on(driver: Driver) -> set[int]:
    """Devices on which models of this process train."""
    with _lock:
        return {training.device for training in _trainings.get(driver, ())}


def require_no_helper(driver: Driver, device: int) -> None:
    """Refuse to train on a device that another model was told to use.

    Raises
    ------
    UnsupportedError
    """
    with _lock:
        for training in _trainings.get(driver, ()):
            if device in training.named:
                raise UnsupportedError(
                    f"device: device {device} helps device {training.device}, which trains another model of this "
                    "process with it among its helpers; restore that model first, or give it helpers='auto', "
                    "which leaves busy devices alone"
                )
