"""Whole iterations of models whose weights and state are far larger than the device memory they get."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from memferry_tools.train.presets import find_preset

from ..records import Row, measured_apart


@dataclass(frozen=True)
class Job:
    """What a row trains, in which device memory, and in which modes.

    Attributes
    ----------
    mode : str
        As ``memferry train --mode`` takes it; the rest is streamed.
    """

    preset: str
    device_memory: str
    mode: str = "embedding=dha+inplace"
    micro_batch: int = 1
    seq: int = 1024
    steps: int = 8


ROWS = {
    "llama-3b-6GiB": Job("llama-3b", "6GiB"),
    "llama-7b-8GiB": Job("llama-7b", "8GiB", steps=5),
}
HOST_BYTES = 16  # of a parameter, that a run needs
SMALL = Job("tiny", "8MiB", micro_batch=1, seq=32, steps=4)


def fits(job: Job) -> bool:
    """Whether this machine has the host memory for it, and a tenth more."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1.1 * HOST_BYTES * find_preset(job.preset).shape.parameters < memory


def measure(job: Job, device: str, limit_s: float) -> Row:
    """A row, by a process of ``memferry train``."""
    shape = ["--micro-batch", str(job.micro_batch), "--seq", str(job.seq), "--checkpointing"]
    settings = ["--preset", job.preset, *shape, "--steps", str(job.steps)]
    memory = ["--device", device, "--device-memory", job.device_memory, "--mode", job.mode]
    command: Sequence[str] = [sys.executable, "-m", "memferry_tools", "train", *settings, *memory]
    return {"job": asdict(job), **measured_apart(command, limit_s)}
