"""This process among those that ``torchrun`` has started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ToolError


@dataclass(frozen=True)
class Workers:
    """The processes of one job.

    Attributes
    ----------
    rank, size : int
    group : ProcessGroup or None
        None for a process that was started alone.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def first(self) -> bool:
        """Whether it is this one that shows and writes."""
        return self.rank == 0

    def least(self, number: int) -> int:
        """The smallest number that any of them has."""
        if self.group is None:
            return number
        found: list[int] = [0] * self.size
        dist.all_gather_object(found, number, group=self.group)
        return min(found)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Everybody's values, those of all ranks side by side: shape (n,) of each gives (n * size,)."""
        if self.group is None:
            return values
        found = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(found, values, group=self.group)
        return torch.stack(found, dim=1).flatten()


ALONE = Workers()


def device_of(text: str) -> str:
    """The device that this process is to use: its own, where ``torchrun`` has started several.

    Raises
    ------
    ToolError
        One device was named for all of them.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or text == "emulated":
        return text
    if ":" in text and text.startswith("cuda"):
        raise ToolError(f"--device: {text} would be the device of every process; write cuda, and each has its own")
    if text == "auto" and not torch.cuda.is_available():
        return text
    local = int(os.environ["LOCAL_RANK"])
    if local >= torch.cuda.device_count():
        raise ToolError(
            f"--device: process {local} of this host has no CUDA device of its own, there are "
            f"{torch.cuda.device_count()}; start fewer processes, or write --device emulated"
        )
    return f"cuda:{local}"


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Workers]:
    """Meet the other processes of the job, if there are any."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield Workers(dist.get_rank(), size, dist.group.WORLD)
    dist.destroy_process_group()  # not after an error: it would wait for ranks that are gone
