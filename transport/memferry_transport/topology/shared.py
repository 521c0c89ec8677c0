"""What ways have in common, and how much of it is left."""

from __future__ import annotations

from ..paths import Path
from .model import Topology
from .parts import Uplink, UplinkKind
from .rates import uplink_rate


def passed(topology: Topology, device: int, host_node: int | None = None) -> tuple[Uplink, ...]:
    """What bytes pass between a device and host memory on a NUMA node, by default the device's own."""
    link, own = topology.host_link(device), topology.device(device).numa_node
    node = own if host_node is None else host_node
    found = [topology.uplink(name) for name in link.through]
    for uplink in topology.uplinks:
        socket = uplink.kind is UplinkKind.SOCKET and node != own and {node, own} == set(uplink.numa_nodes)
        if socket or (uplink.kind is UplinkKind.MEMORY and uplink.numa_nodes == (node,)):
            found.append(uplink)
    return tuple(found)


def passed_by(topology: Topology, path: Path) -> tuple[Uplink, ...]:
    """What a way to a device passes; the host memory lies on that device's NUMA node."""
    node = topology.device(path.device).numa_node
    return passed(topology, path.device if path.helper is None else path.helper, node)


class Room:
    """Bytes per second that are left of everything shared, in one direction."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._left = {uplink.name: uplink_rate(uplink) for uplink in topology.uplinks}

    def left(self, path: Path, rate: float) -> float:
        """How much of `rate` a way can still have."""
        limits = [self._left[uplink.name] for uplink in passed_by(self._topology, path)]
        return min([rate, *(max(0.0, limit) for limit in limits if limit is not None)])

    def take(self, path: Path, rate: float) -> None:
        for uplink in passed_by(self._topology, path):
            left = self._left[uplink.name]
            if left is not None:
                self._left[uplink.name] = left - rate


def fair_direct_rates(topology: Topology, rates: dict[int, float]) -> dict[int, float]:
    """Direct rates of devices that load at once: what several of them pass is divided evenly."""
    users: dict[str, int] = {}
    for device in rates:
        for uplink in passed(topology, device):
            users[uplink.name] = users.get(uplink.name, 0) + 1
    fair = {}
    for device, rate in rates.items():
        limits = [(uplink_rate(uplink), users[uplink.name]) for uplink in passed(topology, device)]
        fair[device] = min([rate, *(limit / count for limit, count in limits if limit is not None)])
    return fair
