"""The emulated accelerator: a `Driver` in host memory, strict about order.

Five rules make it worth testing on.  Work runs as late as the program allows; every access is checked by
vector clocks; work outside the driver is bracketed and so checked too; memory is poisoned, capacities hold
and misuse gets the real driver's answers; and a virtual clock moves by links given as plain data.
Not emulated: device kernels, driver pools, inter-process handles, and graphs: what is captured never runs.
"""

from __future__ import annotations

from .capture_calls import CaptureCalls
from .memory_calls import MemoryCalls
from .order_calls import OrderCalls
from .virtual_calls import VirtualCalls
from .work_calls import WorkCalls


class EmulatedDriver(MemoryCalls, OrderCalls, WorkCalls, VirtualCalls, CaptureCalls):
    """1 to 8 emulated accelerators.

    Parameters
    ----------
    options : EmulatedOptions, optional
        The machine; one device by default.
    """
