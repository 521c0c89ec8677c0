"""Several ranks in the simulator and the planner: what each moves, what they share, what they cannot do."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_rt.errors import PlanError
from memferry_rt.plan import (
    H200,
    GradientMode,
    Machine,
    PlanOptions,
    StateMode,
    WeightMode,
    Workload,
    machine_from_topology,
    make_plan,
)
from memferry_rt.plan.choice import NEEDS_SLAB, Choice, LayerChoice, share_device, torch_live_nbytes
from memferry_rt.plan.cost import costs
from memferry_rt.plan.evaluate import Evaluator, Run
from memferry_rt.plan.exchange import with_exchange
from memferry_rt.plan.iteration import build_iteration
from memferry_rt.plan.planner import plan_as_offload, plan_by_hand
from memferry_rt.plan.rates import Flow
from memferry_rt.plan.setting import Setting
from memferry_transport.topology import machine

from .machines import GIB, LLAMA_1B, chain, decoder
from .whole_host import run_host

COUNTS = (2, 3, 4, 8)
WORKLOADS = (decoder(), decoder(replace(LLAMA_1B, layers=3, tied=True)), chain([512, 1024] * 3, [1e9] * 6))


def group(count: int) -> Machine:
    return replace(H200, ranks=count)


def prepare(workload: Workload, machine: Machine, *, gathered: bool = False) -> Setting:
    workload = with_exchange(workload, machine.ranks)
    return Setting(workload, costs(workload, machine, exact=False), machine, gathered=gathered)


def run(workload: Workload, choice: Choice, machine: Machine, *, gathered: bool = False) -> Run:
    return Evaluator(prepare(workload, machine, gathered=gathered), 32 * GIB).run(choice, record=True)


@st.composite
def choices(draw: st.DrawFn, workload: Workload) -> Choice:
    """Any modes that the layers of ranks can have together."""
    found = []
    for cost, layer in zip(costs(workload, H200, exact=False), workload.layers, strict=True):
        weight = draw(st.sampled_from(cost.weight_modes()))
        gradient = draw(st.sampled_from(cost.gradient_modes(weight)))
        state = draw(st.sampled_from((StateMode.CPU, StateMode.STREAMED)))
        found.append(LayerChoice(weight, gradient, state, bool(layer.recompute)))
    return Choice(tuple(found))


def moved(run: Run, queue: str, kind: Flow, label: str) -> float:
    """Bytes of the tasks that have a label, in both backwards or in the one forward."""
    graph = run.iteration.graph
    return sum(
        amount
        for task, flows in enumerate(graph.flows)
        for flow, amount in flows
        if flow is kind and graph.queues[task] == queue and graph.labels[task] == label
    )


# -- what each rank moves -----------------------------------------------------------------------------------
@settings(max_examples=12)
@given(st.data(), st.sampled_from(WORKLOADS), st.sampled_from(COUNTS), st.booleans())
def test_all_ranks_together_move_every_byte_once(
    data: st.DataObject, workload: Workload, count: int, gathered: bool
) -> None:
    choice = data.draw(choices(workload))
    taken = run(workload, choice, group(count), gathered=gathered)
    for number, (spec, each) in enumerate(zip(workload.layers, choice.layers, strict=True)):
        home = count * moved(taken, "out", Flow.COPY_OUT, f"G {spec.name}")
        home += count * moved(taken, "compute", Flow.WRITE, f"S {spec.name}")
        assert home == pytest.approx(2 * spec.gradient_nbytes), "the mean goes home once, in each of two backwards"
        to_others = moved(taken, "peers", Flow.PEER, f"X {spec.name}")
        assert to_others == pytest.approx(2 * spec.gradient_nbytes * (count - 1) / count)
        loads = [t for t, label in enumerate(taken.iteration.graph.labels) if label == f"L {spec.name}"]
        own = moved(taken, "in", Flow.COPY_IN, f"L {spec.name}")
        others = moved(taken, "in", Flow.PEER, f"L {spec.name}")
        assert others == pytest.approx(own * (count - 1) if gathered else 0.0)
        if spec.parameters:
            if each.weight is WeightMode.RESIDENT and 2 in _passes_with(taken, number):
                assert own + others == pytest.approx(len(loads) * spec.weight_nbytes)
            if each.weight in (WeightMode.RESIDENT, WeightMode.STREAM):
                assert own + others >= spec.weight_nbytes, "new weights reach every rank"


def _passes_with(run: Run, layer: int) -> set[int]:
    return {2} if layer in run.iteration.load else set()


@settings(max_examples=12)
@given(st.data(), st.sampled_from(WORKLOADS), st.sampled_from(COUNTS))
def test_state_is_updated_in_parts_that_add_up(data: st.DataObject, workload: Workload, count: int) -> None:
    choice = data.draw(choices(workload))
    one = replace(H200, ranks=1)
    shared, alone = run(workload, choice, group(count)), run(workload, choice, one)
    for kind, queue in ((Flow.CPU, "cpu"), (Flow.COPY_IN, "state")):
        for spec in workload.layers:
            part = moved(shared, queue, kind, f"U {spec.name}")
            assert count * part == pytest.approx(moved(alone, queue, kind, f"U {spec.name}"))


@settings(max_examples=12)
@given(st.data(), st.sampled_from(WORKLOADS), st.sampled_from(COUNTS))
def test_memory_of_a_rank_is_never_more_than_its_shares(
    data: st.DataObject, workload: Workload, count: int
) -> None:
    choice = data.draw(choices(workload))
    workload = with_exchange(workload, count)
    shares = share_device(workload, choice, 32 * GIB)
    taken = run(workload, choice, group(count))
    comes = any(layer.weight in NEEDS_SLAB for layer in choice.layers)
    most = shares.fixed + (shares.slabs if comes else 0) + torch_live_nbytes(workload, choice)
    assert taken.trace.peak_nbytes <= most
    assert torch_live_nbytes(workload, choice) >= torch_live_nbytes(replace(workload, exchange_nbytes=0), choice)


# -- what they share ----------------------------------------------------------------------------------------
@settings(max_examples=12)
@given(st.data(), st.sampled_from((2, 3)), st.booleans())
def test_one_rank_stands_for_all(data: st.DataObject, count: int, gathered: bool) -> None:
    """Every rank simulated, with links of its own and one host, ends when the one that is simulated does."""
    workload = chain([1024, 512, 2048], [1e9, 1e8, 1e10])
    machine = replace(group(count), host_memory=data.draw(st.sampled_from((157e9, 60e9))))
    choice = data.draw(choices(workload))
    setting = prepare(workload, machine, gathered=gathered)
    graph = build_iteration(setting, choice, share_device(setting.workload, choice, GIB)).graph
    ends = Evaluator(setting, GIB).run(choice).trace.ends
    host = run_host(graph, machine)
    for rank in host.ends:
        assert rank == pytest.approx(ends)
    assert host.most_host_memory <= machine.host_memory * (1 + 1e-9)
    assert host.most_cpu <= machine.cpu_update * (1 + 1e-9)
    assert host.most_link <= machine.to_device * (1 + 1e-9)


@settings(max_examples=12)
@given(st.data(), st.sampled_from(WORKLOADS), st.sampled_from(COUNTS))
def test_nothing_carries_more_than_it_can(data: st.DataObject, workload: Workload, count: int) -> None:
    machine = group(count)
    taken = run(workload, data.draw(choices(workload)), machine)
    for segment in taken.trace.segments:
        for resource in taken.rates.resources:
            used = sum(use * segment.counts[f] * segment.rates[f] for f, use in resource.use.items())
            assert used <= resource.capacity * (1 + 1e-9)
    shared = {resource.name: resource.capacity for resource in taken.rates.resources}
    assert count * shared["DRAM"] == pytest.approx(machine.host_memory)
    assert count * shared["CPU"] == pytest.approx(machine.cpu_update)


@settings(max_examples=10)
@given(st.data(), st.sampled_from(WORKLOADS), st.sampled_from(COUNTS), st.booleans())
def test_a_faster_interconnect_never_hurts(
    data: st.DataObject, workload: Workload, count: int, gathered: bool
) -> None:
    """Where host memory and directions do not slow each other: then nothing that ends earlier costs anything."""
    slow = replace(group(count), peers=20e9, both_ways=1.0, host_memory=1e15)
    choice = data.draw(choices(workload))
    times = [
        run(workload, choice, replace(slow, peers=slow.peers * factor), gathered=gathered).seconds
        for factor in (1, 2, 8)
    ]
    assert times[0] >= times[1] * (1 - 1e-6)
    assert times[1] >= times[2] * (1 - 1e-6)


def test_with_all_of_the_host_for_each_a_rank_is_not_faster_than_one_alone() -> None:
    """What is shared decides: on the same host more ranks take longer; on a larger one they need not."""
    workload, options = decoder(LLAMA_1B, 8, 1024), PlanOptions(8 * GIB)
    times = [plan_as_offload(workload, options, group(count)).plan.seconds for count in (2, 4, 8)]
    assert times == sorted(times)
    richer = replace(group(8), host_memory=8 * H200.host_memory, cpu_update=8 * H200.cpu_update)
    assert plan_as_offload(workload, options, richer).plan.seconds < times[0]


def test_gathering_spares_host_memory_and_links() -> None:
    workload, machine = decoder(LLAMA_1B, 8, 1024), group(8)
    whole, gathered = (
        plan_as_offload(workload, PlanOptions(8 * GIB, loads=loads), machine) for loads in ("whole", "gathered")
    )
    assert gathered.plan.seconds < whole.plan.seconds
    amounts = [planned.run().trace.amounts for planned in (whole, gathered)]
    assert amounts[1][Flow.COPY_IN] < amounts[0][Flow.COPY_IN]
    assert amounts[1][Flow.PEER] > amounts[0][Flow.PEER]


# -- one rank -----------------------------------------------------------------------------------------------
@settings(max_examples=10)
@given(st.data(), st.sampled_from(WORKLOADS))
def test_of_one_rank_nothing_goes_to_others(data: st.DataObject, workload: Workload) -> None:
    choice = data.draw(choices(workload))
    taken = run(workload, choice, H200)
    assert taken.trace.amounts[Flow.PEER] == 0
    assert not any(label[0] in "XS" for label in taken.iteration.graph.labels)
    slow = replace(H200, peers=1.0, peer_latency=1.0)
    assert run(workload, choice, slow).seconds == taken.seconds


# -- plans --------------------------------------------------------------------------------------------------
def test_a_plan_for_ranks_says_so_and_keeps_state_at_home() -> None:
    workload = decoder(replace(LLAMA_1B, layers=4), 8, 1024)
    planned = make_plan(workload, PlanOptions(24 * GIB), group(4))
    assert planned.plan.ranks == 4
    assert planned.plan.spare_slabs == 0
    assert all(layer.state is not StateMode.RESIDENT for layer in planned.plan.layers)
    assert any(
        layer.state is StateMode.RESIDENT for layer in make_plan(workload, PlanOptions(24 * GIB)).plan.layers
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modes": "embedding=resident+state:resident"}, "the state of embedding cannot be resident"),
        ({"early": True}, "early: 4 ranks make no updates during backward"),
        ({"spares": 2}, "spares: 4 ranks"),
        ({"loads": "half"}, "loads: 'half' is neither"),
    ],
)
def test_what_ranks_cannot_do_is_refused(options: dict[str, object], words: str) -> None:
    for plan in (make_plan, plan_by_hand, plan_as_offload):
        with pytest.raises(PlanError, match=words):
            plan(decoder(), PlanOptions(GIB, **options), group(4))  # type: ignore[arg-type]


def test_one_rank_gathers_nothing() -> None:
    with pytest.raises(PlanError, match="'gathered' is for several ranks"):
        make_plan(decoder(), PlanOptions(GIB, loads="gathered"))


@pytest.mark.slow
def test_planning_for_ranks_takes_no_longer_than_for_one() -> None:
    """100 layers in 2 s of one core (docs/scheduler.md); 6 s, so that a busy machine does not fail it."""
    workload = decoder(replace(LLAMA_1B, layers=98), 8, 1024)
    begun = time.process_time()
    make_plan(workload, PlanOptions(12 * GIB), group(8))
    assert time.process_time() - begun < 6


# -- topologies ---------------------------------------------------------------------------------------------
def test_ranks_share_the_uplink_of_a_switch() -> None:
    topology = machine("a100-x8")
    one, two, eight = (machine_from_topology(topology, ranks=count) for count in (1, 2, 8))
    assert two.to_device == pytest.approx(one.to_device / 2)
    assert eight.to_device == two.to_device, "two under each switch"
    assert machine_from_topology(machine("hgx-h200-x8"), ranks=8).to_device == H200.to_device


def test_ranks_exchange_over_the_host_where_they_have_no_links() -> None:
    pair = machine_from_topology(machine("consumer-x2"), ranks=2)
    assert pair.peers_over_host
    workload = decoder()
    choice = Choice(tuple(LayerChoice(recompute=bool(layer.recompute)) for layer in workload.layers))
    own = replace(pair, peers_over_host=False)
    assert run(workload, choice, pair).seconds > run(workload, choice, own).seconds


def test_gradients_in_place_are_written_behind_the_exchange() -> None:
    workload = decoder()
    choice = Choice(
        tuple(
            LayerChoice(
                gradient=GradientMode.INPLACE if layer.parameters else GradientMode.BUFFER,
                recompute=bool(layer.recompute),
            )
            for layer in workload.layers
        )
    )
    taken = run(workload, choice, group(2))
    graph, trace = taken.iteration.graph, taken.trace
    for task, label in enumerate(graph.labels):
        if label.startswith("B "):
            assert not any(kind is Flow.WRITE for kind, _ in graph.flows[task])
        if label.startswith("S "):
            sent = max(t for t in graph.after[task] if graph.labels[t] == f"X {label[2:]}")
            assert trace.starts[task] >= trace.ends[sent]
