"""Measuring links and ways: nvbandwidth's method and cases, and ours, on any driver."""

# The cases enter themselves in the catalogue, in this order.
from . import host_cases, peer_cases, memory_cases, kernel_cases, engine_cases  # noqa: F401, I001
from .bench import Bench, Load
from .calibrate import NEVER, calibrate, calibrate_on, measure_way
from .catalogue import CASES, Case, find_case, leave_out, run_case
from .errors import CorruptedError, NotRunError
from .hold import has_virtual_clock
from .options import MeasureOptions
from .result import CaseResult, Matrix

__all__ = [
    "CASES",
    "NEVER",
    "Bench",
    "Case",
    "CaseResult",
    "CorruptedError",
    "Load",
    "Matrix",
    "MeasureOptions",
    "NotRunError",
    "calibrate",
    "calibrate_on",
    "find_case",
    "has_virtual_clock",
    "leave_out",
    "measure_way",
    "run_case",
]
