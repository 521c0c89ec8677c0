"""Several GPUs of one host: whole iterations of ``memferry train`` under ``torchrun``, and DeepSpeed beside them.

    python -m benchmarks.scale [--rows NAME,NAME] [--steps 8] [--limit SECONDS] [--out FILE]

One GPU gets half of the machine's processors, as each of two has when both train.  The micro-batch of every GPU is
the same.  A row takes its place in the file when it is measured, with its date and its machine.
``--device emulated --preset tiny`` tries the benchmark out, and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import records


@dataclass(frozen=True)
class Job:
    """What a row trains, on how many GPUs, and by whom."""

    preset: str
    device_memory: str
    gpus: int
    system: str = "memferry"
    micro_batch: int = 8
    seq: int = 1024


ROWS = {
    f"llama-1b-{budget}-{gpus}gpu": Job("llama-1b", budget, gpus)
    for budget in ("6GiB", "24GiB")
    for gpus in (1, 2)
} | {"llama-1b-deepspeed-2gpu": Job("llama-1b", "0", 2, "deepspeed")}


class Session:
    """The rows of one call.

    Parameters
    ----------
    device : str
        ``"cuda"`` or ``"emulated"``.
    preset : str or None
        Instead of each row's own, in as much memory as it takes.
    steps : int
        Optimizer steps; the first 3 are not counted.
    limit_s : float
        Seconds that one run may take.
    """

    def __init__(self, device: str, preset: str | None, steps: int, limit_s: float) -> None:
        self._device = device
        self._preset = preset
        self._steps = steps
        self._limit_s = limit_s

    def measure(self, job: Job) -> records.Row:
        """One row."""
        if job.system == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            row: records.Row = {"status": "skipped", "message": "DeepSpeed is not installed"}
        else:
            row = records.measured_apart(self.command(job), self._limit_s)
        return {"job": asdict(job), "processors": len(self._processors(job)), **row}

    def command(self, job: Job) -> list[str]:
        """What is run: on its share of the processors, by a launcher if there are several GPUs."""
        processors = ",".join(map(str, self._processors(job)))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.gpus)]
        module = "benchmarks.deepspeed_zero2" if job.system == "deepspeed" else "memferry_tools"
        start = [*(launcher if job.gpus > 1 else []), "-m", module]
        return ["taskset", "-c", processors, sys.executable, *start, *self._arguments(job)]

    def _processors(self, job: Job) -> list[int]:
        mine = sorted(os.sched_getaffinity(0))
        return mine if job.gpus > 1 else mine[: max(1, len(mine) // 2)]

    def _arguments(self, job: Job) -> Sequence[str]:
        steps = ["--steps", str(self._steps), "--max-grad-norm", "1.0"]
        shape = ["--micro-batch", str(job.micro_batch), "--seq", str(job.seq), "--checkpointing"]
        common = ["--preset", self._preset, *steps] if self._preset else ["--preset", job.preset, *shape, *steps]
        if job.system == "deepspeed":
            return common
        memory = [] if self._preset else ["--device-memory", job.device_memory]
        return ["train", *common, "--device", self._device, *memory]


def summarise(rows: dict[str, records.Row]) -> dict[str, Any]:
    """The figures of every row, by name, and how two GPUs compare with one."""
    figures = {name: _figures(row) for name, row in rows.items()}
    for name, mine in figures.items():
        one = figures.get(name.replace("-2gpu", "-1gpu"))
        if rows[name]["job"]["gpus"] == 1 or one is None or "host_bytes" not in one.keys() & mine.keys():
            continue
        mine["speedup"] = mine["tokens_per_second"] / one["tokens_per_second"]
        mine["host_memory_ratio"] = mine["host_bytes"] / one["host_bytes"]
    return figures


def _figures(row: records.Row) -> dict[str, Any]:
    if row["status"] != "ok":
        return {row["status"]: row["message"]}
    result, job = row["result"], row["job"]
    if job["system"] == "deepspeed":
        tokens = job["gpus"] * job["micro_batch"] * job["seq"]
        return {"iteration_s": result["iteration_s"], "tokens_per_second": tokens / result["iteration_s"]}
    summary, report = result["summary"], result["report"]
    times = report["times"]
    return {
        "iteration_s": summary["iteration_s"],
        "tokens_per_second": summary["tokens_per_second"],
        "host_bytes": report["host_nbytes"],
        "host_bytes_per_parameter": summary["host_bytes_per_parameter"],
        "device_peak_bytes": summary["device_peak_bytes"],
        "busy_share": times["busy"] / times["total"] if times["total"] else None,
        "exposed_optimizer_s": times["update"] + times["step"],
        "exposed_copy_s": times["copy"],
        "streamed_share": report["streamed_parameters"] / report["parameters"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}; by default all")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--preset", help="another model, in its default device memory")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one run may take")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "scale-2xh200.json")
    arguments = parser.parse_args()
    names = arguments.rows.split(",")
    for name in names:
        if name not in ROWS:
            parser.error(f"--rows: there is no {name!r}; known are {', '.join(ROWS)}")
    session = Session(arguments.device, arguments.preset, arguments.steps, arguments.limit)
    file = records.Records(arguments.out, "scale", list(ROWS), summarise)
    for name in names:
        file.put(name, session.measure(ROWS[name]))
        print(f"{name}: {json.dumps(summarise(file.rows)[name])}", flush=True)


if __name__ == "__main__":
    main()
