"""What the link carries in this run: what other rows are measured against."""

from __future__ import annotations

from typing import Any

from .common import Bench
from .spreads import READ, WRITTEN


def link(bench: Bench) -> dict[str, Any]:
    """Large copies each way, by the copy engines and by kernels of few blocks, which may be slow."""
    stand, nbytes, less = bench.stand, bench.sizes.link, bench.sizes.link // 8
    home = stand.home((nbytes // bench.sizes.dtype.itemsize,), bench.sizes.dtype)
    buffer = stand.buffer(tuple(home.host.shape), bench.sizes.dtype)
    home.host.zero_()
    far, near = stand.far(home), buffer.span.ptr
    found = {
        "nbytes": nbytes,
        "kernel_nbytes": less,
        "to_device": bench.measure(lambda: stand.copy_in(buffer, home)),
        "from_device": bench.measure(lambda: stand.copy_out(home, buffer)),
        "kernel_reads": {},
        "kernel_writes": {},
    }
    for name, spread in READ.items():
        found["kernel_reads"][name] = bench.measure(
            lambda s=spread: bench.moves.copy(near, far, less, stream=stand.stream, spread=s)
        )
    for name, spread in WRITTEN.items():
        found["kernel_writes"][name] = bench.measure(
            lambda s=spread: bench.moves.copy(far, near, less, stream=stand.stream, spread=s)
        )
    stand.settle()
    home.close()
    return found
