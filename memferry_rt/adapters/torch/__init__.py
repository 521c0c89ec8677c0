"""The PyTorch adapter: everything of the runtime that imports torch."""

from .offload import offload, restore, runtime_of, synchronize
from .runtime import Report, Runtime

__all__ = ["Report", "Runtime", "offload", "restore", "runtime_of", "synchronize"]
