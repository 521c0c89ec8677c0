"""Iterations as predicted without a device, and as ``memferry train`` makes them.

    python -m benchmarks.plan [--rows PATTERN,PATTERN] [--steps 8] [--profiles FOLDER] [--limit-total SECONDS]

Most rows are what the runtime does by itself in some budget: predicted by formulas, and by a profile too where
``FOLDER`` has one named as the row without its budget (``llama-1b-8x1024.json``, of ``memferry profile``).  Those
of ``auto`` train by ``--plan auto`` and by default, until the trials of the plan are over; ``largest`` is the
largest model that the planner finds for both memories.
``--device emulated --preset tiny`` tries the benchmark out on any machine, and measures nothing.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from memferry_allocator import parse_size
from memferry_rt.errors import BudgetError, PlanError
from memferry_rt.plan import (
    Batch,
    PlanOptions,
    largest_model,
    load_profile,
    machine_from_profile,
    transformer,
)
from memferry_rt.plan.machine import H200
from memferry_rt.plan.planner import plan_as_offload
from memferry_tools.plan.largest import VOCABULARY, train_command
from memferry_tools.plan.target import dimensions
from memferry_tools.train.presets import find_preset

from . import records
from .budgets import mib, scaled_device
from .visits import add_arguments, chosen, visit

WITHIN = 0.1  # of what is measured: a prediction that hits
SETTLED = 10  # last steps, whose median is what a run has come to
MODULE = (sys.executable, "-m", "memferry_tools")


@dataclass(frozen=True)
class Job:
    """What a row trains, activations recomputed, clipped to norm 1."""

    preset: str
    micro_batch: int
    seq: int
    device_memory: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.device_memory}"

    @property
    def model(self) -> str:
        return f"{self.preset}-{self.micro_batch}x{self.seq}"


@dataclass(frozen=True)
class Auto:
    """A job that is trained by default and by ``--plan auto``, for so many steps."""

    job: Job
    steps: int = 40

    @property
    def name(self) -> str:
        return f"auto-{self.job.name}"


@dataclass(frozen=True)
class Largest:
    """The largest model of two budgets, trained for a few steps."""

    device_memory: str
    host_memory: str
    batch: Batch
    vocabulary: int = VOCABULARY

    @property
    def name(self) -> str:
        return f"largest-{self.device_memory}-{self.host_memory}"


JOBS = (
    *(Job("llama-1b", 8, 1024, memory) for memory in ("4GiB", "6GiB", "8GiB", "12GiB", "16GiB", "24GiB")),
    *(Job("llama-1b", 1, 1024, memory) for memory in ("4GiB", "8GiB")),
    Job("llama-1b", 16, 1024, "12GiB"),
    Job("llama-1b", 4, 4096, "16GiB"),
    *(Job("llama-3b", 8, 1024, memory) for memory in ("8GiB", "11.5GiB", "24GiB")),
    *(Job("llama-7b", 8, 1024, memory) for memory in ("16GiB", "24GiB")),
    Job("large-vocabulary", 1, 1024, "6GiB"),
)
AUTOS = tuple(Auto(job) for job in (Job("llama-1b", 8, 1024, "6GiB"), Job("large-vocabulary", 1, 1024, "6GiB")))
LARGEST = Largest("24GiB", "128GiB", Batch(1, 1024, recompute=True))
SMALL = Largest("80MiB", "40MiB", Batch(1, 32, "float32", recompute=True), vocabulary=256)
ROWS: dict[str, Job | Auto | Largest] = {job.name: job for job in JOBS}
ROWS |= {auto.name: auto for auto in AUTOS}
ROWS[LARGEST.name] = LARGEST


def predict(job: Job, preset: str, memory: str, profiles: Path | None = None) -> dict[str, Any]:
    """Seconds of an iteration by formulas, and by a profile if there is one; or why there are none."""
    shape = find_preset(preset).shape
    workload = transformer(preset, dimensions(shape), Batch(job.micro_batch, job.seq, recompute=True))
    options = PlanOptions(parse_size(memory))
    file = None if profiles is None else profiles / f"{job.model}.json"
    try:
        found: dict[str, Any] = {"formula_s": plan_as_offload(workload, options).plan.seconds}
        if file is not None and file.exists():
            profile = load_profile(file)
            machine = machine_from_profile(profile, H200)
            found["profile_s"] = plan_as_offload(workload, options, machine, profile).plan.seconds
    except (BudgetError, PlanError) as error:
        return {"refused": str(error)}
    return found


class Session:
    """The rows of one call.

    Parameters
    ----------
    device : str
        As ``memferry train`` takes it.
    preset : str or None
        Instead of each row's own, in memory to its scale, and in place of the largest model one of few MiB.
    steps : int
        Optimizer steps of most rows; the first 3 are not counted.
    profiles : Path or None
    """

    def __init__(self, device: str, preset: str | None, steps: int, profiles: Path | None) -> None:
        self._device = device
        self._preset = preset
        self._steps = steps
        self._profiles = profiles

    def measure(self, name: str, limit_s: float) -> records.Row:
        """A row: predicted here, measured in processes of its own."""
        row = ROWS[name]
        if isinstance(row, Job):
            return self._prediction(row, limit_s)
        return self._auto(row, limit_s) if isinstance(row, Auto) else self._largest(row, limit_s)

    def _prediction(self, job: Job, limit_s: float) -> records.Row:
        model, memory = self._scaled(job)
        predicted = predict(job, model, memory, self._profiles)
        command = [*self._command(job), "--steps", str(self._steps)]
        row = {"job": {**asdict(job), "preset": model}, "predicted": predicted}
        return {**row, **records.measured_apart(command, limit_s)}

    def _auto(self, auto: Auto, limit_s: float) -> records.Row:
        """Both runs; what is left of the limit is the second's."""
        steps = auto.steps if self._preset is None else self._steps
        command = [*self._command(auto.job), "--steps", str(steps)]
        runs = {"default": records.measured_apart(command, 0.5 * limit_s)}
        runs["auto"] = records.measured_apart([*command, "--plan", "auto"], 0.5 * limit_s)
        bad = [f"{name}: {run['message']}" for name, run in runs.items() if run["status"] != "ok"]
        status = {"status": "failed", "message": "; ".join(bad)} if bad else {"status": "ok"}
        return {"job": {**asdict(auto.job), "steps": steps}, **status, "runs": runs}

    def _largest(self, largest: Largest, limit_s: float) -> records.Row:
        largest = largest if self._preset is None else SMALL
        device_memory, host_memory = parse_size(largest.device_memory), parse_size(largest.host_memory)
        options = PlanOptions(device_memory, host_memory)
        found = largest_model(options, largest.batch, vocabulary=largest.vocabulary)
        words = shlex.split(train_command(found, device_memory, host_memory, None))
        command = [*MODULE, *words[1:], "--device", self._device]
        plan = found.planned.plan
        row = {"job": asdict(largest), "model": plan.model, "parameters": found.parameters}
        predicted = plan_as_offload(found.planned.setting.workload, options).plan.seconds
        return {**row, "predicted_s": predicted, **records.measured_apart(command, limit_s)}

    def _scaled(self, job: Job) -> tuple[str, str]:
        """The model that is trained, and its device memory."""
        if self._preset is None:
            return job.preset, job.device_memory
        return self._preset, mib(scaled_device(job.device_memory, job.preset, self._preset, self._device))

    def _command(self, job: Job) -> list[str]:
        model, memory = self._scaled(job)
        if self._preset is not None:
            job = replace(job, micro_batch=1, seq=64)
        command = [*MODULE, "train", "--preset", model, "--checkpointing", "--micro-batch", str(job.micro_batch)]
        command += ["--seq", str(job.seq)]
        return [*command, "--device", self._device, "--device-memory", memory]


def summarise(rows: dict[str, records.Row]) -> dict[str, Any]:
    """Each row's figures by what kind it is, and how many predictions hit."""
    kinds = {
        kind: {name: row for name, row in rows.items() if isinstance(ROWS[name], kind)}
        for kind in (Job, Auto, Largest)
    }
    figures = {name: _figures(row) for name, row in kinds[Job].items()}
    hits = {}
    for by in ("formula", "profile"):
        errors = [row[f"{by}_error"] for row in figures.values() if row.get(f"{by}_error") is not None]
        hits[by] = {"rows": len(errors), "within": sum(abs(error) <= WITHIN for error in errors)}
    return {
        "rows": figures,
        "hits": hits,
        "auto": {name: _auto_figures(row) for name, row in kinds[Auto].items()},
        "largest": {name: _largest_figures(row) for name, row in kinds[Largest].items()},
    }


def _said(rows: dict[str, records.Row]) -> dict[str, Any]:
    """The figures of every row, whatever its kind."""
    summary = summarise(rows)
    return {**summary["rows"], **summary["auto"], **summary["largest"]}


def _figures(row: records.Row) -> dict[str, Any]:
    if row["status"] != "ok":
        return {"failed": row["message"]}
    measured = row["result"]["summary"]["iteration_s"]
    found = {"measured_s": measured, **row["predicted"]}
    for by in ("formula", "profile"):
        predicted = row["predicted"].get(f"{by}_s")
        found[f"{by}_error"] = None if predicted is None else predicted / measured - 1
    return found


def _auto_figures(row: records.Row) -> dict[str, Any]:
    """All steps of both, trials included, and what each has come to in the end."""
    if row["status"] != "ok":
        return {"failed": row["message"]}
    found: dict[str, Any] = {"steps": row["job"]["steps"]}
    for name, run in row["runs"].items():
        seconds = [sample["seconds"] for sample in run["result"]["samples"]]
        found[f"{name}_total_s"] = sum(seconds)
        found[f"{name}_settled_s"] = statistics.median(seconds[-SETTLED:])
    report = row["runs"]["auto"]["result"]["report"]
    return {
        **found,
        "settled_ratio": found["auto_settled_s"] / found["default_settled_s"],
        "total_ratio": found["auto_total_s"] / found["default_total_s"],
        "plan_source": report["plan_source"],
        "plan_notes": report["plan_notes"],
    }


def _largest_figures(row: records.Row) -> dict[str, Any]:
    found = {"model": row["model"], "parameters": row["parameters"], "predicted_s": row["predicted_s"]}
    if row["status"] != "ok":
        return {**found, "failed": row["message"]}
    report, measured = row["result"]["report"], row["result"]["summary"]["iteration_s"]
    return {
        **found,
        "steps": report["steps"],
        "measured_s": measured,
        "device_peak_bytes": report["device_peak"],
        "device_memory": report["device_memory"],
        "host_bytes": report["host_nbytes"],
        "host_memory": row["result"]["settings"]["host_memory"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, list(ROWS), limit=240, out=records.RESULTS / "plan.json")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--preset", help="another model, in device memory to its scale")
    parser.add_argument("--profiles", type=Path, help="folder of profiles")
    arguments = parser.parse_args()
    names = chosen(parser, arguments)
    session = Session(arguments.device, arguments.preset, arguments.steps, arguments.profiles)
    file = records.Records(arguments.out, "plan_predictions", list(ROWS), summarise)
    visit(names, session.measure, file, arguments, _said)


if __name__ == "__main__":
    main()
