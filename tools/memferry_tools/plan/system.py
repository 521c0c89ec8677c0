"""``memferry simulate --system``: another system's iteration, on the same machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memferry_rt.plan import Machine, Profile, Workload
from memferry_rt.plan.zero_offload import zero_offload

from ..errors import ToolError
from ..files import write_json
from ..screen import Screen
from .show import format_seconds

MEMFERRY, DEEPSPEED = SYSTEMS = ("memferry", "deepspeed")
_OWN = ("plan", "modes", "ablation", "auto", "early", "helpers", "plot")  # options of MemFerry alone


def check_system(settings: Mapping[str, Any]) -> None:
    """Refuse a system that is not known, and options that another has not.

    Raises
    ------
    ToolError
        It begins with the option's name.
    """
    system = settings["system"]
    if system not in SYSTEMS:
        raise ToolError(f"--system: {system!r} is not one of {', '.join(SYSTEMS)}")
    given = [name for name in _OWN if settings[name]] + ["loads"] * (settings["loads"] != "whole")
    if system != MEMFERRY and given:
        raise ToolError(f"--{given[0]}: --system {system} has no such thing; leave one of them out")


def describe(machine: Machine) -> str:
    """Which devices train, and which help."""
    ranks, helpers = machine.ranks, max(len(machine.relays_to_device), len(machine.relays_from_device))
    text = machine.name if ranks == 1 else f"{ranks} x {machine.name}, each with such a batch"
    if helpers:
        text += f"; {helpers} idle for {'it' if ranks == 1 else 'each'}: {machine.relayed} relayed"
    return text


def show_system(
    screen: Screen, system: str, workload: Workload, machine: Machine, profile: Profile | None, json: Path | None
) -> int:
    """Simulate an iteration of DeepSpeed's and show it."""
    found = zero_offload(workload, machine, profile)
    screen.rows(
        [
            ("model", f"{workload.name}, {workload.micro_batch} x {workload.sequence} tokens"),
            ("machine", describe(machine)),
            ("system", "as DeepSpeed's ZeRO-2 with its optimizer offloaded, by the rules of plan/zero_offload.py"),
            ("iteration", format_seconds(found.seconds)),
            ("computing", f"{format_seconds(found.computing)}, with what of gradients' way home is not hidden"),
            ("updating", f"{format_seconds(found.updating)}, by the CPU"),
            ("returning", f"{format_seconds(found.returning)}, of new weights"),
        ]
    )
    if json is not None:
        content = {"schema": "memferry.system", "schema_version": 1, "system": system, **asdict(found)}
        write_json(json, content, "--json")
        screen.rows([("written", str(json))])
    return 0
