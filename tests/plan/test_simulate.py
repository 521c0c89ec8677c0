"""The simulator: bytes are conserved, no link carries more than it can, nothing starts before its causes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_rt.errors import PlanError
from memferry_rt.plan import H200, Machine
from memferry_rt.plan.rates import FLOWS, Flow, Rates
from memferry_rt.plan.simulate import Graph, Trace, simulate

QUEUES = ("compute", "in", "out", "cpu")
amounts = st.dictionaries(st.sampled_from(Flow), st.integers(1, 1000), max_size=3)


def unit(flow: Flow) -> float:
    return 1e-6 if flow is Flow.TIME else 1e6


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    graph = Graph()
    for task in range(draw(st.integers(1, 12))):
        graph.add(
            draw(st.sampled_from(QUEUES)),
            f"{task}",
            [(flow, amount * unit(flow)) for flow, amount in draw(amounts).items()],
            after=draw(st.lists(st.integers(0, task - 1), max_size=3)) if task else [],
            latency=draw(st.sampled_from((0.0, 1e-5))),
            takes=draw(st.integers(0, 5)),
            gives=draw(st.integers(0, 5)),
        )
    return graph


def run(graph: Graph, machine: Machine = H200) -> Trace:
    return simulate(graph, Rates(machine), record=True)


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_bytes_are_conserved(graph: Graph) -> None:
    trace = run(graph)
    for flow in Flow:
        asked = sum(amount for flows in graph.flows for kind, amount in flows if kind is flow)
        asked += sum(graph.latencies) if flow is Flow.TIME else 0
        assert trace.amounts[flow] == pytest.approx(asked)


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_no_resource_carries_more_than_it_can(graph: Graph) -> None:
    rates = Rates(H200)
    for segment in simulate(graph, rates, record=True).segments:
        for resource in rates.resources:
            used = sum(use * segment.counts[f] * segment.rates[f] for f, use in resource.use.items())
            assert used <= resource.capacity * (1 + 1e-9)
        assert all(rate > 0 for rate, count in zip(segment.rates, segment.counts, strict=True) if count)


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_nothing_starts_before_its_causes_and_queues_are_in_order(graph: Graph) -> None:
    trace = run(graph)
    last: dict[str, int] = {}
    for task, after in enumerate(graph.after):
        assert trace.ends[task] >= trace.starts[task] + graph.latencies[task] * (1 - 1e-9)
        assert all(trace.starts[task] >= trace.ends[before] for before in after)
        before = last.get(graph.queues[task])
        assert before is None or trace.starts[task] >= trace.ends[before]
        last[graph.queues[task]] = task


@settings(max_examples=200, deadline=None)
@given(graphs(), st.integers(0, 10))
def test_memory_is_what_tasks_take_and_give(graph: Graph, first: int) -> None:
    trace = simulate(graph, Rates(H200), nbytes=first, record=True)
    assert trace.peak_nbytes == max([first, *(nbytes for _, nbytes in trace.memory)])
    if trace.memory:
        assert trace.memory[-1][1] == first + sum(graph.takes) - sum(graph.gives)
        times = [time for time, _ in trace.memory]
        assert times == sorted(times)


@given(graphs())
def test_it_ends_no_earlier_than_the_busiest_queue_alone(graph: Graph) -> None:
    trace = run(graph)
    for queue in QUEUES:
        computing = sum(
            amount
            for task, flows in enumerate(graph.flows)
            for kind, amount in flows
            if kind is Flow.TIME and graph.queues[task] == queue
        )
        assert max(trace.ends) >= computing * (1 - 1e-9)


def test_recording_changes_nothing() -> None:
    graph = Graph()
    load = graph.add("in", "load", [(Flow.COPY_IN, 1e9)], latency=1e-3)
    graph.add("compute", "kernel", [(Flow.TIME, 1e-2), (Flow.READ, 1e8)], after=[load])
    loud, quiet = run(graph), simulate(graph, Rates(H200))
    assert loud.ends == quiet.ends
    assert not quiet.segments


def test_a_circle_is_found_out() -> None:
    graph = Graph()
    graph.add("in", "first", [], after=[1])
    graph.add("in", "second", [])
    with pytest.raises(PlanError, match=r"first waits for what comes after it"):
        run(graph)


def test_what_starts_at_the_end_of_another_counts_memory_after_it() -> None:
    graph = Graph()
    first = graph.add("in", "first", [(Flow.COPY_IN, 1e6)], takes=10, gives=10)
    graph.add("compute", "second", [(Flow.TIME, 1e-3)], after=[first], takes=10, gives=10)
    assert run(graph).peak_nbytes == 10


# -- rates ------------------------------------------------------------------------------------------------
def counts(**flows: int) -> tuple[int, ...]:
    return tuple(flows.get(flow.name, 0) for flow in Flow)


def test_alone_everything_has_its_own_rate() -> None:
    rates = Rates(H200)
    for flow, rate in (
        (Flow.TIME, 1.0),
        (Flow.COPY_IN, H200.to_device),
        (Flow.COPY_OUT, H200.from_device),
        (Flow.READ, H200.host_reads),
        (Flow.WRITE, H200.host_writes),
        (Flow.CPU, H200.cpu_update),
    ):
        assert rates.of(counts(**{flow.name: 1}))[flow] == pytest.approx(rate)


def test_a_copy_and_a_kernel_share_the_link_as_the_machine_says() -> None:
    machine = replace(H200, kernel_share=0.25)
    found = Rates(machine).of(counts(COPY_IN=1, READ=1))
    assert found[Flow.READ] == pytest.approx(0.25 * H200.to_device)
    assert found[Flow.COPY_IN] == pytest.approx(0.75 * H200.to_device)


def test_both_directions_at_once_have_the_duplex_share() -> None:
    found = Rates(H200).of(counts(COPY_IN=1, COPY_OUT=1))
    assert found[Flow.COPY_IN] == pytest.approx(H200.both_ways * H200.to_device)
    assert found[Flow.COPY_OUT] == pytest.approx(H200.both_ways * H200.from_device)


def test_host_memory_is_shared_in_proportion() -> None:
    """As measured: CPU and device updating together, 5.56e9 parameters a second, 44% of them by the device."""
    found = Rates(H200).of(counts(COPY_IN=1, COPY_OUT=1, CPU=1))
    cpu, device = found[Flow.CPU] / 28, min(found[Flow.COPY_IN], found[Flow.COPY_OUT]) / 14
    assert cpu + device == pytest.approx(5.56e9, rel=0.03)
    assert device / (cpu + device) == pytest.approx(0.44, abs=0.04)


@given(st.tuples(*[st.integers(0, 3)] * FLOWS))
def test_a_wider_link_slows_nothing_down_that_only_links_share(found: tuple[int, ...]) -> None:
    machine = replace(H200, host_memory=1e15)
    wider = replace(machine, to_device=2 * machine.to_device)
    slow, fast = Rates(machine).of(found), Rates(wider).of(found)
    for flow in (Flow.COPY_IN, Flow.READ, Flow.CPU, Flow.PEER, Flow.TIME):
        assert fast[flow] >= slow[flow] * (1 - 1e-9)


def test_ranks_have_their_share_of_host_memory() -> None:
    alone = Rates(H200).of(counts(CPU=1))[Flow.CPU]
    shared = Rates(replace(H200, ranks=4)).of(counts(CPU=1))[Flow.CPU]
    assert shared == pytest.approx(alone / 4)
