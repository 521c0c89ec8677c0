"""The rows for a machine of so many GPUs, those of most worth first."""

from __future__ import annotations

from dataclasses import dataclass, replace

BUDGETS = {"llama-1b": "6GiB", "llama-3b": "11.5GiB", "llama-7b": "8GiB"}
MICRO_BATCH = 8
TOPOLOGY, LINKS, MEMORY = "topology", "links", "memory"


@dataclass(frozen=True)
class Job:
    """What a row trains, on how many GPUs, and by whom.

    Attributes
    ----------
    helpers : int
        GPUs beyond those that train, which lend their links.
    accumulate : int
        Micro-batches in a step: more where fewer GPUs make a batch of fixed size.
    adapters : int
        The rank of what alone trains, so that iterations wait for weights; 0 where everything trains.
    system : str
        ``"memferry"``, or ``"deepspeed"``, which has no budget of device memory.
    """

    preset: str
    gpus: int
    helpers: int = 0
    accumulate: int = 1
    adapters: int = 0
    system: str = "memferry"
    micro_batch: int = MICRO_BATCH
    seq: int = 1024

    @property
    def name(self) -> str:
        system = "" if self.system == "memferry" else f"-{self.system}"
        system += "-adapters" if self.adapters else ""
        batch = "" if self.accumulate == 1 else f"-global{self.gpus * self.micro_batch * self.accumulate}"
        helpers = f"+{self.helpers}" if self.helpers else ""
        return f"{self.preset}{system}{batch}-{self.gpus}{helpers}gpu"

    @property
    def device_memory(self) -> str:
        return BUDGETS[self.preset]

    @property
    def tokens(self) -> int:
        """In a step of all GPUs."""
        return self.gpus * self.accumulate * self.micro_batch * self.seq


def jobs(gpus: int) -> dict[str, Job]:
    """What is trained, by name."""
    counts = [count for count in (1, 2, 4, 8) if count < gpus] + [gpus]
    half = max(1, gpus // 2)
    small, large, frozen = BUDGETS
    found = [Job(small, gpus), Job(small, 1), Job(small, gpus, system="deepspeed")]
    if gpus > 1:
        frozen_job = Job(frozen, half, adapters=16, micro_batch=1)
        found += [replace(frozen_job, helpers=gpus - half), frozen_job]
        found += [Job(small, half, helpers=gpus - half), Job(small, half)]
    found += [Job(large, gpus), Job(large, 1), Job(large, gpus, system="deepspeed")]
    found += [Job(small, count) for count in reversed(counts)]
    found += [Job(preset, count, accumulate=gpus // count) for preset in (small, large) for count in counts]
    found += [Job(large, count) for count in reversed(counts)]
    found += [Job(preset, 1, system="deepspeed") for preset in (small, large)]
    return {job.name: job for job in found}


def names(gpus: int) -> list[str]:
    """All rows: the machine's own between the first that are trained and the others."""
    trained = list(jobs(gpus))
    return [TOPOLOGY, *trained[:3], LINKS, *trained[3:7], MEMORY, *trained[7:]]
