"""Matrix products while something else keeps the link busy: kernels of more and more blocks, and the copy engines.

Samples with and without the other take turns, so that a device that changes its pace changes it for both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from memferry_allocator import Direction, Span, Stream
from memferry_rt.adapters.torch.profiling import Buffer, Home

from .common import Bench
from .spreads import READ, WRITTEN

PRODUCTS = 6
FASTEST = 55e9  # bytes a second: a link's


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


def _neighbours(bench: Bench, home: Home, buffer: Buffer, other: Stream) -> dict[str, Callable[[int], object]]:
    """What moves so many bytes on another stream, by name."""
    moves, engine = bench.moves, bench.stand.engine
    near, far = buffer.span.ptr, bench.stand.far(home)
    found: dict[str, Callable[[int], object]] = {
        f"writes of {name}": lambda n, s=s: moves.copy(far, near, n, stream=other, spread=s)
        for name, s in WRITTEN.items()
    }
    found |= {
        f"reads of {name}": lambda n, s=s: moves.copy(near, far, n, stream=other, spread=s)
        for name, s in READ.items()
    }

    def by_engine(into: bool) -> Callable[[int], object]:
        def copy(nbytes: int) -> object:
            ends = Span(near, nbytes), Span(home.span.ptr, nbytes)
            direction = Direction.HOST_TO_DEVICE if into else Direction.DEVICE_TO_HOST
            return engine.copy(*(ends if into else ends[::-1]), direction, stream=other)

        return copy

    found["copy engine from the device"] = by_engine(False)
    found["copy engine to the device"] = by_engine(True)
    return found


def _pair(
    bench: Bench, products: Callable[[], None], start: Callable[[int], object], other: Stream
) -> dict[str, Any]:
    """Products alone and beside the neighbour, in turn, and the neighbour's rate meanwhile."""
    alone, beside, rates, outlasts = [], [], [], []
    nbytes = _enough(bench, start, other)
    for _ in range(bench.sizes.samples):
        alone += bench.stand.seconds(products, samples=1, warm_up=1)
        seconds, rate, longer = _one(bench, products, start, nbytes, other)
        beside.append(seconds)
        rates.append(rate)
        outlasts.append(longer)
    over = statistics.median(b / a for a, b in zip(alone, beside, strict=True)) - 1
    return {
        "slow_down": over,
        "alone_s": alone,
        "beside_s": beside,
        "nbytes": nbytes,
        "bytes_per_second": rates,
        "neighbour_outlasts": all(outlasts),
    }


def _enough(bench: Bench, start: Callable[[int], object], other: Stream) -> int:
    """Bytes that keep a neighbour busy for as long as the fastest is by all of them."""
    few, most = bench.sizes.writing // 32, bench.sizes.writing
    _, slow, _ = _one(bench, lambda: None, start, few, other)
    return max(few, min(most, int(slow * most / FASTEST) // 4096 * 4096))


def _one(
    bench: Bench, products: Callable[[], None], start: Callable[[int], object], nbytes: int, other: Stream
) -> tuple[float, float, bool]:
    stand = bench.stand
    stand.settle()
    if stand.emulated:  # nothing runs beside anything
        seconds = stand.seconds(products, samples=1, warm_up=1)[0]
        start(nbytes)
        return seconds, nbytes / seconds, True
    began = other.record(stand.driver.create_event(stand.device, timing=True))
    start(nbytes)
    ended = other.record(stand.driver.create_event(stand.device, timing=True))
    stand.stream.wait(began)
    first = stand.mark()
    products()
    last = stand.mark()
    stand.settle()
    seconds = ended.elapsed_since(began)
    return last.elapsed_since(first), nbytes / seconds, ended.elapsed_since(last) > 0
