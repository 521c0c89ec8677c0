"""The device that a run will use, found before anything is built for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memferry_allocator import DriverError, EmulatedOptions, open_device

from ..errors import ToolError

HELPED = EmulatedOptions(device_count=8)  # the machine that is emulated where devices help


@dataclass(frozen=True)
class Target:
    """A device.

    Attributes
    ----------
    text : str
        How `memferry_rt.offload` is told of it.
    name : str
    emulated : bool
    torch_device : torch.device
        Where torch computes: the CPU for an emulated device.
    free : int
        Bytes of its memory that nobody used when it was found.
    machine : EmulatedOptions or None
        The machine to emulate, if it is not the default one.
    """

    text: str
    name: str
    emulated: bool
    torch_device: torch.device
    free: int
    machine: EmulatedOptions | None = None


def find_target(text: str, *, helped: bool = False) -> Target:
    """The device meant by ``"auto"``, ``"cuda:N"`` or ``"emulated"``.

    Parameters
    ----------
    helped : bool
        Others are to help it: an emulated machine has eight then.

    Raises
    ------
    ToolError
        It is not there, its driver does not work, or this PyTorch cannot use it.
    """
    machine = HELPED if helped else None
    try:
        driver, ordinal = open_device(text, emulated=machine)
    except DriverError as error:
        raise ToolError(f"--device {text}: {error}") from error
    emulated = driver.name == "emulated"
    if driver.name not in ("cuda", "emulated"):
        raise ToolError(f"--device {text}: PyTorch tensors over the {driver.name} driver's memory are not known")
    target = Target(
        text=f"{driver.name}:{ordinal}",
        name=driver.device_info(ordinal).name,
        emulated=emulated,
        torch_device=torch.device("cpu") if emulated else torch.device("cuda", ordinal),
        free=driver.memory_info(ordinal).free,
        machine=machine if emulated else None,
    )
    if not emulated and not torch.cuda.is_available():
        raise ToolError(
            f"--device: {target.text} is a {target.name}, and PyTorch {torch.__version__} cannot use it; install "
            "a PyTorch that is built for CUDA, or write --device emulated"
        )
    return target
