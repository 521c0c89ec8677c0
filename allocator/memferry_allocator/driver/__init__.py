"""Accelerator drivers behind one contract."""

from __future__ import annotations

import re

from ..errors import DriverError, DriverNotFoundError, InvalidRequestError
from .api import COPY_BLOCKS, Driver
from .emulated import EmulatedDriver, EmulatedOptions, LinkModel, Route, Wiring
from .handles import Bracket, Event, Stream, require_stream
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
    "require_stream",
]

_DEVICE = re.compile(r"auto|(?:cuda|emulated)(?::[0-9]{1,9})?")


def open_driver(kind: str = "auto", *, emulated: EmulatedOptions | None = None) -> Driver:
    """The driver of this machine's accelerators.

    Parameters
    ----------
    kind : {"auto", "cuda", "emulated"}
        ``"auto"`` takes the emulated device only where there is no accelerator at all.  A driver that is
        there and does not work is an error, never a reason to emulate.
    emulated : EmulatedOptions, optional
        The machine to emulate, if it comes to that.

    Raises
    ------
    DriverNotFoundError
        ``"cuda"`` where there is none.
    DriverError
        A driver that is broken.
    """
    if kind not in ("auto", "cuda", "emulated"):
        raise InvalidRequestError(f"driver: unknown kind {kind!r}; it is 'auto', 'cuda' or 'emulated'")
    if kind != "emulated":
        from .cuda import cuda_driver  # not at import: the bindings are only needed where a device is used

        try:
            return cuda_driver()
        except DriverNotFoundError:
            if kind == "cuda":
                raise
    return EmulatedDriver(emulated)


def open_device(text: str, *, emulated: EmulatedOptions | None = None) -> tuple[Driver, int]:
    """The driver and ordinal meant by ``"auto"``, ``"cuda"``, ``"cuda:1"``, ``"emulated"`` or ``"emulated:1"``.

    The device's context is retained: host memory registered from now on is registered under it.

    Raises
    ------
    InvalidRequestError
        `text` does not name a device.
    DriverError
        There is no such device, or none at all, or its driver is broken.
    """
    if not isinstance(text, str) or not _DEVICE.fullmatch(text):
        raise InvalidRequestError(f"device: {text!r} is not 'auto', 'cuda', 'cuda:0', 'emulated' or 'emulated:0'")
    kind, _, number = text.partition(":")
    ordinal = int(number or 0)
    driver = open_driver(kind, emulated=emulated)
    if ordinal >= driver.device_count:
        raise DriverError(
            "CUDA_ERROR_INVALID_DEVICE", f"device {text!r}", f"this machine has {driver.device_count}"
        )
    driver.memory_info(ordinal)
    return driver, ordinal
