"""The functions for torch's pluggable allocator, called from C++ as torch does, on the stand-in for libcuda."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memferry_allocator import InvalidRequestError, UnsupportedError
from memferry_allocator.interop import torch_pool
from memferry_allocator.native import torch_library_path

from ..test_open_driver import in_a_process
from .compiling import HERE, WARNINGS, need_compiler, run

pytestmark = need_compiler
BUDGET = 1 << 20
WORDS = (
    "CUDA out of memory. Tried to allocate 2097152 bytes on device 0. MemFerry: device pool: asked for 2.00 MiB"
)


@pytest.mark.parametrize("with_torch", [False, True])
def test_errors_in_cpp(stub: Path, tmp_path: Path, with_torch: bool) -> None:
    program, flags = tmp_path / "torch_errors", []
    if with_torch:
        root = Path(torch.__file__).parent
        flags = ["-DWITH_TORCH", f"-isystem{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-lc10"]
    source = str(HERE / "torch_errors.cpp")
    run(["g++", "-std=c++20", *WARNINGS, source, "-o", str(program), *flags, "-ldl"])
    environment = {**os.environ, "MEMFERRY_LIBCUDA": str(stub)}
    said = run([str(program), str(torch_library_path()), str(BUDGET)], env=environment).splitlines()
    kind = "OutOfMemoryError" if with_torch else "runtime_error"
    assert said[0] == "slots 0 1"
    assert said[1] == said[2]
    assert said[1].startswith(f"{kind} {WORDS}")
    assert said[3] == "null"  # torch.cuda.MemPool flushes, retries and raises itself
    assert said[4].startswith("runtime_error MemFerry: device 99")
    assert said[5].startswith("runtime_error MemFerry: allocate: the per-thread default stream")
    assert said[6].startswith(f"{kind} CUDA out of memory. Tried to allocate 1 bytes")
    assert said[7:] == ["memory", "null"]


PRELUDE = """
import ctypes
from memferry_allocator.native import torch_library_path
stub = ctypes.CDLL({stub!r})
library = ctypes.CDLL(str(torch_library_path()))
library.memferry_torch_allocate_0.restype = library.memferry_torch_allocate_1.restype = ctypes.c_void_p
library.memferry_torch_allocate_0.argtypes = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
library.memferry_torch_free_0.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
library.memferry_torch_record_stream_0.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
library.memferry_torch_take.argtypes = [ctypes.c_size_t, ctypes.c_int]
class Statistics(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in (
        "budget reserved used peak cached largest_free live allocations frees hits waits").split()]
def found():
    out = Statistics()
    assert library.memferry_torch_statistics(0, 0, ctypes.byref(out)) == 0
    return out
def stream():
    stub.cuCtxPushCurrent_v2(ctypes.c_void_p(1))
    out = ctypes.c_void_p()
    assert stub.cuStreamCreate(ctypes.byref(out), 0) == 0
    stub.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return out
def capture(stream, on):
    stub.cuCtxPushCurrent_v2(ctypes.c_void_p(1))
    graph = ctypes.byref(ctypes.c_void_p())
    code = stub.cuStreamBeginCapture_v2(stream, 0) if on else stub.cuStreamEndCapture(stream, graph)
    stub.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return code
assert library.memferry_torch_take(1 << 20, 0) == 0
allocate, free = library.memferry_torch_allocate_0, library.memferry_torch_free_0
"""


def in_stub(stub: Path, code: str) -> list[str]:
    return in_a_process(PRELUDE.format(stub=str(stub)) + code, MEMFERRY_LIBCUDA=str(stub)).splitlines()


def test_frees_during_a_capture_come_later(stub: Path) -> None:
    said = in_stub(
        stub,
        "one = stream()\n"
        "block = allocate(1 << 20, 0, one)\n"
        "capture(one, True)\n"
        "free(block, 1 << 20, 0, one)\n"
        "print(found().live)\n"
        "print(capture(one, False))\n"
        "print(allocate(1 << 20, 0, one) == block, found().live)\n",
    )
    assert said == ["1", "0", "True 1"]


def test_record_stream_orders_the_next_owner(stub: Path) -> None:
    said = in_stub(
        stub,
        "one, other = stream(), stream()\n"
        "for shared in (False, True):\n"
        "    block = allocate(1 << 20, 0, one)\n"
        "    if shared:\n"
        "        library.memferry_torch_record_stream_0(block, other)\n"
        "    free(block, 1 << 20, 0, one)\n"
        "    print(found().waits)\n"
        "block = allocate(1 << 20, 0, one)\n"
        "print(found().waits)\n",
    )
    assert said == ["0", "0", "1"]


def test_trim_gives_idle_pools_back(stub: Path) -> None:
    said = in_stub(
        stub,
        "block = allocate(100, 0, None)\n"
        "library.memferry_torch_trim_0()\n"
        "print(found().reserved)\n"
        "free(block, 100, 0, None)\n"
        "library.memferry_torch_trim_0()\n"
        "print(found().reserved, found().used, found().budget)\n"
        "print(allocate(100, 0, None) is not None, found().reserved)\n",
    )
    assert said == ["1048576", "0 0 1048576", "True 1048576"]


def test_the_slots_end(stub: Path) -> None:
    said = in_stub(stub, "print([library.memferry_torch_take(1, 0) for _ in range(8)])\n")
    assert said == ["[1, 2, 3, 4, 5, 6, 7, -1]"]


# -- the Python side where torch has no CUDA ---------------------------------------------------------------
def test_the_package_does_not_import_torch() -> None:
    code = "import sys, memferry_allocator, memferry_allocator.native, memferry_allocator.interop\n"
    assert in_a_process(code + "print('torch' in sys.modules)") == "False"


@pytest.mark.skipif(hasattr(torch._C, "_cuda_customAllocator"), reason="torch has CUDA")
def test_a_torch_without_cuda_is_refused() -> None:
    for make in (torch_pool.pluggable_allocator, torch_pool.mem_pool):
        with pytest.raises(UnsupportedError, match="built without CUDA"):
            make(device_budget="1GiB")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """A torch with CUDA, which notes the functions it is given."""
    given: list[tuple[str, int]] = []

    class Callbacks:
        def __getattr__(self, name: str) -> object:
            return lambda address: given.append((name, address))

    def custom(allocate: int, free: int) -> Callbacks:
        given.extend([("allocate", allocate), ("free", free)])
        return Callbacks()

    monkeypatch.setattr(torch._C, "_cuda_customAllocator", custom, raising=False)
    monkeypatch.setattr(torch_pool, "_take", lambda budget, null_when_full: 3)
    yield given
    torch_pool._kept.clear()


def test_torch_is_given_the_functions_of_one_slot(pretended: list[tuple[str, int]]) -> None:
    allocator = torch_pool.pluggable_allocator(device_budget="2MiB")
    library = ctypes.CDLL(str(torch_library_path()))
    names = {
        "allocate": "allocate",
        "free": "free",
        "set_record_stream_fn": "record_stream",
        "set_reset_fn": "trim",
    }
    assert dict(pretended) == {
        key: ctypes.cast(library[f"memferry_torch_{name}_3"], ctypes.c_void_p).value for key, name in names.items()
    }
    assert allocator.device_budget == 2 << 20
    assert torch_pool._kept == [allocator]
    found = allocator.statistics()
    assert (found.reserved, found.live) == (0, 0)
    with pytest.raises(InvalidRequestError, match="device_budget"):
        torch_pool.pluggable_allocator(device_budget="2MB")
