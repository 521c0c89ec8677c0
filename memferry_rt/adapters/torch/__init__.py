"""The PyTorch adapter: everything of the runtime that imports torch."""

from .offload import offload, restore, runtime_of, synchronize
from .report import Report
from .runtime import Runtime

__all__ = ["Report", "Runtime", "offload", "restore", "runtime_of", "synchronize"]
