"""The execution scheduler: for every layer where its weights are read, how its gradient leaves, who updates it.

Nothing here needs a framework or a device.
"""

from .adapters import with_adapters
from .explain import Bound, NextBest, find_bounds, next_best, one_more, usage
from .largest import Largest, largest_model
from .linked import machine_from_topology
from .machine import H200, Machine, machine_from_profile
from .model import LayerSpec, Workload, make_layer
from .modes import GradientMode, LayerModes, StateMode, WeightMode, format_modes, parse_modes
from .options import PlanOptions
from .plan import LayerPlan, Plan
from .plan_file import compare_plans, load_plan, save_plan
from .planner import Planned, make_plan
from .profile import (
    Copy,
    CopySample,
    GradientPlace,
    LayerKind,
    LayerProfile,
    Phase,
    Profile,
    Timing,
    WeightPlace,
    load_profile,
    save_profile,
)
from .profiled import workload_from_profile
from .shapes import Batch, Dimensions, Names, transformer

__all__ = [
    "H200",
    "Batch",
    "Bound",
    "Copy",
    "CopySample",
    "Dimensions",
    "GradientMode",
    "GradientPlace",
    "Largest",
    "LayerKind",
    "LayerModes",
    "LayerPlan",
    "LayerProfile",
    "LayerSpec",
    "Machine",
    "Names",
    "NextBest",
    "Phase",
    "Plan",
    "PlanOptions",
    "Planned",
    "Profile",
    "StateMode",
    "Timing",
    "WeightMode",
    "WeightPlace",
    "Workload",
    "compare_plans",
    "find_bounds",
    "format_modes",
    "largest_model",
    "load_plan",
    "load_profile",
    "machine_from_profile",
    "machine_from_topology",
    "make_layer",
    "make_plan",
    "next_best",
    "one_more",
    "parse_modes",
    "save_plan",
    "save_profile",
    "transformer",
    "usage",
    "with_adapters",
    "workload_from_profile",
]
