"""What host memory carries in this run: the optimizer's streams without its arithmetic, by all cores."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from memferry_rt.native import NativePool, load_adam

from ..optimizer.slabs import BYTES, Slabs
from .common import Bench

PIECE = 1 << 20


def memory(bench: Bench) -> dict[str, Any]:
    """Bytes a second, by count of loads and stores."""
    kernel = load_adam()
    if kernel is None:
        raise RuntimeError("the native kernels are not installed")
    count, threads = bench.sizes.state, max(1, len(os.sched_getaffinity(0)) - 1)
    slabs = Slabs(bench.stand.driver, count, ["bfloat16"])
    slabs.fill()
    calls = kernel.traffic(slabs.pieces("bfloat16", 0, count, PIECE, zeros=True))
    pool = NativePool(threads)
    samples = []
    try:
        for _ in range(bench.sizes.samples):
            began = time.perf_counter()
            pool.submit(calls).wait()
            samples.append(time.perf_counter() - began)
    finally:
        pool.close()
    slabs.arena.close()
    return {
        "threads": threads,
        "nbytes": BYTES * count,
        "samples_s": samples[1:],
        "bytes_per_second": BYTES * count / statistics.median(samples[1:]),
    }
