"""Idle devices that relay, in the simulator: by the transport's cost model, and no more than helps."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_rt.plan import H200, Machine, PlanOptions, machine_from_topology, make_plan
from memferry_rt.plan.copies import SMALLEST, add_copy
from memferry_rt.plan.evaluate import Evaluator, fewer_relays
from memferry_rt.plan.planner import plan_by_hand
from memferry_rt.plan.rates import Flow, Rates
from memferry_rt.plan.simulate import Graph, Trace, simulate
from memferry_transport.cost import LinearCost
from memferry_transport.topology import machine

from .machines import GIB, LLAMA_1B, MIB, decoder
from .test_ranks import WORKLOADS, choices, prepare

RELAY = LinearCost(31e-6, 55.4e9)
relays = st.lists(st.builds(LinearCost, st.floats(1e-6, 1e-3), st.floats(5e9, 60e9)), max_size=3).map(tuple)


def helped(*costs: LinearCost, like: Machine = H200) -> Machine:
    return replace(like, relays_to_device=costs, relays_from_device=costs)


def copied(machine: Machine, nbytes: int, queue: str = "in") -> tuple[Graph, Trace]:
    graph = Graph()
    add_copy(graph, machine, queue, "L x", nbytes, after=[])
    return graph, simulate(graph, Rates(machine))


def test_the_published_copies_are_met_where_costs_were_fitted_to_them() -> None:
    """16 MiB, direct and over both ways (docs/multi-gpu.md): a calibration, and no validation."""
    node = machine_from_topology(machine("cloudmatrix384-node"), ranks=4, helpers=True)
    for found, rate in ((node.with_relays(0, 0), 53e9), (node, 86e9)):
        assert 16 * MIB / max(copied(found, 16 * MIB)[1].ends) == pytest.approx(rate, rel=0.02)


@given(st.integers(1, 1 << 30), st.sampled_from(("in", "out")), relays)
def test_every_byte_is_carried_once(nbytes: int, queue: str, costs: tuple[LinearCost, ...]) -> None:
    _, trace = copied(helped(*costs), nbytes, queue)
    own, other = (Flow.COPY_IN, Flow.RELAY_IN) if queue == "in" else (Flow.COPY_OUT, Flow.RELAY_OUT)
    assert trace.amounts[own] + trace.amounts[other] == pytest.approx(nbytes)
    if not costs or nbytes < SMALLEST:
        assert trace.amounts[own] == nbytes
    assert max(trace.ends) <= max(copied(H200, nbytes, queue)[1].ends) * (1 + 1e-9)


def test_a_large_copy_takes_all_ways() -> None:
    alone, one, two = (max(copied(helped(*[RELAY] * n), GIB)[1].ends) for n in (0, 1, 2))
    assert alone / one == pytest.approx(2.0, rel=0.02)
    assert one / two < 1.5, "host memory has 157 GB/s, and three ways 166"


@settings(max_examples=8)
@given(st.data(), st.sampled_from(WORKLOADS), st.sampled_from((1, 2, 4)), relays, st.sampled_from((40e9, 157e9)))
def test_one_more_never_hurts(
    data: st.DataObject, workload: object, count: int, costs: tuple[LinearCost, ...], memory: float
) -> None:
    choice = data.draw(choices(workload))  # type: ignore[arg-type]
    like = replace(H200, ranks=count, host_memory=memory)
    times = [
        Evaluator(prepare(workload, helped(*costs[:number], like=like)), 32 * GIB).run(choice).seconds  # type: ignore[arg-type]
        for number in range(len(costs) + 1)
    ]
    assert all(more <= fewer for fewer, more in itertools.pairwise(times))


def test_where_host_memory_is_scarce_relays_hurt_and_withdraw() -> None:
    """Loads three times as fast take from the CPU's update what it needs: the adaptive arm sees it."""
    workload, busy = decoder(LLAMA_1B, 8, 1024), helped(RELAY, RELAY)
    planned = plan_by_hand(workload, PlanOptions(6 * GIB), busy)
    choice, setting = planned.outcome.choice, planned.setting
    always = Evaluator(setting, 6 * GIB, adaptive=False).run(choice).seconds
    never = Evaluator(replace(setting, machine=busy.with_relays(0, 0)), 6 * GIB).run(choice).seconds
    assert always > never
    assert planned.plan.seconds < never
    found = planned.evaluator.machine_of(choice)
    assert (found.relays_to_device, len(found.relays_from_device)) == ((), 2), "gradients' way home gains"


def test_a_plan_with_helpers_is_no_worse_than_the_one_without() -> None:
    workload, options = decoder(replace(LLAMA_1B, layers=6), 1, 1024), PlanOptions(2 * GIB)
    alone, planned = make_plan(workload, options), make_plan(workload, options, helped(RELAY))
    assert planned.plan.seconds <= alone.plan.seconds
    assert planned.plan.arms["without devices that relay"] == alone.plan.seconds
    assert any("idle devices that relay" in note for note in planned.plan.notes)


def test_relays_and_the_exchange_share_the_interconnect() -> None:
    ranks = helped(RELAY, like=replace(H200, ranks=2, peers=60e9))
    counts = tuple(int(flow in (Flow.PEER, Flow.RELAY_IN)) for flow in Flow)
    rates = Rates(ranks).of(counts)
    assert rates[Flow.PEER] + rates[Flow.RELAY_IN] == pytest.approx(60e9)


def test_fewer_relays_are_all_that_one_less_has() -> None:
    many, few = (
        {(m.relays_to_device, m.relays_from_device) for m in fewer_relays(helped(*[RELAY] * n))} for n in (3, 2)
    )
    assert few < many
    assert ((), ()) in few
    assert [m.relays_to_device for m in fewer_relays(H200)] == [()]
