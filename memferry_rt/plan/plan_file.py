"""A plan as data: ``{"schema": "memferry.plan", "version": 2, ...}``; files of version 1 are read, too."""

from __future__ import annotations

from pathlib import Path

from ..errors import PlanError
from .codec import decode, encode, read_text
from .plan import LayerPlan, Plan

SCHEMA, VERSION = "memferry.plan", 2
NEW = {"ranks": 2}  # fields that the first version had not


def dumps_plan(plan: Plan) -> str:
    """As JSON text."""
    return encode(SCHEMA, VERSION, plan)


def loads_plan(text: str) -> Plan:
    """From JSON text; errors as for `load_plan`."""
    return decode(SCHEMA, VERSION, Plan, text, since=NEW)


def save_plan(plan: Plan, file: Path | str) -> None:
    """Write a plan's file."""
    Path(file).write_text(dumps_plan(plan) + "\n", encoding="utf-8")


def load_plan(file: Path | str) -> Plan:
    """A plan from its file.

    Raises
    ------
    PlanError
        The file cannot be read, is no plan, or contradicts itself; the error names the file and the field.
    """
    try:
        return loads_plan(read_text(file))
    except PlanError as error:
        raise PlanError(f"plan {file}: {error}") from None


def compare_plans(first: Plan, second: Plan) -> list[str]:
    """What is different, in words; nothing if the two decide the same for the same model.

    Predicted times and notes do not count.
    """
    found = [
        f"{name}: {getattr(first, name)} and {getattr(second, name)}"
        for name in (
            "fingerprint",
            "device",
            "ranks",
            "micro_batch",
            "sequence",
            "device_memory",
            "host_memory",
            "spare_slabs",
        )
        if getattr(first, name) != getattr(second, name)
    ]
    others = {layer.name: layer for layer in second.layers}
    for layer in first.layers:
        other = others.pop(layer.name, None)
        if other is None:
            found.append(f"{layer.name} is in the first alone")
        elif (layer.modes, layer.recompute) != (other.modes, other.recompute):
            found.append(f"{layer.name}: {_words(layer)} and {_words(other)}")
    return [*found, *(f"{name} is in the second alone" for name in others)]


def _words(layer: LayerPlan) -> str:
    return f"{layer.modes}{'+recompute' if layer.recompute else ''}"
