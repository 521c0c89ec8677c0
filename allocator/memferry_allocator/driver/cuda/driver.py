"""NVIDIA devices through the CUDA driver API.

Driver API only: a failed runtime-API call leaves its error behind for other people's next call.  Each
device's primary context is retained once, so that memory and streams are shared with every framework in
the process; it is made current for the length of a call and what was current before is put back.
"""

from __future__ import annotations

import os
import threading

from .beside_calls import BesideCalls
from .capture_calls import CaptureCalls
from .kernel_calls import KernelCalls
from .virtual_calls import VirtualCalls


class CudaDriver(VirtualCalls, BesideCalls, KernelCalls, CaptureCalls):
    """The CUDA driver of this process.

    Raises
    ------
    DriverNotFoundError
        This machine has no NVIDIA driver or no device.
    ForkedError
        The parent of this process initialised CUDA before it forked.
    DriverError
        There is a driver that does not work; ``code`` and the message say how.
    """


_process_driver: CudaDriver | None = None
_locks: dict[int, threading.Lock] = {}


def cuda_driver() -> CudaDriver:
    """The driver object that everything in this process shares."""
    global _process_driver
    known = _process_driver
    if known is not None:
        known.require_usable()
    # A lock of this very process: one inherited by fork() may be held by a thread that is not here.
    with _locks.setdefault(os.getpid(), threading.Lock()):
        if _process_driver is None or _process_driver._closed:
            _process_driver = CudaDriver()
        return _process_driver
