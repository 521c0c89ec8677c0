"""The PyTorch adapter: everything of the runtime that imports torch."""

from .checkpoint import load, save
from .lion import Lion
from .offload import offload, restore, runtime_of, synchronize
from .report import Report
from .runtime import Runtime

__all__ = ["Lion", "Report", "Runtime", "load", "offload", "restore", "runtime_of", "save", "synchronize"]
