"""MemFerry's training runtime: models whose training state does not fit in an accelerator's memory."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from .checkpoint import CheckpointInfo, checkpoint_info
from .errors import (
    BudgetError,
    CheckpointError,
    OffloadError,
    PlanError,
    RankError,
    UnknownLayerError,
    UnsupportedError,
)
from .options import OffloadOptions

if TYPE_CHECKING:
    from .adapters.torch import (
        HelperReport,
        LayerReport,
        Lion,
        Report,
        Runtime,
        load,
        offload,
        plan_of,
        restore,
        runtime_of,
        save,
        set_plan,
        synchronize,
    )

__all__ = [
    "BudgetError",
    "CheckpointError",
    "CheckpointInfo",
    "HelperReport",
    "LayerReport",
    "Lion",
    "OffloadError",
    "OffloadOptions",
    "PlanError",
    "RankError",
    "Report",
    "Runtime",
    "UnknownLayerError",
    "UnsupportedError",
    "checkpoint_info",
    "load",
    "offload",
    "plan_of",
    "restore",
    "runtime_of",
    "save",
    "set_plan",
    "synchronize",
]

_FROM_TORCH = (
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
)


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for."""
    if name not in _FROM_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("torch") is None:
        raise OffloadError("training needs PyTorch; install it with: pip install 'memferry-rt[torch]'")
    from .adapters import torch as adapter

    return getattr(adapter, name)
