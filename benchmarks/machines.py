"""Iterations on machines that nobody here has, by the simulator: ``python -m benchmarks.machines``.

Writes ``benchmarks/results/machines.json``.  No device is needed, and the same code writes the same file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memferry_rt.plan import Machine, PlanOptions, Workload, find_bounds, machine_from_topology, make_plan
from memferry_rt.plan.adapters import with_adapters
from memferry_rt.plan.planner import Planned, plan_as_offload
from memferry_rt.plan.shapes import Batch, transformer
from memferry_rt.plan.zero_offload import zero_offload
from memferry_tools.plan.target import dimensions
from memferry_tools.train.presets import find_preset
from memferry_transport.topology import machine

RESULT = Path(__file__).parent / "results" / "machines.json"
GIB = 1 << 30
HOSTS = (0.5, 1, 2)  # of host memory and of the CPU, as shares of what is assumed
NUMBERS = ("to_device", "peers", "host_memory", "cpu_update", "matmul", "device_memory")


@dataclass(frozen=True)
class Case:
    """Devices of a machine that train a model, each with a micro-batch of its own.

    Attributes
    ----------
    fixture : str
    ranks : int
    preset : str
    micro_batch, sequence : int
    gib : int
        Of device memory, for each.
    helped : bool
        Whether the devices that do not train are also asked to relay.
    published : str
        What the MemFerry paper says of such a case.
    adapters : int
        Their rank, where they alone are trained; 0 trains all.
    """

    fixture: str
    ranks: int
    preset: str
    micro_batch: int
    gib: int
    sequence: int = 1024
    helped: bool = False
    published: str = ""
    adapters: int = 0

    @property
    def name(self) -> str:
        model = f"{self.preset}-adapters" if self.adapters else self.preset
        return f"{self.fixture}-{self.ranks}-{model}-{self.micro_batch}x{self.sequence}-{self.gib}GiB"


FASTER = "at least 28.1% faster"
SCALE_UP = "-20.7%, of which about 4% by ScaleUp"
CASES = (
    Case("h200-x1", 1, "llama-1b", 8, 6),
    Case("h200-x2", 2, "llama-1b", 8, 6),
    Case("h200-x2", 1, "llama-1b", 8, 6, helped=True),
    Case("h200-x2", 1, "llama-7b", 1, 8, helped=True, adapters=16),
    Case("hgx-h200-x8", 1, "llama-7b", 8, 40),
    Case("hgx-h200-x8", 2, "llama-7b", 8, 40),
    Case("hgx-h200-x8", 4, "llama-7b", 8, 40, helped=True),
    Case("hgx-h200-x8", 8, "llama-7b", 8, 40),
    Case("hgx-h200-x8", 8, "llama-7b", 1, 40),
    Case("a100-x8", 8, "llama-7b", 1, 40, published=FASTER),
    Case("a100-x8", 8, "llama-7b", 8, 40, published=FASTER),
    Case("cloudmatrix384-node", 4, "llama-13b", 1, 48, helped=True, published=SCALE_UP),
    Case("cloudmatrix384-node", 4, "llama-13b", 8, 48, helped=True, published=SCALE_UP),
    Case("cloudmatrix384-node", 4, "llama-13b", 16, 48, helped=True, published=SCALE_UP),
    Case("cloudmatrix384-node", 4, "llama-13b", 1, 12, helped=True, adapters=16),
)


def find_workload(case: Case) -> Workload:
    preset = find_preset(case.preset)
    batch = Batch(case.micro_batch, case.sequence, recompute=preset.checkpointing)
    size = dimensions(preset.shape)
    workload = transformer(case.preset, size, batch)
    return with_adapters(workload, size, case.adapters) if case.adapters else workload


def find_machine(case: Case, *, helped: bool = False) -> Machine:
    return machine_from_topology(machine(case.fixture), ranks=case.ranks, helpers=helped)


def by_default(case: Case) -> dict[str, float]:
    """Seconds of DeepSpeed's iteration, and of what MemFerry does without a plan."""
    workload, options = find_workload(case), PlanOptions(case.gib * GIB)
    found = {"default": plan_as_offload(workload, options, find_machine(case)).plan.seconds}
    if not case.adapters:  # its rules are those of training everything
        found["deepspeed"] = zero_offload(workload, find_machine(case)).seconds
    if case.helped:
        found["default, helped"] = plan_as_offload(workload, options, find_machine(case, helped=True)).plan.seconds
    if case.ranks > 1:
        gathered = replace(options, loads="gathered")
        found["default, gathered"] = plan_as_offload(workload, gathered, find_machine(case)).plan.seconds
    return found


def by_plan(case: Case) -> tuple[dict[str, float], Planned]:
    """Seconds with the best plans that are found, and the one without helpers."""
    workload, options = find_workload(case), PlanOptions(case.gib * GIB)
    planned = make_plan(workload, options, find_machine(case))
    found = {"planned": planned.plan.seconds}
    if case.helped:
        found["planned, helped"] = make_plan(workload, options, find_machine(case, helped=True)).plan.seconds
    if case.ranks > 1:
        gathered = replace(options, loads="gathered")
        found["planned, gathered"] = make_plan(workload, gathered, find_machine(case)).plan.seconds
    return found, planned


def with_other_hosts(case: Case) -> dict[str, float]:
    """The change of time against DeepSpeed's, by what host memory and CPU would be of what is assumed."""
    workload, options, usual = find_workload(case), PlanOptions(case.gib * GIB), find_machine(case)
    found = {}
    for factor in HOSTS:
        other = replace(usual, host_memory=factor * usual.host_memory, cpu_update=factor * usual.cpu_update)
        planned = make_plan(workload, options, other).plan.seconds
        found[f"{factor:g}"] = round(planned / zero_offload(workload, other).seconds - 1, 4)
    return found


def row_of(case: Case) -> dict[str, Any]:
    """A case, with everything that is predicted of it and where the machine's numbers are from."""
    seconds, planned = by_plan(case)
    found = find_machine(case)
    return {
        "fixture": case.fixture,
        "device": found.name,
        "ranks": case.ranks,
        "helpers": len(machine(case.fixture).devices) - case.ranks if case.helped else 0,
        "preset": case.preset,
        "adapters": case.adapters,
        "micro_batch": case.micro_batch,
        "sequence": case.sequence,
        "device_memory": case.gib * GIB,
        "published": case.published,
        "seconds": {name: round(value, 6) for name, value in (by_default(case) | seconds).items()},
        "bound_by": find_bounds(planned)[0].name,
        "other_hosts": with_other_hosts(case) if case.published else {},
        "numbers": {name: [float(f"{getattr(found, name):.4g}"), found.sources[name]] for name in NUMBERS},
    }


def document() -> dict[str, Any]:
    """The whole file."""
    rows = {case.name: row_of(case) for case in CASES}
    return {"schema": "memferry.machines", "schema_version": 1, "summary": {"rows": rows}}


if __name__ == "__main__":
    RESULT.write_text(json.dumps(document(), indent=1) + "\n")
