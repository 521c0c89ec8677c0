"""Copies in the simulator: over the device's own link alone, or shared out over it and those of idle devices."""

from __future__ import annotations

from collections.abc import Sequence

from memferry_transport.cost import LinearCost, water_fill
from memferry_transport.topology.ways import SLICE_BYTES

from .machine import Machine
from .rates import Flow
from .simulate import Graph

SMALLEST = 2 * SLICE_BYTES  # of a copy that is shared out


def add_copy(
    graph: Graph,
    machine: Machine,
    queue: str,
    label: str,
    nbytes: float,
    *,
    after: Sequence[int | None],
    takes: int = 0,
    gathered: float = 0.0,
) -> int:
    """A copy behind those on its queue; the task at whose end all of it is there.

    Each way gets what the transport's cost model gives it, whatever else is under way: see `Evaluator` for what
    adapts to that.

    Parameters
    ----------
    queue : {"in", "out"}
        To the device, or from it.
    nbytes : float
    gathered : float
        Bytes that come from other ranks meanwhile.
    """
    into = queue == "in"
    own_flow, relay_flow = (Flow.COPY_IN, Flow.RELAY_IN) if into else (Flow.COPY_OUT, Flow.RELAY_OUT)
    relays = machine.relays_to_device if into else machine.relays_from_device
    rate = machine.to_device if into else machine.from_device
    own, relayed = _shares(nbytes, LinearCost(machine.copy_latency, rate), relays)
    flows = [(own_flow, own), (Flow.PEER, gathered)]
    task = graph.add(queue, label, flows, after=after, latency=machine.copy_latency, takes=takes)
    if not relayed:
        return task
    start = pooled(relays).alpha_s
    other = graph.add(f"relay {queue}", label, [(relay_flow, relayed)], after=after, latency=start)
    return graph.add(queue, f"join {label}", [], after=[other])


def pooled(relays: Sequence[LinearCost]) -> LinearCost:
    """Several ways that carry together, as one."""
    rate = sum(cost.bytes_per_second for cost in relays)
    return LinearCost(sum(cost.alpha_s * cost.bytes_per_second for cost in relays) / rate, rate)


def _shares(nbytes: float, direct: LinearCost, relays: Sequence[LinearCost]) -> tuple[float, float]:
    if not relays or nbytes < SMALLEST:
        return nbytes, 0.0
    own, relayed = water_fill(int(nbytes), [direct, pooled(relays)])
    if relayed < SLICE_BYTES:
        return nbytes, 0.0
    return own + (nbytes - int(nbytes)), relayed
