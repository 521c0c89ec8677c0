"""Plans of the planner for several ranks: followed by all of them, and refused by all for another number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import memferry_rt
from memferry_allocator import MemFerryError
from memferry_rt.adapters.torch.cut import cut_layers
from memferry_rt.plan import (
    H200,
    LayerKind,
    Plan,
    PlanOptions,
    StateMode,
    Workload,
    make_layer,
    make_plan,
)

from . import world
from .programs import Job, Result, alone, build, offloaded, train

JOB = Job(max_grad_norm=None)
TORCH = 80 << 20  # more than the planner leaves torch for so little a model
KINDS = {"embedding": LayerKind.EMBEDDING, "head": LayerKind.HEAD}


def workload_of(model: nn.Module, dtype: str = "float32") -> Workload:
    """A small decoder as the planner sees it."""
    layers = [
        make_layer(
            cut.name,
            KINDS.get(cut.name, LayerKind.BLOCK if cut.name.startswith("blocks") else LayerKind.OTHER),
            [tuple(parameter.shape) for _, parameter in cut.parameters],
            dtype,
            flops=1e6,
            traffic_nbytes=1e6,
            kernels=3,
        )
        for cut in cut_layers(model)
    ]
    first = [layer for layer in layers if layer.name == "embedding" or layer.name.startswith("blocks")]
    return Workload("small", (*first, *(layer for layer in layers if layer not in first)), dtype, 3, 12, 0)


def _plan(ranks: int, **options: Any) -> Plan:
    model, _ = build(JOB)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    kinds = frozenset({LayerKind.EMBEDDING, LayerKind.LINEAR, LayerKind.BLOCK, LayerKind.HEAD})
    asked = PlanOptions(TORCH + int(0.8 * weights), host_kinds=kinds, evaluations=20, **options)
    return make_plan(workload_of(model), asked, replace(H200, ranks=ranks)).plan


def _with(plan: Any) -> Job:
    return replace(JOB, options={"plan": plan})


def _train_all(group: Any, plans: list[Plan]) -> list[Result]:
    return [train(group, _with(plan)) for plan in plans]


def test_plans_for_ranks_are_followed_with_the_same_bits() -> None:
    """Those that the planner makes, one of them with state that streams through the device."""
    plans = [_plan(2), _plan(2, modes="blocks.*=stream+streamed, embedding=dha+inplace, head=resident")]
    expected = alone(JOB, 2)
    for results in world.succeed(2, _train_all, plans):
        for result in results:
            for name, value in expected.parameters.items():
                assert value.equal(result.parameters[name]), name
        assert results[1].streamed > 0


def _refusals(group: Any, plans: list[list[Plan]]) -> list[str]:
    found = []
    for each in plans:
        try:
            offloaded(group, _with(each[dist.get_rank(group)]))
            found.append("not refused")
        except MemFerryError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_plan_for_another_number_is_refused_by_all_alike() -> None:
    one, two, three = (_plan(ranks) for ranks in (1, 2, 3))
    at_home = replace(two, layers=tuple(_resident(layer) for layer in two.layers))
    both = world.succeed(2, _refusals, [[one, one], [three, three], [two, three], [at_home, at_home]])
    for (first, second), words in zip(
        zip(*both, strict=True),
        (
            "PlanError: the plan is for one rank, and here a group of 2 ranks trains; make one with --ranks 2",
            "PlanError: the plan is for a group of 3 ranks, and here a group of 2 ranks trains",
            "RankError: rank 1 refuses, and so do all: PlanError: the plan is for a group of 3 ranks",
            "UnsupportedError: plan: the state of layer",
        ),
        strict=True,
    ):
        assert words in first
        assert second.removeprefix("RankError: rank 1 refuses, and so do all: ") in first


def _resident(layer: Any) -> Any:
    return replace(layer, weight=memferry_rt.plan.WeightMode.RESIDENT, state=StateMode.RESIDENT)


def test_a_plan_for_ranks_is_refused_by_one_alone() -> None:
    model, optimizer = build(JOB)
    with pytest.raises(memferry_rt.PlanError, match="for a group of 2 ranks, and here one rank trains"):
        memferry_rt.offload(model, optimizer, device="emulated", device_memory="1MiB", plan=_plan(2))


def _automatic(group: Any) -> tuple[str, ...]:
    model, _ = offloaded(group, _with("auto"))
    notes = memferry_rt.runtime_of(model).report().plan_notes
    memferry_rt.restore(model)
    return notes


def test_ranks_do_not_plan_by_themselves() -> None:
    first, second = world.succeed(2, _automatic)
    assert first == second
    assert any("ranks" in note and "default" in note for note in first)
