"""How fast everything goes that goes on at once: links, kernels on host memory, the CPU, and host memory for all.

Weighted max-min fairness.  Every flow has a weight, the rate that it would have alone; all rates rise together
in proportion to the weights until a flow reaches its own limit, or something that it uses is used up.  In
proportion is what was measured: CPU and copies beside each other on one memory lose the same share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from .machine import Machine

Counts = tuple[int, ...]


class Flow(IntEnum):
    """What a task needs until it is done."""

    TIME = 0  # seconds, of computing or waiting
    COPY_IN = 1  # bytes by the copy engines to the device
    COPY_OUT = 2  # and from it
    READ = 3  # bytes of host memory that kernels read
    WRITE = 4  # and write
    CPU = 5  # bytes of host memory that the CPU's update moves
    PEER = 6  # bytes from other ranks, while as many go to them
    RELAY_IN = 7  # bytes of copies to the device that idle devices relay
    RELAY_OUT = 8  # and from it


FLOWS = len(Flow)
_HOST = (Flow.COPY_IN, Flow.COPY_OUT, Flow.READ, Flow.WRITE, Flow.CPU, Flow.RELAY_IN, Flow.RELAY_OUT)


@dataclass(frozen=True)
class Resource:
    """Something shared: `capacity`, and how much of it each unit of a flow takes."""

    name: str
    capacity: float
    use: dict[Flow, float]


def _resources(machine: Machine, relays_in: float, relays_out: float) -> Iterator[Resource]:
    """Of several ranks, what one of them has: its own, and its share of what all use."""
    into, out = machine.to_device, machine.from_device
    over_host = {Flow.PEER: 1.0} if machine.peers_over_host else {}
    yield Resource("H2D", into, {Flow.COPY_IN: 1.0, Flow.READ: 1.0} | over_host)
    yield Resource("D2H", out, {Flow.COPY_OUT: 1.0, Flow.WRITE: 1.0} | over_host)
    yield Resource(
        "link",
        2 * machine.both_ways,
        {Flow.COPY_IN: 1 / into, Flow.READ: 1 / into, Flow.COPY_OUT: 1 / out, Flow.WRITE: 1 / out}
        | {flow: use / into + use / out for flow, use in over_host.items()},
    )
    yield Resource("CPU", machine.cpu_update / machine.ranks, {Flow.CPU: 1.0})
    staged = dict.fromkeys(over_host, 2.0)  # written there, and read
    yield Resource("DRAM", machine.host_memory / machine.ranks, dict.fromkeys(_HOST, 1.0) | staged)
    yield Resource("peers", machine.peers or 1.0, {Flow.PEER: 1.0})
    if machine.relays_to_device or machine.relays_from_device:
        yield Resource("relays in", relays_in, {Flow.RELAY_IN: 1.0})
        yield Resource("relays out", relays_out, {Flow.RELAY_OUT: 1.0})
        both = {Flow.RELAY_IN: 1 / relays_in, Flow.RELAY_OUT: 1 / relays_out}
        yield Resource("relays", 2 * machine.both_ways, both)
        if machine.ranks > 1:
            yield Resource("peers in", machine.peers, {Flow.PEER: 1.0, Flow.RELAY_IN: 1.0})
            yield Resource("peers out", machine.peers, {Flow.PEER: 1.0, Flow.RELAY_OUT: 1.0})


class Rates:
    """The rate of one flow of each kind, for any number of each at once.

    Parameters
    ----------
    machine : Machine
        Of several ranks, each has its share of host memory and CPU.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._known: dict[Counts, tuple[float, ...]] = {}
        self._relays = tuple(
            sum(cost.bytes_per_second for cost in costs) or 1.0
            for costs in (machine.relays_to_device, machine.relays_from_device)
        )
        self.resources = tuple(_resources(machine, *self._relays))

    def of(self, counts: Counts) -> tuple[float, ...]:
        """Rates by kind, when so many of each are under way; of kinds without any, 0."""
        rates = self._known.get(counts)
        if rates is None:
            rates = self._known[counts] = self._solve(counts)
        return rates

    def _solve(self, counts: Counts) -> tuple[float, ...]:
        weights = self._weights(counts)
        open_ = {flow for flow in Flow if counts[flow]}
        rates = [0.0] * FLOWS
        level = 0.0
        while open_:
            limits = [(self._limit(flow, counts) / weights[flow], {flow}) for flow in open_]
            for resource in self.resources:
                users = {flow for flow in open_ if flow in resource.use}
                if users:
                    fixed = (resource.use[flow] * counts[flow] * rates[flow] for flow in resource.use)
                    taken = sum(fixed) - sum(resource.use[f] * counts[f] * rates[f] for f in users)
                    slope = sum(resource.use[flow] * counts[flow] * weights[flow] for flow in users)
                    limits.append(((resource.capacity - taken) / slope, users))
            level = max(level, min(limit for limit, _ in limits))
            ended = set().union(*(flows for limit, flows in limits if limit <= level * (1 + 1e-12)))
            for flow in open_:
                rates[flow] = level * weights[flow]
            open_ -= ended
        return tuple(rates)

    def _weights(self, counts: Counts) -> list[float]:
        machine = self._machine
        share = machine.kernel_share
        weights = [1.0] * FLOWS
        for copy, kernel, link, alone in (
            (Flow.COPY_IN, Flow.READ, machine.to_device, machine.host_reads),
            (Flow.COPY_OUT, Flow.WRITE, machine.from_device, machine.host_writes),
        ):
            both = counts[copy] and counts[kernel]
            weights[copy] = link * (1 - share if both else 1.0) / max(1, counts[copy])
            weights[kernel] = (link * share if both else alone) / max(1, counts[kernel])
        weights[Flow.CPU] = machine.cpu_update / machine.ranks
        weights[Flow.PEER] = machine.peers or 1.0
        for flow, rate in zip((Flow.RELAY_IN, Flow.RELAY_OUT), self._relays, strict=True):
            weights[flow] = rate / max(1, counts[flow])
        return weights

    def _limit(self, flow: Flow, counts: Counts) -> float:
        if flow is Flow.TIME:
            return 1.0
        if flow is Flow.READ:
            return self._machine.host_reads / counts[flow]
        if flow is Flow.WRITE:
            return self._machine.host_writes / counts[flow]
        return float("inf")
