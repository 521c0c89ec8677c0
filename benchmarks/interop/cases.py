"""What is measured of sharing memory, and the figures of its table."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from memferry_allocator import HostArena, Mode, Place, ShadowSpace, Stream, open_driver
from memferry_allocator.interop import as_device, as_host, from_dlpack
from memferry_allocator.interop.dlpack import EXCHANGE

from ..runner import Benchmark, Settings
from ..timing import per_call

MIB = 1 << 20
C_FOLDER = Path(__file__).parents[1] / "c"


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Microseconds and ratios."""
    summary: dict[str, Any] = {
        f"{name}_us": None if timed is None else timed["median_s"] * 1e6 for name, timed in found.items()
    }
    own, plugged = summary.get("torch_own_us"), summary.get("torch_plugged_us")
    summary["torch_plugged_over_own"] = None if not own or not plugged else plugged / own
    return summary


BENCHMARK = Benchmark("interop", summarise)
case = BENCHMARK.case


@case
def machine(settings: Settings) -> Any:
    driver = open_driver(settings.device)
    import torch

    return {
        "device": driver.device_info(0).name,
        "torch": torch.__version__,
        "torch_has_a_table": hasattr(torch.Tensor, EXCHANGE),
        "numpy": np.__version__,
    }


# -- torch's memory --------------------------------------------------------------------------------------
def _empty() -> Any:
    import torch

    device = torch.device("cuda", 0)
    return per_call(lambda: torch.empty(MIB, dtype=torch.uint8, device=device), settle=torch.cuda.synchronize)


@case
def torch_own(settings: Settings) -> Any:
    """``torch.empty`` of 1 MiB and dropping it, with torch's own caching allocator."""
    return _empty() if settings.cuda else None


@case
def torch_plugged(settings: Settings) -> Any:
    """The same with our pool as torch's allocator."""
    if not settings.cuda:
        return None
    import torch

    from memferry_allocator.interop.torch_pool import pluggable_allocator

    torch.cuda.memory.change_current_allocator(pluggable_allocator(device_budget="1GiB"))
    return _empty()


# -- arrays of views -------------------------------------------------------------------------------------
class _View:
    """An open view in a place, for as long as the case runs."""

    def __init__(self, settings: Settings, place: Place) -> None:
        driver = open_driver(settings.device)
        self.stream = driver.create_stream(0)
        self.space = ShadowSpace(driver, 0, device_budget=4 * MIB)
        self.arena = HostArena(driver, MIB)
        [part] = self.space.buffer("measured", [self.arena.cut(MIB)])
        on = None if place is Place.HOST else self.stream
        self.view = part.acquire(place, Mode.READ_WRITE, stream=on)


@case
def dlpack_to_numpy(settings: Settings) -> Any:
    """An array of a view, taken by NumPy, and both dropped."""
    view = _View(settings, Place.HOST).view
    return per_call(lambda: np.from_dlpack(as_host(view, "float32")))


@contextmanager
def _current_in_torch(settings: Settings, stream: Stream) -> Iterator[None]:
    import torch

    if not settings.cuda:
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(int(stream.handle))):
        yield


@case
def dlpack_to_torch(settings: Settings) -> Any:
    """The same for torch, on the device where there is one; the view's stream is torch's current one."""
    import torch

    held = _View(settings, Place.DEVICE)
    with _current_in_torch(settings, held.stream):
        return per_call(lambda: torch.from_dlpack(as_device(held.view, "float32")))


@case
def dlpack_given(settings: Settings) -> Any:
    """What of that is ours: the array and its capsule, made and dropped without torch."""
    held = _View(settings, Place.DEVICE)
    handle = int(held.stream.handle) if settings.cuda else None
    return per_call(lambda: as_device(held.view, "float32").__dlpack__(stream=handle, max_version=(1, 0)))


@case
def torch_dlpack_floor(settings: Settings) -> Any:
    """A tensor of torch's own given to torch, on the same stream: what DLPack costs without us."""
    import torch

    held = _View(settings, Place.DEVICE)
    tensor = torch.zeros(MIB // 4, device="cuda" if settings.cuda else "cpu")
    with _current_in_torch(settings, held.stream):
        return per_call(
            lambda: torch.from_dlpack(tensor), settle=torch.cuda.synchronize if settings.cuda else None
        )


@case
def array_interface_to_torch(settings: Settings) -> Any:
    """A tensor of a device view by ``__cuda_array_interface__``."""
    if not settings.cuda:
        return None
    import torch

    held = _View(settings, Place.DEVICE)
    device = torch.device("cuda", 0)
    with _current_in_torch(settings, held.stream):
        return per_call(lambda: torch.as_tensor(as_device(held.view, "float32"), device=device))


@case
def array_interface_given(settings: Settings) -> Any:
    """What of that is ours: the array and its dictionary."""
    if not settings.cuda:
        return None
    held = _View(settings, Place.DEVICE)
    return per_call(lambda: as_device(held.view, "float32").__cuda_array_interface__)


@case
def tensor_of_view(settings: Settings) -> Any:
    """A tensor of any element type over a view, by DLPack's table of C functions."""
    from memferry_allocator.interop.torch_tensor import as_tensor

    view = _View(settings, Place.DEVICE).view
    return per_call(lambda: as_tensor(as_device(view, "bfloat16")))


@case
def dlpack_from_torch(settings: Settings) -> Any:
    """A tensor of torch's taken over, and let go."""
    import torch

    driver = open_driver(settings.device)
    if not settings.cuda:
        tensor = torch.zeros(1000)
        return per_call(lambda: from_dlpack(tensor))
    stream = driver.stream_from_handle(0, torch.cuda.current_stream().cuda_stream)
    tensor = torch.zeros(1000, device="cuda")
    return per_call(lambda: from_dlpack(tensor, stream=stream), settle=torch.cuda.synchronize)


# -- C ---------------------------------------------------------------------------------------------------
@case
def c_pair(settings: Settings) -> Any:
    """Allocating and freeing a cached block of 1 MiB from C."""
    if not settings.cuda:
        return None
    with tempfile.TemporaryDirectory() as folder:
        for name in ("Makefile", "pool_pair.c"):
            Path(folder, name).write_bytes((C_FOLDER / name).read_bytes())
        subprocess.run(["make", "-s", "-C", folder, "pool_pair"], check=True, stdout=subprocess.DEVNULL)
        done = subprocess.run([Path(folder, "pool_pair")], check=True, capture_output=True, env={**os.environ})
    timed = json.loads(done.stdout)
    return {"median_s": timed["wall_median_s"], **timed}
