"""libmemferry on a real driver: order, captures and registrations, beside streams that cuda-python made."""

from __future__ import annotations

import pytest

from ..allocator.test_open_driver import in_a_process

pytestmark = pytest.mark.gpu

PRELUDE = """
from cuda.bindings import driver as cu
from memferry_allocator.native import bindings

ffi, lib = bindings()
MIB = 1 << 20

def require(status):
    assert status == 0, ffi.string(lib.memferry_last_error()).decode()

def refused(status):
    names = ffi.typeof("memferry_status").elements
    return names[status].removeprefix("MEMFERRY_")

def made(kind, call, *arguments):
    out = ffi.new(kind)
    require(call(*arguments, out))
    return out[0]

holder = ffi.new("memferry_device **")
require(lib.memferry_open(0, ffi.NULL, holder))
device = holder[0]
pools = ffi.new("memferry_pool **")
require(lib.memferry_pool_open(device, 64 * MIB, pools))
pool = pools[0]

def allocate(nbytes, stream):
    return int(made("memferry_ptr *", lib.memferry_allocate, pool, nbytes, stream))

def statistics():
    out = ffi.new("memferry_statistics *")
    require(lib.memferry_pool_statistics(pool, out))
    return out

def stream():
    return made("memferry_stream *", lib.memferry_stream_create, device)

def host(nbytes):
    return int(ffi.cast("uintptr_t", made("void **", lib.memferry_host_allocate, device, nbytes)))
"""


def test_reuse_is_ordered_and_bytes_are_right() -> None:
    """Blocks change hands between two streams at once; every one comes home with its own bytes."""
    said = in_a_process(
        PRELUDE + "streams = [stream(), stream()]\n"
        "count, nbytes = 16, 24 * MIB\n"
        "home = host(count * nbytes)\n"
        "data = ffi.buffer(ffi.cast('char *', home), count * nbytes)\n"
        "origin = host(nbytes * 2)\n"
        "for half in range(2):\n"
        "    ffi.memmove(ffi.cast('char *', origin + half * nbytes), bytes([half + 1]) * nbytes, nbytes)\n"
        "for turn in range(count):\n"
        "    on = streams[turn % 2]\n"
        "    block = allocate(nbytes, on)\n"
        "    require(lib.memferry_copy(device, block, origin + turn % 2 * nbytes, nbytes, on))\n"
        "    require(lib.memferry_copy(device, home + turn * nbytes, block, nbytes, on))\n"
        "    require(lib.memferry_free(pool, block, nbytes, on))\n"
        "for on in streams:\n"
        "    require(lib.memferry_stream_synchronize(device, on))\n"
        "right = [bytes([1]) * nbytes, bytes([2]) * nbytes]\n"
        "parts = [data[turn * nbytes:(turn + 1) * nbytes] for turn in range(count)]\n"
        "print(sum(part != right[turn % 2] for turn, part in enumerate(parts)))\n"
        "three = [allocate(21 * MIB, streams[turn % 2]) for turn in range(3)]\n"
        "print(statistics().waits > 0, statistics().used == 63 * MIB)\n"
        "for block in three:\n"
        "    require(lib.memferry_free(pool, block, 21 * MIB, streams[0]))\n"
        "for address in (home, origin):\n"
        "    require(lib.memferry_host_free(device, ffi.cast('void *', address)))\n"
        "for on in streams:\n"
        "    require(lib.memferry_stream_destroy(device, on))\n"
        "require(lib.memferry_pool_close(pools))\n"
        "require(lib.memferry_close(holder))\n"
        "require(lib.memferry_close(holder))\n"
        "print(int(cu.cuDevicePrimaryCtxGetState(0)[2]))\n"
    )
    assert said.splitlines() == ["0", "True True", "0"]


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_capture_is_refused_and_unharmed(mode: int) -> None:
    said = in_a_process(
        PRELUDE + "other = stream()\n"
        "_, context = cu.cuDevicePrimaryCtxRetain(0)\n"
        "cu.cuCtxSetCurrent(context)\n"
        "_, captured = cu.cuStreamCreate(1)\n"
        "handle = ffi.cast('void *', int(captured))\n"
        "block = allocate(MIB, handle)\n"
        f"print(cu.cuStreamBeginCapture(captured, cu.CUstreamCaptureMode({mode}))[0].name)\n"
        "out = ffi.new('memferry_ptr *')\n"
        "print(refused(lib.memferry_allocate(pool, MIB, handle, out)))\n"
        "print(refused(lib.memferry_free(pool, block, MIB, handle)))\n"
        "require(lib.memferry_free(pool, allocate(MIB, other), MIB, other))\n"
        "require(lib.memferry_host_free(device, ffi.cast('void *', host(MIB))))\n"
        "print(cu.cuStreamEndCapture(captured)[0].name)\n"
        "require(lib.memferry_free(pool, block, MIB, handle))\n"
    )
    assert said.splitlines() == ["CUDA_SUCCESS", "CAPTURING", "CAPTURING", "CUDA_SUCCESS"]


def test_registrations_are_counted_and_device_pointers_asked_for() -> None:
    said = in_a_process(
        PRELUDE + "import mmap\n"
        "pages = mmap.mmap(-1, 16 * MIB)\n"
        "view = ffi.from_buffer(pages)\n"
        "start = ffi.cast('char *', view)\n"
        "for at, nbytes in ((0, 8 * MIB), (MIB, MIB), (4 * MIB, 8 * MIB)):\n"
        "    require(lib.memferry_host_register(device, start + at, nbytes, 0))\n"
        "out = ffi.new('memferry_host_statistics *')\n"
        "require(lib.memferry_host_statistics_get(device, out))\n"
        "print(out.registered // MIB, out.registrations)\n"
        "pointer = ffi.new('memferry_ptr *')\n"
        "require(lib.memferry_host_device_pointer(device, start + 11 * MIB, pointer))\n"
        "print(refused(lib.memferry_host_device_pointer(device, start + 13 * MIB, pointer)))\n"
        "for at, nbytes in ((0, 8 * MIB), (MIB, MIB), (4 * MIB, 8 * MIB)):\n"
        "    require(lib.memferry_host_unregister(device, start + at, nbytes))\n"
        "require(lib.memferry_host_statistics_get(device, out))\n"
        "cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])\n"
        "print(out.registered, int(cu.cuMemHostRegister(int(ffi.cast('uintptr_t', start)), 16 * MIB, 3)[0]))\n"
    )
    assert said.splitlines() == ["12 2", "NOT_REGISTERED", "0 0"]


def test_the_handle_of_a_destroyed_stream_may_come_back() -> None:
    """Streams that come and go, each forgotten before its end: whatever handles they get, the bytes are right."""
    said = in_a_process(
        PRELUDE + "_, context = cu.cuDevicePrimaryCtxRetain(0)\n"
        "cu.cuCtxSetCurrent(context)\n"
        "home = host(64)\n"
        "for turn in range(50):\n"
        "    _, made_stream = cu.cuStreamCreate(1)\n"
        "    handle = ffi.cast('void *', int(made_stream))\n"
        "    block = allocate(48 * MIB, handle)\n"
        "    cu.cuMemsetD8Async(block, turn, 48 * MIB, made_stream)\n"
        "    require(lib.memferry_copy(device, home + turn, block + 47 * MIB, 1, handle))\n"
        "    require(lib.memferry_free(pool, block, 48 * MIB, handle))\n"
        "    require(lib.memferry_pool_forget_stream(pool, handle))\n"
        "    cu.cuStreamDestroy(made_stream)\n"
        "print(list(ffi.buffer(ffi.cast('char *', home), 50)[:]) == list(range(50)))\n"
    )
    assert said == "True"
