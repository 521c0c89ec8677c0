"""Several GPUs of one host: their links, whole iterations on 1 to all of them, and each as predicted.

    python -m benchmarks.scale [--gpus N] [--rows PATTERN,PATTERN] [--steps 7] [--limit-total SECONDS] [--out FILE]

``llama-1b-4gpu`` trains on four GPUs with a micro-batch of fixed size on each, ``llama-1b-global64-2gpu`` with a
batch of fixed size for all, ``llama-1b-4+4gpu`` on four whose loads four others relay.  ``llama-7b-adapters`` has
adapters train alone; ``llama-1b-deepspeed-8gpu`` is DeepSpeed's ZeRO-2 with its optimizer offloaded.
GPUs that train have their share of the machine's processors, N of all GPUs an N-th of all.  ``links`` are copies
over several ways, ``memory`` what host memory carries.  The rows of most worth come first.
``--device emulated --preset tiny`` tries the benchmark out, and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from memferry_tools.commands.train import command as train

from .. import records
from ..visits import add_arguments, chosen, visit
from .links import FIXTURE
from .predicted import simulated
from .rows import LINKS, MEMORY, TOPOLOGY, Job, jobs, names
from .summary import summarise

FIXTURES = {1: "h200-x1", 2: "h200-x2"}
SMALL_MEMORY = 1 << 20  # parameters


class Session:
    """The rows of one call.

    Parameters
    ----------
    gpus : int
        Of the machine.
    device : str
        ``"cuda"`` or ``"emulated"``.
    preset : str or None
        Instead of each row's own, in as much memory as it takes.
    steps : int
        Optimizer steps; the first 3 are not counted.
    shape : str or None
        Sizes in place of the model's own.
    """

    def __init__(self, gpus: int, device: str, preset: str | None, steps: int, shape: str | None = None) -> None:
        self._gpus = gpus
        self._device = device
        self._preset = preset
        self._steps = steps
        self._shape = shape
        self._jobs = jobs(gpus)

    def measure(self, name: str, limit_s: float, rows: dict[str, records.Row]) -> records.Row:
        """One row; `rows` are those there are."""
        parts = {TOPOLOGY: self._topology, LINKS: self._links, MEMORY: self._memory}
        if name in parts:
            row = records.measured_apart(parts[name](limit_s), limit_s)
            for device in row["result"]["devices"] if name == TOPOLOGY and row["status"] == "ok" else ():
                device.pop("uuid", None)  # it says which machine this is
            return row
        job = self._jobs[name]
        found = rows.get(TOPOLOGY, {}).get("result")
        row = {
            "job": {**asdict(job), "steps": self._steps},
            "processors": len(self._processors(job)),
            "predicted": simulated(job, found, self._fixture, floats=self._device == "emulated"),
        }
        missing = self._missing(job)
        if missing is not None:
            return {**row, "status": "skipped", "message": missing}
        began, before = time.monotonic(), _processor_seconds()
        row |= records.measured_apart(self.command(job), limit_s)
        if row["status"] == "ok" and "report" in row["result"]:
            del row["result"]["report"]["per_layer"]
        used = _processor_seconds() - before
        return {**row, "wall_s": time.monotonic() - began, "processor_s": used}

    def _missing(self, job: Job) -> str | None:
        """Why a row cannot be run here."""
        if job.system == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            return "DeepSpeed is not installed"
        known = inspect.signature(train).parameters
        wanted = {"helpers": job.helpers, "adapters": job.adapters}
        missing = [f"--{name}" for name, value in wanted.items() if value and name not in known]
        return f"this memferry train knows no {' and no '.join(missing)}" if missing else None

    def command(self, job: Job) -> list[str]:
        """What is run: on its share of the processors, by a launcher if there are several GPUs."""
        processors = ",".join(map(str, self._processors(job)))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.gpus)]
        module = "benchmarks.deepspeed_zero2" if job.system == "deepspeed" else "memferry_tools"
        start = [*(launcher if job.gpus > 1 else []), "-m", module]
        return ["taskset", "-c", processors, sys.executable, *start, *self._arguments(job)]

    def _processors(self, job: Job) -> list[int]:
        mine = sorted(os.sched_getaffinity(0))
        return mine[: max(1, len(mine) * job.gpus // self._gpus)]

    def _arguments(self, job: Job) -> list[str]:
        common = ["--preset", self._preset or job.preset, "--steps", str(self._steps), "--max-grad-norm", "1.0"]
        micro_batch, seq = (1, 64) if self._preset else (job.micro_batch, job.seq)
        common += ["--micro-batch", str(micro_batch), "--seq", str(seq), "--checkpointing"]
        common += ["--accumulate", str(job.accumulate)]
        common += ["--shape", self._shape] if self._shape else []
        if job.system == "deepspeed":
            return common
        arguments = ["train", *common, "--device", self._device]
        if not self._preset:
            arguments += ["--device-memory", job.device_memory]
        if job.helpers:
            arguments += ["--helpers", ",".join(map(str, range(job.gpus, job.gpus + job.helpers)))]
        if job.adapters:
            arguments += ["--adapters", str(job.adapters)]
        return arguments

    @property
    def _fixture(self) -> str:
        """A machine like this one, where its own links are not known."""
        return FIXTURES.get(self._gpus, FIXTURE)

    def _topology(self, limit_s: float) -> list[str]:
        which = ["--fixture", self._fixture] if self._device == "emulated" else ["--device", self._device]
        return [sys.executable, "-m", "memferry_tools", "topo", *which]

    def _links(self, limit_s: float) -> list[str]:
        command = [sys.executable, "-m", "benchmarks.scale.links", "--device", self._device]
        command += ["--gpus", str(self._gpus), "--budget", str(0.8 * limit_s)]
        return [*command, *(["--small"] if self._device == "emulated" else [])]

    def _memory(self, limit_s: float) -> list[str]:
        command = [sys.executable, "-m", "benchmarks.scale.memory"]
        return [*command, *(["--parameters", str(SMALL_MEMORY)] if self._device == "emulated" else [])]


def _processor_seconds() -> float:
    """Of the processes that this one has waited for, and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _count(device: str) -> int:
    """GPUs of this machine; emulated ones are two."""
    if device == "emulated":
        return 2
    import torch

    return torch.cuda.device_count()  # by NVML, so that this process needs no context


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, help="by default all of this machine")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--preset", help="another model, in its default device memory")
    parser.add_argument("--shape", help="sizes in place of its own, as memferry train takes them")
    first, _ = parser.parse_known_args(arguments)
    gpus = first.gpus or _count(first.device)
    if gpus < 1:
        parser.error("--gpus: there is no CUDA device; --device emulated --preset tiny tries the benchmark out")
    add_arguments(parser, names(gpus), limit=100, out=None)
    found = parser.parse_args(arguments)
    found.out = found.out or default_out(gpus)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not to be had everywhere, and not used here
    session = Session(gpus, found.device, found.preset, found.steps, found.shape)
    file = records.Records(found.out, "scale", names(gpus), summarise)
    wanted = chosen(parser, found)
    visit(wanted, lambda name, limit: session.measure(name, limit, file.rows), file, found, summarise)


def default_out(gpus: int) -> Path:
    """Where the results of a machine of so many H200 are."""
    return records.RESULTS / f"scale-{gpus}xh200.json"


if __name__ == "__main__":
    main()
