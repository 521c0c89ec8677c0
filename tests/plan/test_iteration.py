"""Iterations as they are simulated: memory as predicted, causes before effects, and what makes them longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_rt.plan import (
    H200,
    Dimensions,
    GradientMode,
    Machine,
    PlanOptions,
    StateMode,
    WeightMode,
    Workload,
)
from memferry_rt.plan.choice import NEEDS_SLAB, Choice, LayerChoice, share_device, torch_live_nbytes
from memferry_rt.plan.cost import costs
from memferry_rt.plan.evaluate import Evaluator, Run
from memferry_rt.plan.iteration import build_iteration
from memferry_rt.plan.planner import plan_as_offload
from memferry_rt.plan.rates import Flow
from memferry_rt.plan.setting import Setting

from .machines import GIB, LLAMA_1B, LLAMA_3B, MIB, TINY, chain, decoder

RESIDENT = WeightMode.RESIDENT
LINKS_ONLY = replace(H200, both_ways=1.0, host_memory=1e15, cpu_update=1e15)


def setting(workload: Workload, machine: Machine = H200, *, early: bool = False) -> Setting:
    return Setting(workload, costs(workload, machine, exact=False), machine, early)


def uniform(workload: Workload, mode: WeightMode = WeightMode.STREAM, spares: int = 0) -> Choice:
    return Choice(tuple(LayerChoice(mode, recompute=bool(layer.recompute)) for layer in workload.layers), spares)


def run(workload: Workload, choice: Choice, nbytes: int, machine: Machine = H200) -> Run:
    return Evaluator(setting(workload, machine), nbytes).run(choice, record=True)


@st.composite
def choices(draw: st.DrawFn, workload: Workload) -> Choice:
    """Any modes that layers can have together."""
    found = []
    for cost, layer in zip(costs(workload, H200, exact=False), workload.layers, strict=True):
        weight = draw(st.sampled_from(cost.weight_modes()))
        states = [StateMode.CPU, StateMode.STREAMED]
        states += [StateMode.RESIDENT] * (weight is WeightMode.RESIDENT)
        found.append(
            LayerChoice(
                weight,
                draw(st.sampled_from(cost.gradient_modes(weight))),
                draw(st.sampled_from(states)),
                draw(st.booleans()) if layer.recompute is None else layer.recompute,
            )
        )
    return Choice(tuple(found), draw(st.integers(0, 3)))


WORKLOADS = [
    decoder(recompute=None),
    decoder(replace(TINY, vocabulary=64), micro_batch=16),  # whose blocks need more than its loss
    decoder(replace(LLAMA_1B, layers=3, tied=True)),
    chain([512] * 6, [1e9] * 6),
]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(WORKLOADS), st.floats(0, 1))
def test_memory_is_never_more_than_its_shares(data: st.DataObject, workload: Workload, room: float) -> None:
    choice = data.draw(choices(workload) | st.just(uniform(workload)) | st.just(uniform(workload, RESIDENT)))
    much = share_device(workload, choice, 32 * GIB)
    weights = sum(layer.weight_nbytes for layer in workload.layers)
    budget = 32 * GIB - much.slabs + much.least + int(room * weights)
    shares = share_device(workload, choice, budget)
    if not shares.fits:
        return
    taken = run(workload, choice, budget)
    comes = any(layer.weight in NEEDS_SLAB for layer in choice.layers)
    most = shares.fixed + (shares.slabs if comes else 0) + torch_live_nbytes(workload, choice)
    assert taken.trace.peak_nbytes <= most <= budget
    assert taken.seconds > 0


@pytest.mark.parametrize("workload", WORKLOADS, ids=range(len(WORKLOADS)))
def test_memory_comes_and_goes_with_the_iteration(workload: Workload) -> None:
    """Where weights stay, each iteration has the same peak, and leaves nothing behind."""
    choice = uniform(workload, RESIDENT)
    taken = run(workload, choice, 32 * GIB)
    fixed = share_device(workload, choice, 32 * GIB).fixed
    within = [nbytes for time, nbytes in taken.trace.memory if time > taken.begin]
    assert max(within) == fixed + torch_live_nbytes(workload, choice)
    assert within[-1] == fixed


def test_gradients_wait_for_room_in_the_ring() -> None:
    workload = chain([1024] * 8, [1e8] * 8)
    taken = run(workload, uniform(workload), GIB, replace(H200, from_device=1e9))
    ring = share_device(workload, uniform(workload), GIB).ring
    graph, trace = taken.iteration.graph, taken.trace
    leaving: dict[str, int] = {}  # the last task that takes each gradient home
    for task, label in enumerate(graph.labels):
        if label.startswith("G ") and trace.ends[task] > taken.begin:
            leaving[label[2:]] = task
    for layer in range(7):
        kernel = taken.iteration.backward[layer]
        made = [f"layer.{number}" for number in range(layer + 1, 8)]
        there = [name for name in made if trace.ends[leaving[name]] > trace.starts[kernel]]
        assert sum(workload.layers[workload.index[name]].gradient_nbytes for name in there) <= ring


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(WORKLOADS))
def test_every_layer_is_updated_after_its_gradient_and_before_it_is_used(
    data: st.DataObject, workload: Workload
) -> None:
    taken = run(workload, data.draw(choices(workload)), 64 * GIB)
    iteration, trace = taken.iteration, taken.trace
    for layer, spec in enumerate(workload.layers):
        if spec.parameters:
            update = iteration.update[layer]
            assert trace.ends[update] <= trace.starts[iteration.forward[layer]]
        if layer in iteration.load:
            assert trace.ends[iteration.load[layer]] <= trace.starts[iteration.forward[layer]]
        assert trace.ends[iteration.forward[layer]] <= trace.starts[iteration.backward[layer]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from((256, 512, 1024)), min_size=2, max_size=6),
    st.floats(1, 4),
    st.sampled_from(("to_device", "from_device")),
)
def test_more_bandwidth_never_makes_streaming_slower(sizes: list[int], faster: float, link: str) -> None:
    """Where directions do not slow each other: else an early copy may delay one that is waited for."""
    workload = chain(sizes, [float(width) ** 2 * 1000 for width in sizes])
    choice, budget = uniform(workload), 64 * MIB
    shares = share_device(workload, choice, budget)
    budget += max(0, shares.least - shares.slabs)
    wider = replace(LINKS_ONLY, **{link: getattr(LINKS_ONLY, link) * faster})
    before = run(workload, choice, budget, LINKS_ONLY).seconds
    assert run(workload, choice, budget, wider).seconds <= before * (1 + 1e-9)


@pytest.mark.parametrize("name", ["to_device", "from_device", "host_memory", "cpu_update", "both_ways"])
def test_a_better_machine_makes_a_real_model_hardly_slower(name: str) -> None:
    workload = decoder(LLAMA_1B, 8, 1024)
    better = replace(
        H200, **{name: min(1.0, 1.05 * H200.both_ways) if name == "both_ways" else 2 * getattr(H200, name)}
    )
    before = run(workload, uniform(workload), 6 * GIB).seconds
    # A faster link takes more of host memory from the CPU, whose update may then be what is waited for.
    assert run(workload, uniform(workload), 6 * GIB, better).seconds <= before * 1.01


def test_weights_that_stay_are_loaded_once_and_those_that_are_streamed_twice() -> None:
    workload = chain([1024] * 6, [1e9] * 6)

    def loaded(choice: Choice, budget: int) -> float:
        taken = run(workload, choice, budget)
        graph, trace = taken.iteration.graph, taken.trace
        return sum(
            amount
            for task, flows in enumerate(graph.flows)
            for kind, amount in flows
            if kind is Flow.COPY_IN and trace.ends[task] > taken.begin
        )

    nbytes = workload.layers[0].weight_nbytes
    assert loaded(uniform(workload, WeightMode.RESIDENT), GIB) == 6 * nbytes
    streamed = uniform(workload)
    budget = share_device(workload, streamed, 0).torch + 8 * MIB
    assert share_device(workload, streamed, budget).slabs // nbytes == 3
    assert loaded(streamed, budget) == (6 + 3) * nbytes, "three stay at the turn to backward"


def test_state_on_the_device_moves_nothing() -> None:
    workload = chain([512] * 3, [1e9] * 3)
    layer = LayerChoice(WeightMode.RESIDENT, state=StateMode.RESIDENT)
    taken = run(workload, Choice((layer,) * 3), GIB)
    assert taken.trace.amounts[Flow.COPY_IN] == taken.trace.amounts[Flow.COPY_OUT] == 0
    assert taken.trace.amounts[Flow.CPU] == 0


def test_a_gradient_in_place_crosses_the_link_in_its_kernel() -> None:
    workload = chain([512] * 3, [1e9] * 3)
    layer = LayerChoice(gradient=GradientMode.INPLACE)
    taken = run(workload, Choice((layer,) * 3), GIB)
    assert taken.trace.amounts[Flow.WRITE] == 2 * sum(spec.gradient_nbytes for spec in workload.layers)
    assert taken.trace.amounts[Flow.COPY_OUT] == 0


def test_spare_slabs_shorten_the_iteration_and_cost_no_device_memory() -> None:
    workload = decoder(LLAMA_1B, 8, 1024)
    without = Evaluator(setting(workload, early=True), 24 * GIB)(uniform(workload))
    early = Evaluator(setting(workload, early=True), 24 * GIB)(uniform(workload, spares=10))
    assert without is not None
    assert early is not None
    assert early.seconds < 0.95 * without.seconds
    assert early.shares == without.shares


def test_waiting_for_all_updates_takes_longer_than_beginning_with_the_first() -> None:
    workload = decoder(LLAMA_1B, 8, 1024)
    beside = Evaluator(setting(workload), 24 * GIB)(uniform(workload))
    behind = Evaluator(replace(setting(workload), overlap=False), 24 * GIB)(uniform(workload))
    assert beside is not None
    assert behind is not None
    assert behind.seconds > 1.05 * beside.seconds


def test_what_does_not_fit_has_no_iteration() -> None:
    workload = decoder()
    shares = share_device(workload, uniform(workload), MIB)
    assert not shares.fits
    with pytest.raises(ValueError, match="does not fit"):
        build_iteration(setting(workload), uniform(workload), shares)


@pytest.mark.parametrize(
    ("size", "memory", "measured"),
    [(LLAMA_1B, 6, 0.402), (LLAMA_1B, 24, 0.226), (LLAMA_3B, 11.5, 1.082)],
)
def test_what_was_measured_is_predicted_about_as_it_was(size: Dimensions, memory: float, measured: float) -> None:
    """8 x 1024 tokens on an H200 (docs/performance.md), by formulas: before streamed weights stayed there."""
    options = PlanOptions(int(memory * GIB))
    assert plan_as_offload(decoder(size, 8, 1024), options).plan.seconds == pytest.approx(measured, rel=0.12)
