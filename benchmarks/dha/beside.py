"""Matrix products while something else keeps the link busy: kernels of more and more blocks, and the copy engines.

Samples with and without the other take turns, so that a device that changes its pace changes it for both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from memferry_allocator import Direction, Stream
from memferry_rt.adapters.torch.profiling import Buffer, Home

from .common import Bench
from .spreads import READ, WRITTEN

PRODUCTS = 6


def beside(bench: Bench) -> dict[str, Any]:
    """The slow-down of the products by each neighbour."""
    stand, nbytes = bench.stand, bench.sizes.writing
    outer, inner = bench.sizes.linear
    x, weight = bench.normal(bench.sizes.beside, inner), bench.normal(outer, inner)
    result = x.new_empty(bench.sizes.beside, outer)
    home = stand.home((nbytes // bench.sizes.dtype.itemsize,), bench.sizes.dtype)
    home.host.zero_()
    buffer = stand.buffer(tuple(home.host.shape), bench.sizes.dtype)
    other = stand.driver.create_stream(stand.device)
    neighbours = _neighbours(bench, home, buffer, other)

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(x, weight.t(), out=result)

    cases = [{"neighbour": name, **_pair(bench, products, start, other)} for name, start in neighbours.items()]
    stand.settle()
    other.close()
    home.close()
    return {"tokens": bench.sizes.beside, "linear": [outer, inner], "nbytes": nbytes, "cases": cases}


def _neighbours(bench: Bench, home: Home, buffer: Buffer, other: Stream) -> dict[str, Callable[[], object]]:
    moves, engine, nbytes = bench.moves, bench.stand.engine, bench.sizes.writing
    near, far = buffer.span, bench.stand.far(home)
    found: dict[str, Callable[[], object]] = {
        f"writes of {name}": lambda s=s: moves.copy(far, near.ptr, nbytes, stream=other, spread=s)
        for name, s in WRITTEN.items()
    }
    found |= {
        f"reads of {name}": lambda s=s: moves.copy(near.ptr, far, nbytes, stream=other, spread=s)
        for name, s in READ.items()
    }
    found["copy engine from the device"] = lambda: engine.copy(
        home.span, near, Direction.DEVICE_TO_HOST, stream=other
    )
    found["copy engine to the device"] = lambda: engine.copy(
        near, home.span, Direction.HOST_TO_DEVICE, stream=other
    )
    return found


def _pair(
    bench: Bench, products: Callable[[], None], start: Callable[[], object], other: Stream
) -> dict[str, Any]:
    """Products alone and beside the neighbour, in turn, and the neighbour's rate meanwhile."""
    alone, beside, rates, outlasts = [], [], [], []
    for _ in range(bench.sizes.samples):
        alone += bench.stand.seconds(products, samples=1, warm_up=1)
        seconds, rate, longer = _one(bench, products, start, other)
        beside.append(seconds)
        rates.append(rate)
        outlasts.append(longer)
    over = statistics.median(b / a for a, b in zip(alone, beside, strict=True)) - 1
    return {
        "slow_down": over,
        "alone_s": alone,
        "beside_s": beside,
        "bytes_per_second": rates,
        "neighbour_outlasts": all(outlasts),
    }


def _one(
    bench: Bench, products: Callable[[], None], start: Callable[[], object], other: Stream
) -> tuple[float, float, bool]:
    stand = bench.stand
    stand.settle()
    if stand.emulated:  # nothing runs beside anything
        seconds = stand.seconds(products, samples=1, warm_up=1)[0]
        start()
        return seconds, bench.sizes.writing / seconds, True
    began = other.record(stand.driver.create_event(stand.device, timing=True))
    start()
    ended = other.record(stand.driver.create_event(stand.device, timing=True))
    stand.stream.wait(began)
    first = stand.mark()
    products()
    last = stand.mark()
    stand.settle()
    seconds = ended.elapsed_since(began)
    return last.elapsed_since(first), bench.sizes.writing / seconds, ended.elapsed_since(last) > 0
