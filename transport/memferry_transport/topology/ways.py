"""The ways to a device that a machine offers, and what they cost before anything was measured."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from memferry_allocator import Direction

from ..calibration import Calibration, Measured
from ..cost import LinearCost, relay_cost
from ..errors import InvalidTransferError
from ..paths import Path
from ..quotas import SLOWEST
from .model import Topology
from .rates import host_duplex, host_latency, host_rate, peer_latency, peer_rate
from .shared import Room

SLICE_BYTES = 4 << 20
MOST_RELAYS = 6

_IN = Direction.HOST_TO_DEVICE


def way_cost(topology: Topology, path: Path, direction: Direction, slice_bytes: int = SLICE_BYTES) -> LinearCost:
    """What a way costs that has all of its links to itself."""
    if topology.fitted is not None:
        return topology.fitted.direct if path.direct else topology.fitted.relay
    carrier = topology.host_link(path.device if path.helper is None else path.helper)
    host = LinearCost(host_latency(carrier), host_rate(carrier, direction))
    if path.helper is None:
        return host
    link = topology.peer_link(path.device, path.helper)
    if link is None or not link.peer_access:
        raise InvalidTransferError(f"{path}: devices {path.device} and {path.helper} have no peer access")
    return relay_cost(host, LinearCost(peer_latency(link), peer_rate(topology, link)), slice_bytes)


def helpers(topology: Topology, device: int) -> Iterator[int]:
    """Devices that could relay: those of the same NUMA node first, then the faster ones.

    A helper has peer access over a link of its own (over PCIe the bytes would come in by the device's own
    link after all), and no switch between it and the host is one that the device's own way passes.
    """
    here = topology.device(device)
    behind = set(topology.host_link(device).through)

    def preference(other: int) -> tuple[bool, float, int]:
        away = topology.device(other).numa_node != here.numa_node
        return away, -way_cost(topology, Path(device, other), _IN).bytes_per_second, other

    able = [
        other.ordinal
        for other in topology.devices
        if (link := topology.peer_link(device, other.ordinal)) is not None
        and link.peer_access
        and link.kind.own
        and behind.isdisjoint(topology.host_link(other.ordinal).through)
    ]
    yield from sorted(able, key=preference)


def candidates(
    topology: Topology, device: int, direction: Direction = _IN, *, busy: Collection[int] = ()
) -> tuple[Path, ...]:
    """The ways to a device: the direct one, then at most six relays.

    A relay gets what is left of everything that it shares with the ways before it (a switch, the link
    between NUMA nodes, host memory); it is left out where that is less than a quarter of the best way's rate.

    Parameters
    ----------
    topology : Topology
    device : int
    direction : Direction
    busy : collection of int
        Devices with work of their own: not to be used as helpers.

    Raises
    ------
    InvalidTransferError
        There is no such device.
    """
    require_device(topology, device)
    paths = [Path(device)]
    offered = [Path(device, helper) for helper in helpers(topology, device) if helper not in busy]
    alone = {path: way_cost(topology, path, direction).bytes_per_second for path in (*paths, *offered)}
    room, least = Room(topology), SLOWEST * max(alone.values())
    room.take(paths[0], room.left(paths[0], alone[paths[0]]))
    for path in offered:
        rate = room.left(path, alone[path])
        if rate >= least and len(paths) <= MOST_RELAYS:
            room.take(path, rate)
            paths.append(path)
    return tuple(paths)


def together(
    topology: Topology, paths: Sequence[Path], direction: Direction, slice_bytes: int = SLICE_BYTES
) -> list[tuple[Path, LinearCost]]:
    """What ways to one device cost while all of them carry: the earlier has what it shares first."""
    room, costs = Room(topology), []
    for path in paths:
        alone = way_cost(topology, path, direction, slice_bytes)
        rate = room.left(path, alone.bytes_per_second)
        if rate > 0:
            room.take(path, rate)
            costs.append((path, LinearCost(alone.alpha_s, rate)))
    return costs


def link_costs(topology: Topology, slice_bytes: int = SLICE_BYTES) -> dict[tuple[Path, Direction], LinearCost]:
    """What every way that comes into question costs by itself, from the links: until it is measured."""
    return {
        (path, direction): way_cost(topology, path, direction, slice_bytes)
        for device in topology.devices
        for direction in Direction
        for path in candidates(topology, device.ordinal, direction)
    }


def prior_calibration(topology: Topology, slice_bytes: int = SLICE_BYTES) -> Calibration:
    """The same as a `Calibration`, for a machine that was never measured.

    Its source is ``"published"`` where the topology carries published figures, else ``"topology"``.  Several
    ways are taken to pay from the size on at which the first relay would carry one whole slice.
    """
    costs = link_costs(topology, slice_bytes)
    even: dict[tuple[int, Direction], int] = {}
    for device in topology.devices:
        for direction in Direction:
            paths = candidates(topology, device.ordinal, direction)[1:]
            direct = costs[Path(device.ordinal), direction]
            ends = [costs[path, direction].seconds(slice_bytes) for path in paths]
            if ends:
                even[device.ordinal, direction] = slice_bytes + round(direct.bytes_within(min(ends)))
    return Calibration(
        machine=topology.machine,
        source="published" if topology.published else "topology",
        date=topology.date,
        ways={key: Measured(cost) for key, cost in costs.items()},
        slice_bytes=slice_bytes,
        break_even_bytes=even,
        duplex={link.device: host_duplex(link) for link in topology.host_links},
    )


def require_device(topology: Topology, device: int) -> None:
    if not 0 <= device < len(topology.devices):
        raise InvalidTransferError(f"there is no device {device}; this machine has {len(topology.devices)}")
