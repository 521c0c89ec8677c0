"""MemFerry's training runtime: models whose training state does not fit in an accelerator's memory."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from .checkpoint import CheckpointInfo, checkpoint_info
from .errors import BudgetError, CheckpointError, OffloadError, RankError, UnsupportedError
from .options import OffloadOptions

if TYPE_CHECKING:
    from .adapters.torch import Lion, Report, Runtime, load, offload, restore, runtime_of, save, synchronize

__all__ = [
    "BudgetError",
    "CheckpointError",
    "CheckpointInfo",
    "Lion",
    "OffloadError",
    "OffloadOptions",
    "RankError",
    "Report",
    "Runtime",
    "UnsupportedError",
    "checkpoint_info",
    "load",
    "offload",
    "restore",
    "runtime_of",
    "save",
    "synchronize",
]

_FROM_TORCH = ("Lion", "Report", "Runtime", "load", "offload", "restore", "runtime_of", "save", "synchronize")


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for."""
    if name not in _FROM_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("torch") is None:
        raise OffloadError("training needs PyTorch; install it with: pip install 'memferry-rt[torch]'")
    from .adapters import torch as adapter

    return getattr(adapter, name)
