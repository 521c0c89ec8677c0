"""This process among those that ``torchrun`` has started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from memferry_rt.helpers import share_out

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


def device_of(text: str, *, helped: bool = False) -> str:
    """The device that this process is to use: its own, where ``torchrun`` has started several.

    Parameters
    ----------
    helped : bool
        Others are to help it: processes that emulate a device each have different ones then.

    Raises
    ------
    ToolError
        One device was named for all of them.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return text
    if text == "emulated" or (text == "auto" and not torch.cuda.is_available()):
        return f"emulated:{os.environ['LOCAL_RANK']}" if helped else text
    if ":" in text and text.startswith("cuda"):
        raise ToolError(f"--device: {text} would be the device of every process; write cuda, and each has its own")
    local = int(os.environ["LOCAL_RANK"])
    if local >= torch.cuda.device_count():
        raise ToolError(
            f"--device: process {local} of this host has no CUDA device of its own, there are "
            f"{torch.cuda.device_count()}; start fewer processes, or write --device emulated"
        )
    return f"cuda:{local}"


def helpers_of(helpers: tuple[int, ...] | Literal["auto"]) -> tuple[int, ...] | Literal["auto"]:
    """Those of this process, of the devices that are named for all processes of this host.

    Raises
    ------
    ToolError
        A process trains on one of them, or they cannot be shared out evenly.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if helpers == "auto" or processes == 1:
        return helpers
    for device in helpers:
        if device < processes:
            raise ToolError(
                f"--helpers: process {device} trains on device {device}; name devices from {processes} on, or auto"
            )
    if len(helpers) % processes:
        raise ToolError(
            f"--helpers: {len(helpers)} devices cannot be shared out evenly between {processes} processes; name "
            "as many for each, or auto"
        )
    return share_out([*range(processes), *helpers], range(processes))[int(os.environ["LOCAL_RANK"])]


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
