"""The PyTorch adapter: everything of the runtime that imports torch."""

from .checkpoint import load, save
from .lion import Lion
from .offload import offload, plan_of, restore, runtime_of, set_plan, synchronize
from .report import HelperReport, LayerReport, Report
from .runtime import Runtime

__all__ = [
    "HelperReport",
    "LayerReport",
    "Lion",
    "Report",
    "Runtime",
    "load",
    "offload",
    "plan_of",
    "restore",
    "runtime_of",
    "save",
    "set_plan",
    "synchronize",
]
