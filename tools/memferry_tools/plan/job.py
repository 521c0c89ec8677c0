"""One run of ``memferry plan``, from its options to its exit status."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memferry_rt.errors import PlanError
from memferry_rt.plan import (
    Plan,
    Planned,
    PlanOptions,
    compare_plans,
    find_bounds,
    largest_model,
    load_plan,
    make_plan,
    next_best,
    one_more,
)
from memferry_rt.plan.evaluate import Run
from memferry_rt.plan.plan_file import dumps_plan
from memferry_rt.plan.timeline import at, device_memory

from ..errors import ToolError
from ..files import check_writable, write_json, write_whole
from ..screen import Screen
from ..version import version
from . import plot
from .configs import llama_config
from .largest import VOCABULARY, train_command, vocabulary_of
from .options import Host, Model, build_host, build_model, path, size
from .report import document
from .show import format_seconds, more_rows, show_bounds, show_plan
from .target import find_batch, find_machine, find_workload

_POINTS = 6  # of memory over time, on the screen
# What `PlanOptions` calls otherwise.
_OPTIONS = {"spares": "spare-slabs", "gradient_memory": "gradient-memory"}


@dataclass(frozen=True)
class PlanJob:
    """Settings of one run of ``memferry plan``."""

    model: Model
    host: Host
    options: PlanOptions
    largest: bool
    vocabulary: int
    save: Path | None
    save_config: Path | None
    json: Path | None
    plot: Path | None

    @classmethod
    def build(cls, settings: dict[str, Any]) -> PlanJob:
        """From what a user writes; a `ToolError` begins with the option's name."""
        device_memory = size(settings["device_memory"], "--device-memory")
        host_memory = size(settings["host_memory"], "--host-memory")
        if device_memory is None:
            raise ToolError("--device-memory: give the budget that the plan must fit in, e.g. 24GiB")
        if settings["largest"] and host_memory is None:
            raise ToolError("--host-memory: the largest model depends on it; give it")
        if settings["largest"] and (settings["preset"] or settings["config"]):
            raise ToolError("--largest: it finds the model; leave --preset and --config out")
        if settings["save_config"] is not None and not settings["largest"]:
            raise ToolError("--save-config: it keeps the sizes that --largest finds; add that")
        if settings["largest"] and settings["shape"] is not None:
            settings = {**settings, "shape": None, "vocabulary": vocabulary_of(settings["shape"])}
        try:
            options = PlanOptions(
                device_memory,
                host_memory,
                numerics=settings["numerics"],
                early=settings["early"],
                spares=settings["spare_slabs"],
                modes=settings["modes"] or "",
                reserve=settings["reserve"],
                gradient_memory=size(settings["gradient_memory"], "--gradient-memory"),
                partial=settings["partial"],
            )
        except PlanError as error:
            name, _, why = str(error).partition(":")
            raise ToolError(f"--{_OPTIONS.get(name, name)}:{why}") from None
        files = {
            name: path(settings[name], f"--{name.replace('_', '-')}")
            for name in ("save", "save_config", "json", "plot")
        }
        vocabulary = settings.get("vocabulary", VOCABULARY)
        model, host = build_model(**settings), build_host(**settings)
        return cls(model, host, options, settings["largest"], vocabulary, **files)


def run(job: PlanJob) -> int:
    """Make a plan, show it and why it is so, and keep it."""
    files = {"save": job.save, "save-config": job.save_config, "json": job.json, "plot": job.plot}
    for name, file in files.items():
        check_writable(file, f"--{name}")
    if job.plot is not None:
        plot.check_drawable()
    machine, profile = find_machine(job.host)
    found = None
    if job.largest:
        found = largest_model(job.options, find_batch(job.model), machine, vocabulary=job.vocabulary)
        planned = found.planned
    else:
        planned = make_plan(find_workload(job.model, profile), job.options, machine, profile)
    screen = Screen()
    screen.title(f"memferry {version()}: plan")
    _show(job, planned, screen)
    if found is not None:
        if job.save_config is not None:
            write_json(job.save_config, llama_config(found.size), "--save-config")
        assert job.options.host_memory is not None
        command = train_command(found, job.options.device_memory, job.options.host_memory, job.save_config)
        screen.rows([("train", command)])
    screen.rows([("written", str(file)) for file in files.values() if file is not None])
    return 0


def compare(first: str, second: str) -> int:
    """Compare two plans' files; 1 if they decide differently."""
    plans = [_load(file) for file in (first, second)]
    differences = compare_plans(*plans)
    screen = Screen()
    screen.title(f"memferry {version()}: plans")
    screen.rows([("differ", each) for each in differences] or [("equal", "both decide the same")])
    screen.rows(
        [("iteration", f"{format_seconds(plans[0].seconds)} and {format_seconds(plans[1].seconds)} predicted")]
    )
    return 1 if differences else 0


def show_memory(screen: Screen, taken: Run, plan: Plan) -> None:
    """Memory of both sides, at some times of the iteration."""
    memory = device_memory(taken)
    times = [taken.seconds * number / (_POINTS - 1) for number in range(_POINTS)]
    cells = [(format_seconds(time), _gib(at(memory, time)), _gib(plan.host_nbytes)) for time in times]
    screen.table(("at", "device", "host"), cells)


def _show(job: PlanJob, planned: Planned, screen: Screen) -> None:
    plan, taken = planned.plan, planned.run()
    following, bounds = next_best(planned), find_bounds(planned)
    saved = one_more(planned)
    show_plan(screen, plan, following)
    show_memory(screen, taken, plan)
    show_bounds(screen, bounds, plan.seconds)
    screen.rows(more_rows(saved, plan.seconds))
    if job.save is not None:
        write_whole(job.save, dumps_plan(plan) + "\n", "--save")
    if job.json is not None:
        content = document(plan, planned.setting.machine, taken, bounds=bounds, following=following, saved=saved)
        write_json(job.json, content, "--json")
    if job.plot is not None:
        write_whole(job.plot, plot.draw(taken, f"{plan.model} on {plan.device}", plan.device_memory), "--plot")


def _load(file: str) -> Plan:
    try:
        return load_plan(file)
    except PlanError as error:
        raise ToolError(f"--compare: {error}") from None


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
