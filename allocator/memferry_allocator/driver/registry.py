"""Drivers that come from elsewhere: registered by a program, or by an installed distribution's entry point."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from threading import Lock

from ..errors import InvalidRequestError
from .api import Driver

GROUP = "memferry.drivers"
OWN = ("auto", "cuda", "emulated")
_NAME = re.compile("[a-z][a-z0-9_]{0,31}")
_factories: dict[str, Callable[[], Driver]] = {}
_lock = Lock()


def register_driver(name: str, factory: Callable[[], Driver]) -> None:
    """Let ``open_driver(name)`` and ``open_device("name:0")`` give a driver that is not MemFerry's own.

    An installed distribution need not call it: an entry point of the group ``memferry.drivers`` with that name
    does the same, and is imported only when it is asked for, or ``"auto"`` finds no CUDA device.

    Parameters
    ----------
    name : str
        Lower-case letters, digits and underscores; the `Driver.name` of what the factory gives.
    factory : callable
        Gives the driver of this process, the same at every call until it is closed.  Where there is no such
        device it raises `DriverNotFoundError`; a driver that is there and broken is another `DriverError`.

    Raises
    ------
    InvalidRequestError
        The name cannot be one, or is taken by another factory; nothing was changed.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in OWN:
        raise InvalidRequestError(
            f"register_driver: {name!r} is no name for a driver: lower-case letters, digits and underscores, and "
            f"none of {', '.join(OWN)}"
        )
    if not callable(factory):
        raise InvalidRequestError(f"register_driver: {factory!r} cannot be called; give what opens the driver")
    with _lock:
        if _factories.setdefault(name, factory) is not factory:
            raise InvalidRequestError(
                f"register_driver: {name!r} is taken by {_factories[name]!r}; choose another name"
            )


def registered_names() -> tuple[str, ...]:
    """Of all drivers that are registered or installed, those of this program first."""
    return tuple(dict.fromkeys((*_factories, *_installed())))


def open_registered(name: str) -> Driver:
    """A driver by its name.

    Raises
    ------
    InvalidRequestError
        There is none of that name, or its factory gives something else.
    DriverError
        As the factory raises it.
    """
    factory = _factories.get(name) or _load(name)
    driver = factory()
    if not isinstance(driver, Driver) or driver.name != name:
        what = f"the driver {driver.name!r}" if isinstance(driver, Driver) else f"{driver!r}, which is no Driver"
        raise InvalidRequestError(
            f"driver: {name!r} is registered, and its factory gives {what}; mend the factory"
        )
    return driver


def is_registered(name: str) -> bool:
    return name in _factories or name in _installed()


def _load(name: str) -> Callable[[], Driver]:
    found = _installed().get(name)
    if found is None:
        known = ", ".join(map(repr, (*OWN, *registered_names())))
        raise InvalidRequestError(f"driver: unknown kind {name!r}; there are {known}")
    factory: Callable[[], Driver] = found.load()
    return factory


@cache
def _installed() -> dict[str, EntryPoint]:
    return {found.name: found for found in entry_points(group=GROUP) if _NAME.fullmatch(found.name)}
