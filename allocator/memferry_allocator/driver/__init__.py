"""Accelerator drivers behind one contract."""

from __future__ import annotations

import contextlib
import re

from ..errors import DriverError, DriverNotFoundError, InvalidRequestError
from .api import COPY_BLOCKS, Driver
from .emulated import EmulatedDriver, EmulatedOptions, LinkModel, Route, Wiring
from .handles import Bracket, Event, Stream, require_stream
from .registry import is_registered, open_registered, register_driver, registered_names
from .types import CaptureMode, DeviceInfo, MemoryInfo, PageKind, PageLocation, Span

__all__ = [
    "COPY_BLOCKS",
    "Bracket",
    "CaptureMode",
    "DeviceInfo",
    "Driver",
    "EmulatedDriver",
    "EmulatedOptions",
    "Event",
    "LinkModel",
    "MemoryInfo",
    "PageKind",
    "PageLocation",
    "Route",
    "Span",
    "Stream",
    "Wiring",
    "open_device",
    "open_driver",
    "register_driver",
    "require_stream",
]

_DEVICE = re.compile(r"auto|([a-z][a-z0-9_]*)(?::[0-9]{1,9})?")


def open_driver(kind: str = "auto", *, emulated: EmulatedOptions | None = None) -> Driver:
    """The driver of this machine's accelerators.

    Parameters
    ----------
    kind : {"auto", "cuda", "emulated"} or str
        Or the name of a driver that is registered (`register_driver`).  ``"auto"`` takes CUDA, else the first of
        those that finds a device, and the emulated device only where there is no accelerator at all.  A driver
        that is there and does not work is an error, never a reason to emulate.
    emulated : EmulatedOptions, optional
        The machine to emulate, if it comes to that.

    Raises
    ------
    InvalidRequestError
        There is no driver of that name.
    DriverNotFoundError
        ``"cuda"``, or a registered name, where there is no such device.
    DriverError
        A driver that is broken.
    """
    if kind == "emulated":
        return EmulatedDriver(emulated)
    if kind not in ("auto", "cuda"):
        return open_registered(kind)
    from .cuda import cuda_driver  # not at import: the bindings are only needed where a device is used

    try:
        return cuda_driver()
    except DriverNotFoundError:
        if kind == "cuda":
            raise
    for name in registered_names():
        with contextlib.suppress(DriverNotFoundError):
            return open_registered(name)
    return EmulatedDriver(emulated)


def open_device(text: str, *, emulated: EmulatedOptions | None = None) -> tuple[Driver, int]:
    """The driver and ordinal meant by ``"auto"``, ``"cuda"``, ``"cuda:1"``, ``"emulated"`` or ``"emulated:1"``.

    The name of a registered driver stands for it as well, with an ordinal or without.

    The device's context is retained: host memory registered from now on is registered under it.

    Raises
    ------
    InvalidRequestError
        `text` does not name a device.
    DriverError
        There is no such device, or none at all, or its driver is broken.
    """
    found = _DEVICE.fullmatch(text) if isinstance(text, str) else None
    name = None if found is None else found[1]
    if found is None or not (name in (None, "cuda", "emulated") or is_registered(name)):
        others = "".join(f", '{other}', '{other}:0'" for other in registered_names())
        raise InvalidRequestError(
            f"device: {text!r} is not 'auto', 'cuda', 'cuda:0', 'emulated' or 'emulated:0'{others}"
        )
    kind, _, number = text.partition(":")
    ordinal = int(number or 0)
    driver = open_driver(kind, emulated=emulated)
    if ordinal >= driver.device_count:
        raise DriverError(
            "CUDA_ERROR_INVALID_DEVICE", f"device {text!r}", f"this machine has {driver.device_count}"
        )
    driver.memory_info(ordinal)
    return driver, ordinal
