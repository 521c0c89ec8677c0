"""How much memory a run is given, and what to say when it was not enough."""

from __future__ import annotations

import re
import traceback

import torch

from memferry_allocator import format_size
from memferry_rt import Runtime

from ..errors import ToolError
from .activations import torch_memory
from .device import Target
from .recipe import Recipe

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ASKED = re.compile(r"[Tt]ried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)")


def default_device_memory(target: Target, recipe: Recipe) -> int:
    """Bytes of device memory for a user who names none.

    A third of the weights on the emulated device, so that they do have to move; three quarters of what is free
    on a real one.
    """
    return recipe.weight_nbytes // 3 if target.emulated else target.free * 3 // 4


def explain_out_of_memory(error: BaseException, target: Target, recipe: Recipe, runtime: Runtime) -> ToolError:
    """The error for a user whose device budget holds the weights and not what torch computes with them.

    Parameters
    ----------
    error : torch.OutOfMemoryError
    target : Target
    recipe : Recipe
    runtime : Runtime
        After the error.
    """
    traceback.clear_frames(error.__traceback__)  # an interrupted checkpoint of older torch keeps its hooks there
    reserved = 0 if target.emulated else torch.cuda.memory_reserved(target.torch_device)
    asked = _asked_for(str(error))
    report = runtime.report()
    smallest = runtime.smallest_device_memory(max(reserved + asked, torch_memory(recipe)))
    ways = ["use a smaller --micro-batch or --seq"]
    ways += ["--checkpointing"] * (not recipe.checkpointing)
    ways += ["a smaller --pool-memory"] * (report.steps > 0)
    return ToolError(
        f"--device-memory: {format_size(report.device_memory)} is too small: MemFerry's pool has "
        f"{format_size(report.pool_nbytes)} of it, torch had reserved {format_size(reserved)} and asked for "
        f"{format_size(asked)} more; the smallest that works is about {-(-smallest >> 20)}MiB; write that, or "
        f"{', or '.join(ways)}"
    )


def is_host_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not allocate host memory; it has no error class for that."""
    return "DefaultCPUAllocator" in str(error)


def _asked_for(message: str) -> int:
    found = _ASKED.search(message)
    return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0
