"""One run of ``memferry simulate``, from its options to its exit status."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memferry_allocator import format_size
from memferry_rt.errors import PlanError
from memferry_rt.plan import Plan, Planned, PlanOptions, Workload, find_bounds, load_plan, usage
from memferry_rt.plan.arms import ablation
from memferry_rt.plan.planner import plan_as_offload, plan_by_hand

from ..errors import ToolError
from ..files import check_writable, write_json, write_whole
from ..screen import Screen
from ..train.presets import PRESETS
from ..version import version
from . import plot
from .job import show_memory
from .options import DTYPES, Host, Model, build_host, build_model, path, size
from .report import document
from .show import format_seconds, show_bounds
from .system import MEMFERRY, check_system, describe, show_system
from .target import find_machine, find_workload


@dataclass(frozen=True)
class SimulateJob:
    """Settings of one run of ``memferry simulate``."""

    model: Model
    host: Host
    options: PlanOptions
    plan: Plan | None
    system: str
    ablation: bool
    auto: bool
    json: Path | None
    plot: Path | None

    @classmethod
    def build(cls, settings: dict[str, Any]) -> SimulateJob:
        """From what a user writes; a `ToolError` begins with the option's name."""
        plan = _load(settings["plan"])
        device_memory = size(settings["device_memory"], "--device-memory")
        if plan is not None:
            device_memory = device_memory or plan.device_memory
            settings = _as_planned(settings, plan)
            if settings["modes"]:
                raise ToolError("--modes: the plan has them; give one of the two")
        check_system(settings)
        if device_memory is None and settings["system"] != MEMFERRY:
            device_memory = 0  # it has no budget
        if device_memory is None:
            raise ToolError("--device-memory: give the budget, e.g. 24GiB, or a --plan, which has one")
        try:
            options = PlanOptions(
                device_memory,
                size(settings["host_memory"], "--host-memory"),
                numerics="relaxed",
                early=settings["early"],
                modes=settings["modes"] or "",
                loads=settings["loads"],
            )
        except PlanError as error:
            raise ToolError(f"--{error}") from None
        if settings["ablation"] and (plan is not None or settings["modes"]):
            raise ToolError("--ablation: its arms choose the modes; leave --plan and --modes out")
        if settings["ablation"] and settings["plot"] is not None:
            raise ToolError("--plot: it draws one iteration, and --ablation simulates several; leave one out")
        if settings["auto"] and (plan is not None or settings["modes"] or settings["ablation"]):
            raise ToolError("--auto: it is what the runtime does by itself; leave --plan, --modes, --ablation out")
        files = (path(settings[name], f"--{name}") for name in ("json", "plot"))
        what = (settings["system"], settings["ablation"], settings["auto"])
        return cls(build_model(**settings), build_host(**settings), options, plan, *what, *files)


def run(job: SimulateJob) -> int:
    """Simulate an iteration and show it."""
    for name, file in (("--json", job.json), ("--plot", job.plot)):
        check_writable(file, name)
    if job.plot is not None:
        plot.check_drawable()
    screen = Screen()
    screen.title(f"memferry {version()}: simulate")
    if job.system != MEMFERRY:
        machine, profile = find_machine(job.host)
        return show_system(screen, job.system, find_workload(job.model, profile), machine, profile, job.json)
    if job.ablation:
        return _show_arms(job, screen)
    planned = _planned(job)
    _show(job, planned, screen)
    return 0


def _planned(job: SimulateJob) -> Planned:
    machine, profile = find_machine(job.host)
    workload = find_workload(job.model, profile)
    if job.auto:
        return plan_as_offload(workload, job.options, machine, profile)
    if job.plan is None:
        return plan_by_hand(workload, job.options, machine, profile)
    _check(job.plan, workload)
    recomputed = [layer.recompute for layer in job.plan.layers]
    layers = tuple(
        replace(layer, recompute=None) if layer.recompute is not each else layer
        for layer, each in zip(workload.layers, recomputed, strict=True)
    )
    job.plan.check_ranks(machine.ranks)
    options = replace(job.options, modes=job.plan.modes, spares=job.plan.spare_slabs)
    return plan_by_hand(replace(workload, layers=layers), options, machine, profile, job.plan.choice)


def _show(job: SimulateJob, planned: Planned, screen: Screen) -> None:
    plan, taken = planned.plan, planned.run()
    screen.rows(
        [
            ("model", f"{plan.model}, {plan.micro_batch} x {plan.sequence} tokens"),
            ("machine", describe(planned.evaluator.machine_of(planned.outcome.choice))),
            ("iteration", format_seconds(plan.seconds)),
            ("device", f"{format_size(plan.device_peak_nbytes)} at the most of {format_size(plan.device_memory)}"),
            ("host", f"{format_size(plan.host_nbytes)} registered"),
        ]
    )
    if job.plan is not None:
        change = plan.seconds / job.plan.seconds - 1
        screen.rows(
            [("the plan's", f"{format_seconds(job.plan.seconds)} on {job.plan.device}; here {change:+.1%}")]
        )
    show_memory(screen, taken, plan)
    bounds = find_bounds(planned)
    show_bounds(screen, bounds, plan.seconds)
    if job.json is not None:
        content = document(plan, planned.setting.machine, taken, bounds=bounds, usage=usage(taken))
        write_json(job.json, content, "--json")
    if job.plot is not None:
        write_whole(job.plot, plot.draw(taken, f"{plan.model} on {plan.device}", plan.device_memory), "--plot")
    screen.rows([("written", str(file)) for file in (job.json, job.plot) if file is not None])


def _show_arms(job: SimulateJob, screen: Screen) -> int:
    machine, profile = find_machine(job.host)
    arms = ablation(find_workload(job.model, profile), job.options, machine, profile)
    cells, before = [], arms[0].seconds
    for arm in arms:
        cells.append((arm.name, format_seconds(arm.seconds), f"{arm.seconds / before - 1:+.1%}"))
        before = arm.seconds
    screen.table(("with", "iteration", "against the row above"), cells)
    if job.json is not None:
        rows = [{"name": arm.name, "seconds": arm.seconds} for arm in arms]
        write_json(job.json, {"schema": "memferry.ablation", "schema_version": 1, "arms": rows}, "--json")
    return 0


def _load(file: str | None) -> Plan | None:
    named = path(file, "--plan")
    try:
        return None if named is None else load_plan(named)
    except PlanError as error:
        raise ToolError(f"--plan: {error}") from None


def _as_planned(settings: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The plan's micro-batch and sequence, and its model if that is a preset, where none are given."""
    own: dict[str, Any] = {"micro_batch": plan.micro_batch, "sequence": plan.sequence}
    if plan.model in PRESETS and not any(settings[name] for name in ("config", "shape", "profile")):
        own["preset"] = plan.model
    return {**settings, **{name: settings[name] or value for name, value in own.items()}}


def _check(plan: Plan, workload: Workload) -> None:
    """Refuse a plan for another model, and say with what options it would be for this one."""
    try:
        plan.check(workload)
    except PlanError as error:
        why, _, _ = str(error).rpartition("; ")
        batch = f"--micro-batch {plan.micro_batch} --seq {plan.sequence}"
        model = (
            f"--preset {plan.model}" if plan.model in PRESETS else "the --config or --shape that it was made with"
        )
        dtype = next(short for short, long in DTYPES.items() if long == plan.dtype)
        raise ToolError(f"--plan: {why}; give {model}, --dtype {dtype} and {batch}, or plan anew") from None
