"""Programs that share memory with one other library each; every test runs one in a process of its own.

    python -m tests.interop.programs PROGRAM

prints a line of JSON.  Each does many rounds of taking, using and dropping memory, and counts what is left.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from memferry_allocator import DevicePool, HostArena, Mode, Place, ShadowSpace, open_driver
from memferry_allocator.interop import as_device, as_host, borrow_stream, from_dlpack

MIB = 1 << 20
ROUNDS = 1000
PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {}


def program(function: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    PROGRAMS[function.__name__] = function
    return function


class Rounds:
    """Random takes and drops: some blocks live on, in any order."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.kept: list[Any] = []

    def __iter__(self) -> Any:
        for number in range(ROUNDS):
            yield number, self._random.choice([0, 1, 100, 5000, 70_000, 300_000])
            while len(self.kept) > self._random.randrange(12):
                self.kept.pop(self._random.randrange(len(self.kept)))
        self.kept.clear()
        gc.collect()


@program
def cupy_rounds() -> dict[str, Any]:
    import cupy

    from memferry_allocator.interop.cupy_memory import cupy_allocator

    pool = DevicePool(open_driver("cuda"), 0, 64 * MIB)
    cupy.cuda.set_allocator(cupy_allocator(pool))
    streams = [cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)]
    rounds, wrong = Rounds(), 0
    for number, count in rounds:
        with streams[number % 2] as stream:
            array = cupy.full(count, number, dtype=cupy.int32)
            wrong += int((array + 1 != number + 1).sum())
            stream.synchronize()
            rounds.kept.append(array)
    del array
    gc.collect()
    refused = ""
    try:
        cupy.empty(128 * MIB, dtype=cupy.uint8)
    except cupy.cuda.memory.OutOfMemoryError as error:
        refused = str(error)
    after = int(cupy.arange(10).sum())
    gc.collect()
    cupy.cuda.set_allocator(None)
    return {"wrong": wrong, "left": pool.used, "refused": bool(refused), "after": after}


@program
def cupy_shares() -> dict[str, Any]:
    """DLPack and the array interface, both ways, with streams."""
    import cupy

    driver = open_driver("cuda")
    wrong = 0
    with Space(driver) as space:
        stream = cupy.cuda.Stream(non_blocking=True)
        ours = borrow_stream(driver, 0, stream)
        for number in range(200):
            with stream, space.part.acquire(Place.DEVICE, Mode.READ_WRITE, stream=ours) as view:
                array = as_device(view, "int32")
                first = cupy.asarray(array)
                second = cupy.from_dlpack(array)
                first[:] = number
                wrong += int((second != number).sum())
                del array, first, second
            with space.part.acquire(Place.HOST, Mode.READ) as view:
                wrong += int((as_host(view, "int32").numpy() != number).sum())
        theirs = cupy.arange(1000, dtype=cupy.float32)
        taken = from_dlpack(theirs, stream=ours)
        same = taken.ptr == theirs.data.ptr and taken.shape == (1000,)
    return {"wrong": wrong, "same": same}


@program
def numba_rounds() -> dict[str, Any]:
    np.row_stack = getattr(np, "row_stack", np.vstack)  # numba-cuda still asks for what NumPy 2.5 removed
    from numba import cuda

    from memferry_allocator.interop.numba_memory import numba_memory_manager

    pool = DevicePool(open_driver("cuda"), 0, 64 * MIB)
    cuda.set_memory_manager(numba_memory_manager(pool))

    @cuda.jit
    def add(array: Any, value: int) -> None:
        place = cuda.grid(1)
        if place < array.size:
            array[place] += value

    added, unable = 3, ""
    try:
        add[1, 1](cuda.to_device(np.zeros(1, dtype=np.int32)), 0)
    except AttributeError as error:
        if "module 'numpy" not in str(error):
            raise
        added, unable = 0, f"numba compiles no kernel with NumPy {np.__version__}: {error}"

    rounds, wrong = Rounds(), 0
    for number, count in rounds:
        array = cuda.to_device(np.full(max(count, 1), number, dtype=np.int32))
        if added:
            add[(max(count, 1) + 127) // 128, 128](array, added)
        wrong += int((array.copy_to_host() != number + added).sum())
        rounds.kept.append(array)
    del array
    gc.collect()
    info = cuda.current_context().get_memory_info()
    cuda.current_context().deallocations.clear()
    return {"wrong": wrong, "left": pool.used, "info": info.total > info.free > 0, "unable": unable}


@program
def rmm_rounds() -> dict[str, Any]:
    import rmm

    from memferry_allocator.interop.rmm_memory import RmmMemory, rmm_resource

    driver = open_driver("cuda")
    pool = DevicePool(driver, 0, 64 * MIB)
    rmm.mr.set_current_device_resource(rmm_resource(pool))
    rounds = Rounds()
    for _, count in rounds:
        rounds.kept.append(rmm.DeviceBuffer(size=count))
    left = pool.used
    stream = driver.create_stream(0)
    under = RmmMemory(driver, 0, rmm.mr.CudaMemoryResource())
    grown = DevicePool(driver, 0, 0, maximum=64 * MIB, source=under)
    blocks = [grown.allocate(size, stream=stream) for size in (1, 100, MIB)]
    for ptr, size in zip(blocks, (1, 100, MIB), strict=True):
        grown.deallocate(ptr, size, stream=stream)
    grown.close()
    stream.close()
    rmm.mr.set_current_device_resource(rmm.mr.CudaMemoryResource())
    return {"left": left, "distinct": len(set(blocks)) == 3}


@program
def jax_shares() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    driver = open_driver("cuda")
    wrong = 0
    with Space(driver) as space:
        for number in range(200):
            with space.part.acquire(Place.HOST, Mode.WRITE) as view:
                as_host(view, "int32").numpy()[:] = number
            with space.part.acquire(Place.DEVICE, Mode.READ, stream=space.stream) as view:
                array = as_device(view, "int32", promise_not_to_write=True)
                taken = jnp.from_dlpack(array)
                wrong += int((taken + 1 != number + 1).sum())
                del array, taken
                gc.collect()
        theirs = jnp.arange(1000, dtype=jnp.float32)
        imported = from_dlpack(theirs, stream=space.stream)
        same = imported.shape == (1000,) and imported.kind.name == "float32"
    return {"wrong": wrong, "same": same, "platform": jax.default_backend()}


@program
def torch_shares() -> dict[str, Any]:
    import torch

    from memferry_allocator.interop.torch_tensor import as_tensor

    driver = open_driver("cuda")
    wrong = 0
    with Space(driver) as space:
        stream = torch.cuda.Stream()
        ours = borrow_stream(driver, 0, stream)
        for number in range(ROUNDS):
            place = Place.DEVICE if number % 2 else Place.MAPPED
            with torch.cuda.stream(stream), space.part.acquire(place, Mode.READ_WRITE, stream=ours) as view:
                array = as_device(view, "bfloat16", (4, 1024))
                one, other = as_tensor(array), torch.from_dlpack(array)
                one.fill_(number % 100)
                wrong += int((other != number % 100).sum())
                del array, one, other
        theirs = torch.arange(1000, device="cuda", dtype=torch.float16)
        taken = from_dlpack(theirs, stream=ours)
        same = taken.ptr == theirs.data_ptr() and taken.kind.name == "float16"
    return {"wrong": wrong, "same": same}


@program
def torch_begins_with_a_view() -> dict[str, Any]:
    """A tensor of a device view is the first that torch sees of the device."""
    from memferry_allocator.interop.torch_tensor import as_tensor

    with Space(open_driver("cuda")) as space:
        with space.part.acquire(Place.HOST, Mode.WRITE) as view:
            as_host(view, "int32").numpy()[:] = 1
        with space.part.acquire(Place.DEVICE, Mode.READ_WRITE, stream=space.stream) as view:
            space.stream.synchronize()
            total = int(as_tensor(as_device(view, "int32", (10, 10))).sum())
    return {"total": total}


@program
def consumers_outlive_everything() -> dict[str, Any]:
    """Tensors of our memory are still there when the interpreter goes."""
    import torch

    from memferry_allocator.interop.torch_tensor import as_tensor

    space = Space(open_driver("emulated"))
    view = space.part.acquire(Place.HOST, Mode.READ_WRITE)
    array = as_host(view, "float32")
    module: Any = sys
    module.kept = [torch.from_dlpack(array), np.from_dlpack(array), array.__dlpack__(max_version=(1, 0))]
    module.kept += [as_tensor(array), from_dlpack(torch.zeros(10)), from_dlpack(np.zeros(10))]
    module.cycle = [module.kept]
    module.cycle.append(module.cycle)
    return {"kept": len(module.kept)}


class Space:
    """A shadow space with one partition."""

    def __init__(self, driver: Any) -> None:
        self.space = ShadowSpace(driver, 0, device_budget=4 * MIB)
        self.arena = HostArena(driver, MIB)
        self.stream = driver.create_stream(0)
        [self.part] = self.space.buffer("buffer", [self.arena.cut(64 << 10)])

    def __enter__(self) -> Space:
        return self

    def __exit__(self, *_: object) -> None:
        gc.collect()
        self.space.close()
        self.arena.close()
        self.stream.close()


if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]]()))
