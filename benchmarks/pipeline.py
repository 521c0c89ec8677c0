"""Whole iterations of ``memferry train``, and other systems on the same model and text beside them.

    python -m benchmarks.pipeline [--rows NAME,NAME] [--steps 8] [--no-peers] [--limit SECONDS] [--out FILE]

Every run is a process of its own.  A row takes its place in the file when it is measured, with its date and its
machine; other rows stay as they were.  A row that fails is written with its message, and the next one begins.
With ``--preset`` another model takes the place of each row's, in device memory that is the same multiple of its
weights: ``--device emulated --preset tiny --no-peers`` tries the benchmark out, and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import records
from .budgets import mib, scaled_device, scaled_host

PEERS = {"deepspeed-zero2": "deepspeed_zero2", "torch-gpu": "torch_gpu"}  # and their modules here


@dataclass(frozen=True)
class Job:
    """What a row trains, and in which device memory; 0 as the norm does not clip.

    Attributes
    ----------
    host_memory : str or None
        What it may take beyond 16 bytes a parameter is for updates that begin during backward; None for none.
    """

    preset: str
    device_memory: str
    max_grad_norm: float
    peers: tuple[str, ...]
    micro_batch: int = 8
    seq: int = 1024
    host_memory: str | None = None


ROWS = {
    "llama-1b-6GiB": Job("llama-1b", "6GiB", 1.0, ("deepspeed-zero2", "torch-gpu")),
    "llama-1b-6GiB-unclipped": Job(
        "llama-1b", "6GiB", 0.0, ("deepspeed-zero2", "torch-gpu"), host_memory="28.2GiB"
    ),  # 24 bytes a parameter
    "llama-1b-24GiB": Job("llama-1b", "24GiB", 1.0, ("deepspeed-zero2", "torch-gpu")),
    "llama-3b-11.5GiB": Job("llama-3b", "11.5GiB", 1.0, ("deepspeed-zero2",)),
}


class Session:
    """The rows of one call.

    Parameters
    ----------
    device : str
        As ``memferry train`` takes it.
    preset : str or None
        Instead of each row's own.
    steps : int
        Optimizer steps; the first 3 are not counted.
    peers : bool
    limit_s : float
        Seconds that one process may take.
    """

    def __init__(self, device: str, preset: str | None, steps: int, *, peers: bool, limit_s: float) -> None:
        self._device = device
        self._preset = preset
        self._steps = steps
        self._peers = peers
        self._limit_s = limit_s
        self._measured: dict[tuple[str, ...], records.Row] = {}

    def measure(self, job: Job) -> records.Row:
        """A row: of MemFerry, and of its peers; one that two rows share is measured once."""
        settings = self._settings(job)
        memory = ["--device", self._device, "--device-memory", self._memory(job), *self._host_memory(job)]
        row = self._run("memferry_tools", ["train", *settings, *memory])
        peers = {name: self._peer(name, settings) for name in job.peers} if self._peers else {}
        return {"job": {**asdict(job), "preset": self._preset or job.preset}, **row, "peers": peers}

    def _settings(self, job: Job) -> list[str]:
        common = ["--steps", str(self._steps), "--max-grad-norm", str(job.max_grad_norm)]
        if self._preset is not None:
            return ["--preset", self._preset, *common]
        shape = ["--micro-batch", str(job.micro_batch), "--seq", str(job.seq), "--checkpointing"]
        return ["--preset", job.preset, *shape, *common]

    def _memory(self, job: Job) -> str:
        if self._preset is None:
            return job.device_memory
        return mib(scaled_device(job.device_memory, job.preset, self._preset, self._device))

    def _host_memory(self, job: Job) -> list[str]:
        if job.host_memory is None:
            return []
        if self._preset is None:
            return ["--host-memory", job.host_memory]
        return ["--host-memory", mib(scaled_host(job.host_memory, job.preset, self._preset))]

    def _peer(self, name: str, settings: list[str]) -> records.Row:
        if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
            return {"status": "skipped", "message": "DeepSpeed is not installed"}
        key = (name, *settings)
        if key not in self._measured:
            self._measured[key] = self._run(f"benchmarks.{PEERS[name]}", settings)
        return self._measured[key]

    def _run(self, module: str, arguments: Sequence[str]) -> records.Row:
        return records.measured_apart([sys.executable, "-m", module, *arguments], self._limit_s)


def summarise(rows: dict[str, records.Row]) -> dict[str, Any]:
    """The figures of every row, by name; of one that failed, why."""
    return {
        name: _figures(row) if row["status"] == "ok" else {"failed": row["message"]} for name, row in rows.items()
    }


def _figures(row: records.Row) -> dict[str, Any]:
    summary, report = row["result"]["summary"], row["result"]["report"]
    times, parameters = report["times"], report["parameters"]
    return {
        "iteration_s": summary["iteration_s"],
        "tokens_per_second": summary["tokens_per_second"],
        "device_memory": report["device_memory"],
        "device_peak_bytes": summary["device_peak_bytes"],
        "host_bytes_per_parameter": report["host_nbytes"] / parameters,
        "dram_bytes_per_parameter": report["dram_nbytes"] / report["steps"] / parameters,
        "busy_share": times["busy"] / times["total"] if times["total"] else None,
        "exposed_optimizer_s": times["update"] + times["step"],
        "exposed_copy_s": times["copy"],
        "resident_share": report["resident_parameters"] / parameters,
        "streamed_share": report["streamed_parameters"] / parameters,
        "early_share": report["early_parameters"] / parameters,
        "peers": {name: _beside(peer, summary["iteration_s"]) for name, peer in row["peers"].items()},
    }


def _beside(peer: records.Row, iteration_s: float) -> dict[str, Any]:
    if peer["status"] != "ok":
        return {peer["status"]: peer["message"]}
    found = peer["result"]
    return {
        "system": found["system"],
        "iteration_s": found["iteration_s"],
        "device_peak_bytes": found["device_peak_bytes"],
        "ratio": found["iteration_s"] / iteration_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}; by default all")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--preset", help="another model, in device memory to its scale")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--limit", type=float, default=240, help="seconds that one process may take")
    parser.add_argument("--out", type=Path, default=records.RESULTS / "pipeline.json")
    arguments = parser.parse_args()
    names = arguments.rows.split(",")
    for name in names:
        if name not in ROWS:
            parser.error(f"--rows: there is no {name!r}; known are {', '.join(ROWS)}")
    session = Session(
        arguments.device, arguments.preset, arguments.steps, peers=arguments.peers, limit_s=arguments.limit
    )
    file = records.Records(arguments.out, "pipeline", list(ROWS), summarise)
    for name in names:
        file.put(name, session.measure(ROWS[name]))
        print(f"{name}: {json.dumps(summarise(file.rows)[name])}", flush=True)


if __name__ == "__main__":
    main()
