"""Plans as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from memferry_allocator import format_size
from memferry_rt.plan import Bound, LayerPlan, NextBest, Plan

from ..screen import Row, Screen

_NOTHING = 1e-7  # seconds: what sums of times differ by

HEAD = (
    "layer",
    "weights",
    "gradient",
    "state",
    "bytes",
    "on device",
    "forward",
    "backward",
    "load",
    "new after",
    "next best",
    "source",
)


def show_plan(screen: Screen, plan: Plan, following: Mapping[str, NextBest]) -> None:
    """The plan: its layers, its iteration and its memory."""
    screen.rows(_model_rows(plan))
    screen.table(HEAD, [_cells(*group) for group in _alike(plan.layers, following)], words=4)
    screen.rows(_result_rows(plan))


def show_bounds(screen: Screen, bounds: Sequence[Bound], seconds: float) -> None:
    """What bounds the iteration."""
    first = bounds[0]
    what = "nothing alone" if first.saved_seconds < 0.002 * seconds else first.name
    screen.rows(
        [("bound by", f"{what}; the share of the iteration in use, and what a tenth more of it would save:")]
    )
    screen.table(
        ("", "in use", "saves"),
        [(each.name, f"{each.busy:.0%}", f"{each.saved_seconds / seconds:.1%}") for each in bounds],
    )


def more_rows(saved: Mapping[str, float], seconds: float) -> list[Row]:
    """What one more GiB of each memory would buy."""
    return [
        (
            "1 GiB more",
            f"of {name.replace('_', ' ')} would save {format_seconds(value)} ({value / seconds:.1%})",
        )
        for name, value in saved.items()
    ]


def format_seconds(seconds: float) -> str:
    """With three digits, in the unit that suits."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.3g} us"


def _model_rows(plan: Plan) -> list[Row]:
    parameters = sum(layer.parameters for layer in plan.layers)
    budgets = f"device memory {format_size(plan.device_memory)}"
    if plan.host_memory:
        budgets += f", host memory {format_size(plan.host_memory)}"
    several = plan.ranks > 1
    return [
        ("model", f"{plan.model}, {parameters / 1e9:.2f} B parameters, {plan.dtype}"),
        ("batch", f"{plan.micro_batch} x {plan.sequence} tokens" + (", each rank" if several else "")),
        ("device", f"{plan.ranks} x {plan.device}" if several else plan.device),
        ("budgets", budgets),
        ("numerics", plan.numerics),
    ]


def _result_rows(plan: Plan) -> list[Row]:
    parts = {
        "torch": plan.torch_nbytes,
        "weights that stay": plan.pinned_nbytes,
        "state that stays": plan.resident_nbytes,
        "weights that come and go": plan.slab_nbytes,
        "gradients leaving": plan.ring_nbytes,
        "state streaming": plan.stream_nbytes,
        "panels": plan.panel_nbytes,
    }
    shares = ", ".join(f"{format_size(nbytes)} {name}" for name, nbytes in parts.items() if nbytes)
    spares = f", {plan.spare_slabs} spare slabs of it" if plan.spare_slabs else ""
    rows = [
        ("iteration", f"{format_seconds(plan.seconds)} predicted"),
        (
            "device",
            f"{format_size(plan.device_peak_nbytes)} at the most of {format_size(plan.device_memory)}: {shares}",
        ),
        ("host", f"{format_size(plan.host_nbytes)} registered{spares}"),
    ]
    rows += [
        ("instead", f"{name}: {format_seconds(seconds)} ({seconds / plan.seconds - 1:+.1%})")
        for name, seconds in plan.arms.items()
    ]
    return rows + [("note", note) for note in plan.notes]


def _alike(
    layers: Sequence[LayerPlan], following: Mapping[str, NextBest]
) -> Iterator[tuple[list[LayerPlan], NextBest | None]]:
    """Neighbours that differ in their names alone, together."""

    def key(layer: LayerPlan) -> object:
        times = tuple(
            f"{value:.3g}" for value in (layer.forward_seconds, layer.backward_seconds, layer.load_seconds)
        )
        return layer.kind, layer.weight_nbytes, layer.modes, layer.recompute, layer.resident_nbytes, times

    for _, members in groupby(layers, key):
        group = list(members)
        yield group, following.get(group[0].name)


def _cells(group: list[LayerPlan], other: NextBest | None) -> tuple[str, ...]:
    layer = group[0]
    name = layer.name if len(group) == 1 else f"{layer.name} to {group[-1].name}"
    state = layer.state.value if layer.state_nbytes else "-"
    next_best = "-" if other is None else f"{other.mode.value} {_longer(other.seconds)}"
    return (
        name,
        layer.weight.value + ("" if not layer.recompute else ", recomputed"),
        layer.gradient.value if layer.gradient_nbytes else "-",
        state,
        format_size(layer.weight_nbytes),
        format_size(layer.device_nbytes),
        format_seconds(layer.forward_seconds),
        format_seconds(layer.backward_seconds),
        format_seconds(layer.load_seconds) if layer.load_seconds else "-",
        format_seconds(max(each.update_seconds for each in group)),
        next_best,
        layer.source.value,
    )


def _longer(seconds: float) -> str:
    if abs(seconds) < _NOTHING:
        return "+0"
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"
