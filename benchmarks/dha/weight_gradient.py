"""Weight gradients written to host memory: by one kernel, and in panels that leave while the next is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memferry_rt.adapters.torch.operators import LaneOutbox, weight_gradient
from memferry_rt.adapters.torch.profiling import Home
from memferry_rt.panels import borders, panel_step
from memferry_rt.staging import StagingRing

from .common import Bench, Entry, check_close, check_same


def gradient(bench: Bench) -> dict[str, Any]:
    """The ways by tokens, compute alone and the transfer alone."""
    stand, (outer, inner) = bench.stand, bench.sizes.linear
    home = stand.home((outer, inner), bench.sizes.dtype)
    made = stand.buffer((outer, inner), bench.sizes.dtype)
    transfer = bench.measure(lambda: stand.copy_out(home, made))
    pool = stand.pool(2 * max(bench.sizes.panels))
    cases = []
    for tokens in (*bench.sizes.few, *bench.sizes.many):
        x, dy = bench.normal(tokens, inner), bench.normal(tokens, outer)
        expected = dy.t() @ x
        case: dict[str, Any] = {
            "tokens": tokens,
            "compute": bench.measure(lambda x=x, dy=dy: torch.mm(dy.t(), x, out=made.tensor)),
            "one_kernel": _checked(
                bench, home, x, dy, expected, lambda x=x, dy=dy: weight_gradient(dy, x, home.mapped)
            ),
            "panels": [],
        }
        for nbytes in bench.sizes.panels:
            ring = StagingRing(pool, 2 * nbytes, stand.stream)
            for carrier in ("engine", "kernel"):
                work = _panels(bench, home, ring, x, dy, nbytes, carrier)
                found = _checked(bench, home, x, dy, expected, work)
                case["panels"].append({"panel_nbytes": nbytes, "carrier": carrier, **found})
            stand.settle()
            ring.close(stand.stream)
        cases.append(case)
    stand.settle()
    home.close()
    return {"linear": [outer, inner], "nbytes": home.span.nbytes, "transfer": transfer, "cases": cases}


def _panels(
    bench: Bench, home: Home, ring: StagingRing, x: torch.Tensor, dy: torch.Tensor, nbytes: int, carrier: str
) -> Callable[[], None]:
    stand, (outer, inner) = bench.stand, bench.sizes.linear
    parts = borders(outer, panel_step(outer, inner * bench.sizes.dtype.itemsize, nbytes))

    def work() -> None:
        box = LaneOutbox(
            stand.driver,
            stand.engine,
            ring,
            stand.factory.device,
            stream=stand.stream,
            home=home.span,
            moves=bench.moves if carrier == "kernel" else None,
        )
        weight_gradient(dy, x, home.mapped, borders=parts, outbox=box)

    return work


def _checked(
    bench: Bench, home: Home, x: torch.Tensor, dy: torch.Tensor, expected: torch.Tensor, work: Callable[[], None]
) -> Entry:
    """Measure, after comparing with float64 and with the plain bytes what one run leaves in a poisoned home."""
    home.host.fill_(float("nan"))
    work()
    bench.stand.settle()
    some = slice(0, None, max(1, len(home.host) // 64))
    error = check_close(home.host[some].to(x.device), dy[:, some].t().double() @ x.double(), "weight gradient")
    try:
        check_same(home.host, expected.cpu(), "")
        exact = True
    except RuntimeError:
        exact = False
    return {**bench.measure(work), "exact": exact, "float64_error": error}
