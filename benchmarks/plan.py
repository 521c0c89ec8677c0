"""Iterations as predicted without a device, and as ``memferry train`` makes them.

    python -m benchmarks.plan [--rows NAME,NAME] [--steps 8] [--profiles FOLDER] [--limit SECONDS] [--out FILE]

Each row is what the runtime does by itself in some budget: predicted by formulas, and by a profile too where
``FOLDER`` has one named as the row without its budget (``llama-1b-8x1024.json``, of ``memferry profile``).
``--device emulated --preset tiny`` tries the benchmark out on any machine, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memferry_allocator import parse_size
from memferry_rt.errors import BudgetError, PlanError
from memferry_rt.plan import Batch, PlanOptions, load_profile, machine_from_profile, transformer
from memferry_rt.plan.machine import H200
from memferry_rt.plan.planner import plan_as_offload
from memferry_tools.plan.target import dimensions
from memferry_tools.train.presets import find_preset

from . import records

WITHIN = 0.1  # of what is measured: a prediction that hits


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


JOBS = (
    *(Job("llama-1b", 8, 1024, memory) for memory in ("4GiB", "6GiB", "8GiB", "12GiB", "16GiB", "24GiB")),
    *(Job("llama-1b", 1, 1024, memory) for memory in ("4GiB", "8GiB")),
    Job("llama-1b", 16, 1024, "12GiB"),
    Job("llama-1b", 4, 4096, "16GiB"),
    *(Job("llama-3b", 8, 1024, memory) for memory in ("8GiB", "11.5GiB", "24GiB")),
    *(Job("llama-7b", 8, 1024, memory) for memory in ("16GiB", "24GiB")),
)
ROWS = {job.name: job for job in JOBS}


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


def measure(
    job: Job, device: str, preset: str | None, steps: int, profiles: Path | None, limit: float
) -> records.Row:
    """A row: predicted here, measured in a process of its own."""
    model = preset or job.preset
    memory = job.device_memory if preset is None else f"{_scaled(job, preset, device) >> 20}MiB"
    command = [sys.executable, "-m", "memferry_tools", "train", "--preset", model, "--checkpointing"]
    command += ["--micro-batch", str(job.micro_batch), "--seq", str(job.seq), "--steps", str(steps)]
    command += ["--device", device, "--device-memory", memory]
    predicted = predict(job, model, memory, profiles)
    return {
        "job": {**asdict(job), "preset": model},
        "predicted": predicted,
        **records.measured_apart(command, limit),
    }


def _scaled(job: Job, preset: str, device: str) -> int:
    """Device memory for another model that is the same multiple of its weights."""
    itemsize = 4 if device.startswith("emulated") else 2
    weights = itemsize * find_preset(preset).shape.parameters
    return int(parse_size(job.device_memory) / (2 * find_preset(job.preset).shape.parameters) * weights)


def summarise(rows: dict[str, records.Row]) -> dict[str, Any]:
    """Each row's figures, and how many predictions hit."""
    figures = {name: _figures(row) for name, row in rows.items()}
    hits = {}
    for by in ("formula", "profile"):
        errors = [row[f"{by}_error"] for row in figures.values() if row.get(f"{by}_error") is not None]
        hits[by] = {"rows": len(errors), "within": sum(abs(error) <= WITHIN for error in errors)}
    return {"rows": figures, "hits": hits}


def _figures(row: records.Row) -> dict[str, Any]:
    if row["status"] != "ok":
        return {"failed": row["message"]}
    measured = row["result"]["summary"]["iteration_s"]
    found = {"measured_s": measured, **row["predicted"]}
    for by in ("formula", "profile"):
        predicted = row["predicted"].get(f"{by}_s")
        found[f"{by}_error"] = None if predicted is None else predicted / measured - 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}; by default all")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--preset", help="another model, in device memory to its scale")
    parser.add_argument("--profiles", type=Path, help="folder of profiles")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one process may take")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "plan.json")
    arguments = parser.parse_args()
    names = arguments.rows.split(",")
    for name in names:
        if name not in ROWS:
            parser.error(f"--rows: there is no {name!r}; known are {', '.join(ROWS)}")
    file = records.Records(arguments.out, "plan_predictions", list(ROWS), summarise)
    for name in names:
        row = measure(
            ROWS[name], arguments.device, arguments.preset, arguments.steps, arguments.profiles, arguments.limit
        )
        file.put(name, row)
        print(f"{name}: {json.dumps(summarise(file.rows)['rows'][name])}", flush=True)


if __name__ == "__main__":
    main()
