"""Linear layers over weights that pass through a ring, against copying alone and computing alone.

A chain of layers takes turns with two weights in host memory, as a model does with many: each layer's first panels
are under way while the one before computes, and only the first layer of a chain waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from memferry_rt.adapters.torch.operators import linear_forward, linear_input_gradient
from memferry_rt.adapters.torch.operators.linear import WeightPanel
from memferry_rt.adapters.torch.profiling import Home
from memferry_rt.device_kernels import READS, Spread
from memferry_rt.panels import SLOTS, Cut, PanelRing, panel_step

from .common import Bench, check_close
from .spreads import GATHERED

Chain = Callable[[], torch.Tensor]


def ring(bench: Bench) -> dict[str, Any]:
    """Forward over panels of rows, input gradient over panels of columns."""
    stand, (outer, inner) = bench.stand, bench.sizes.linear
    weights = [bench.far(bench.normal(outer, inner)) for _ in range(2)]
    near = [stand.buffer((outer, inner), bench.sizes.dtype) for _ in weights]
    for here, home in zip(near, weights, strict=True):
        stand.copy_in(here, home)
    copy = bench.measure(lambda: stand.copy_in(near[0], weights[0]))
    cases = []
    for tokens in bench.sizes.many:
        x, dy = bench.normal(tokens, inner), bench.normal(tokens, outer)
        case: dict[str, Any] = {
            "tokens": tokens,
            "forward_compute": _chain_times(bench, [lambda w=w, x=x: F.linear(x, w.tensor) for w in near]),
            "input_gradient_compute": _chain_times(
                bench, [lambda w=w, dy=dy: torch.mm(dy, w.tensor) for w in near]
            ),
            "forward": [],
            "input_gradient": [],
        }
        for nbytes in bench.sizes.panels:
            case["forward"].append(_forward(bench, weights, x, nbytes))
            for gathered in GATHERED:
                case["input_gradient"].append(_input_gradient(bench, weights, dy, nbytes, gathered))
        cases.append(case)
    stand.settle()
    for home in weights:
        home.close()
    return {"linear": [outer, inner], "nbytes": weights[0].span.nbytes, "copy": copy, "cases": cases}


def _forward(bench: Bench, weights: list[Home], x: torch.Tensor, nbytes: int) -> dict[str, Any]:
    outer, inner = bench.sizes.linear
    cut = Cut(False, panel_step(outer, inner * bench.sizes.dtype.itemsize, nbytes))
    panels = _ring(bench, cut, nbytes, spread=None)

    def layer(home: Home) -> Chain:
        return lambda: linear_forward(x, home.host, None, _views(bench, panels, home, cut))

    chain = [layer(home) for home in weights]
    found, some = chain[0](), slice(0, 64)
    bench.stand.settle()
    weight = weights[0].host.to(x.device)
    check_close(found[some], x[some].double() @ weight.double().t(), "forward over panels")
    result = {
        "panel_nbytes": nbytes,
        "step": cut.step,
        **_chain_times(bench, chain),
        "single": bench.measure(chain[0]),
        "exact": torch.equal(found, F.linear(x, weight)),
    }
    panels.close(bench.stand.stream)
    return result


def _input_gradient(
    bench: Bench, weights: list[Home], dy: torch.Tensor, nbytes: int, gathered: str
) -> dict[str, Any]:
    outer, inner = bench.sizes.linear
    cut = Cut(True, panel_step(inner, outer * bench.sizes.dtype.itemsize, nbytes))
    panels = _ring(bench, cut, nbytes, spread=GATHERED[gathered])

    def layer(home: Home) -> Chain:
        return lambda: linear_input_gradient(dy, home.host, _views(bench, panels, home, cut))

    chain = [layer(home) for home in weights]
    found, some = chain[0](), slice(0, 64)
    bench.stand.settle()
    weight = weights[0].host.to(dy.device)
    check_close(found[some], dy[some].double() @ weight.double(), "input gradient over panels")

    def drain() -> None:
        for home in weights:  # both: what was read a moment ago is not read faster again
            for _ in panels.panels(home.matrix, cut, stream=bench.stand.stream):
                pass

    result = {
        "panel_nbytes": nbytes,
        "step": cut.step,
        "gathered_by": gathered,
        **_chain_times(bench, chain),
        "copy": bench.measure(drain, times=len(weights)),
        "exact": torch.equal(found, torch.mm(dy, weight)),
    }
    panels.close(bench.stand.stream)
    return result


def _ring(bench: Bench, cut: Cut, nbytes: int, *, spread: Spread | None) -> PanelRing:
    stand = bench.stand
    pool = stand.pool(SLOTS * nbytes)
    moves = bench.moves if spread else None
    return PanelRing(
        stand.driver, stand.engine, pool, stand.stream, nbytes=nbytes, moves=moves, spread=spread or READS
    )


def _views(bench: Bench, panels: PanelRing, home: Home, cut: Cut) -> Iterator[WeightPanel]:
    for panel in panels.panels(home.matrix, cut, stream=bench.stand.stream):
        flat = bench.stand.factory.device(panel.span).view(bench.sizes.dtype)
        yield panel.start, panel.stop, flat.view(panel.rows, panel.columns)


def _chain_times(bench: Bench, layers: list[Chain]) -> dict[str, Any]:
    """Seconds of one layer in a chain."""
    chain = bench.sizes.chain

    def run() -> None:
        for number in range(chain):
            layers[number % len(layers)]()

    return bench.measure(run, times=chain)
