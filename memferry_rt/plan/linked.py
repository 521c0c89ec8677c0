"""Machines from topologies: their links from the file, the rest from what is known of the make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memferry_allocator import Direction
from memferry_transport.cost import LinearCost
from memferry_transport.topology import Topology, assign
from memferry_transport.topology.rates import host_duplex, host_latency, host_rate, peer_duplex, peer_rate

from ..errors import PlanError
from .known import device_numbers, host_numbers
from .machine import Machine

_ASKED = 1 << 30  # bytes that every rank loads at once, to see which ways it gets
_BOTH = (("to_device", Direction.HOST_TO_DEVICE), ("from_device", Direction.DEVICE_TO_HOST))


def machine_from_topology(
    topology: Topology,
    device: int = 0,
    *,
    helpers: bool = False,
    ranks: int = 1,
    like: Machine | None = None,
) -> Machine:
    """A machine whose links are a topology's.

    Of several ranks it is the one with least: what they share is divided evenly.

    Parameters
    ----------
    topology : Topology
    device : int
        The first of those that train; the others follow it.
    helpers : bool
        Whether the devices that do not train relay copies to those that do, each to one of them.
    ranks : int
        Devices that train together.
    like : Machine, optional
        What the topology does not say; by default what is known of such devices and of such a host.

    Raises
    ------
    PlanError
        There is no such device, or there are not so many, or none is left to help.
    """
    count = len(topology.devices)
    name = topology.name or "the machine"
    if not 0 <= device < count or device + ranks > count:
        raise PlanError(f"topology: device {device} of {ranks} ranks is asked for; {name} has {count}")
    if helpers and ranks == count:
        raise PlanError(f"topology: all {count} devices train, and have no time to relay; leave helpers out")
    training = range(device, device + ranks)
    found = device_numbers(topology.devices[device].name) if like is None else like
    if like is None:
        found = host_numbers(found, topology)
    ways = {name: _ways(topology, training, direction) for name, direction in _BOTH}
    rates = {name: each[0].bytes_per_second for name, each in ways.items()}
    link = topology.host_link(device)
    numbers = {
        **rates,
        "copy_latency": host_latency(link),
        "both_ways": host_duplex(link),
        "host_reads": found.host_reads * min(1.0, rates["to_device"] / found.to_device),
        "host_writes": found.host_writes * min(1.0, rates["from_device"] / found.from_device),
    }
    peers, over_host = _peers(topology, training)
    if peers is not None:
        numbers["peers"] = peers
    found = found.changed(f"topology {topology.name or topology.machine}", **numbers)
    if helpers:
        found = replace(found, relays_to_device=ways["to_device"][1:], relays_from_device=ways["from_device"][1:])
        if not found.relays_to_device:
            each = f"device {device}" if ranks == 1 else f"each of {ranks} ranks"
            raise PlanError(
                f"topology: {name} has no idle device with a way of its own to the host for {each}; leave helpers "
                "out"
            )
    return replace(found, name=topology.devices[device].name, ranks=ranks, peers_over_host=over_host)


def _ways(topology: Topology, training: Sequence[int], direction: Direction) -> tuple[LinearCost, ...]:
    """The direct way and the relays, of the device that has least of all that load at once."""
    assigned = assign(topology, dict.fromkeys(training, _ASKED), direction)
    least = min(
        assigned.values(), key=lambda each: (len(each.costs), sum(cost.bytes_per_second for cost in each.costs))
    )
    return least.costs


def _peers(topology: Topology, training: Sequence[int]) -> tuple[float | None, bool]:
    """What every rank receives while it sends as much, and whether that goes over the links to the host.

    No rate for one alone, and where links were fitted to figures of relays: those say what relays reach, and not
    what ranks exchange.
    """
    pairs = [(first, second) for first in training for second in training if first < second]
    if not pairs or topology.fitted is not None:
        return None, False
    rates, over_host = [], False
    for pair in pairs:
        link = topology.peer_link(*pair)
        if link is not None and link.peer_access and link.kind.own:
            rates.append(peer_rate(topology, link) * peer_duplex(link))
            continue
        over_host = True
        rates += [host_rate(topology.host_link(each), way) for each in pair for way in Direction]
    return min(rates), over_host
