"""The source of the copying kernel, compiled for the processor: every byte of any range, and none beside it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator.driver.cuda.kernel_calls import SOURCE

from .machine import address, pattern

# One thread after the other; a vector that lies badly ends the process as it would end a device's context.
PROGRAM = """
#include <cstddef>
#define __global__
#define __device__
#define __launch_bounds__(threads)
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
static struct { unsigned x; } blockIdx, threadIdx, blockDim, gridDim;
#include "copy_kernel.cu"
extern "C" void copy(unsigned blocks, unsigned threads, char *dst, const char *src, size_t nbytes) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) memferry_copy(dst, src, nbytes);
}
"""
ROOM = 40_000
DEPTH = 8  # loads of a thread in a round


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder: Path = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(PROGRAM)
    command = [
        "g++",
        "-std=c++17",
        "-O2",
        "-w",
        "-fPIC",
        "-shared",
        f"-I{SOURCE.parent}",
        "kernel.cpp",
        "-o",
        "it.so",
    ]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "it.so"))


@given(
    to=st.integers(0, 40),
    of=st.integers(0, 40),
    rounds=st.integers(0, 3),
    unit=st.sampled_from([1, 2, 4, 8, 16]),
    more=st.one_of(st.integers(-40, 40), st.integers(0, ROOM)),
    blocks=st.integers(1, 5),
    threads=st.sampled_from([32, 64, 96]),
    alike=st.booleans(),
)
def test_every_byte_and_none_beside(
    kernel: ctypes.CDLL,
    to: int,
    of: int,
    rounds: int,
    unit: int,
    more: int,
    blocks: int,
    threads: int,
    alike: bool,
) -> None:
    """Rounds in which all threads have all their loads, rounds in which some do not, and the ragged ends."""
    nbytes = min(max(0, rounds * threads * DEPTH * unit + more), ROOM - 80)
    of = of // 16 * 16 + to % 16 if alike else of
    source, target = pattern(ROOM), pattern(ROOM, 1)
    wanted = target.copy()
    wanted[to : to + nbytes] = source[of : of + nbytes]
    dst, src = (ctypes.c_void_p(address(data) + start) for data, start in ((target, to), (source, of)))
    kernel.copy(blocks, threads, dst, src, ctypes.c_size_t(nbytes))
    assert np.array_equal(target, wanted)
