"""What a machine cannot be: every contradiction is named by its field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import TopologyError
from .parts import PeerKind, PeerLink, Uplink, UplinkKind

if TYPE_CHECKING:
    from .model import Topology

_GENERATIONS, _WIDTHS = range(1, 9), (1, 2, 4, 8, 12, 16, 32)
_NODES = {UplinkKind.SWITCH: 0, UplinkKind.SOCKET: 2, UplinkKind.MEMORY: 1}


def check(topology: Topology) -> None:
    """Raise `TopologyError` for the first contradiction."""
    for index, device in enumerate(topology.devices):
        where = f"devices[{index}]"
        if device.ordinal != index:
            raise TopologyError(f"{where}.ordinal", f"{device.ordinal}; devices are listed as 0, 1, 2, ...")
        _positive(f"{where}.capacity", device.capacity)
        _node(topology, f"{where}.numa_node", device.numa_node)
    _once("numa_nodes", topology.numa_nodes)
    for index, uplink in enumerate(topology.uplinks):
        _uplink(topology, f"uplinks[{index}]", uplink)
    _once("uplinks.name", [uplink.name for uplink in topology.uplinks])
    _host_links(topology)
    _peer_links(topology)
    _published(topology)


def _uplink(topology: Topology, where: str, uplink: Uplink) -> None:
    _positive(f"{where}.bytes_per_second", uplink.bytes_per_second)
    _pcie(f"{where}.pcie", uplink)
    if len(set(uplink.numa_nodes)) != _NODES[uplink.kind] or len(uplink.numa_nodes) != _NODES[uplink.kind]:
        wanted = f"a {uplink.kind.value} has {_NODES[uplink.kind]} different ones"
        raise TopologyError(f"{where}.numa_nodes", f"{list(uplink.numa_nodes)}; {wanted}")
    for node in uplink.numa_nodes:
        _node(topology, f"{where}.numa_nodes", node)


def _host_links(topology: Topology) -> None:
    switches = {uplink.name for uplink in topology.uplinks if uplink.kind is UplinkKind.SWITCH}
    for index, link in enumerate(topology.host_links):
        where = f"host_links[{index}]"
        _device(topology, f"{where}.device", link.device)
        _pcie(f"{where}.pcie", link)
        for name, rate in (("to_device", link.to_device), ("from_device", link.from_device)):
            _positive(f"{where}.{name}", rate)
        _times(where, link.latency_s, link.duplex)
        for name in link.through:
            if name not in switches:
                raise TopologyError(f"{where}.through", f"there is no switch {name!r} among the uplinks")
        _once(f"{where}.through", link.through)
    linked = [link.device for link in topology.host_links]
    _once("host_links.device", linked)
    for device in topology.devices:
        if device.ordinal not in linked:
            raise TopologyError("host_links", f"device {device.ordinal} has no link to the host; add one")


def _peer_links(topology: Topology) -> None:
    seen: dict[tuple[int, int], PeerLink] = {}
    for index, link in enumerate(topology.peer_links):
        where = f"peer_links[{index}]"
        first, second = link.between
        for ordinal in link.between:
            _device(topology, f"{where}.between", ordinal)
        if first == second:
            raise TopologyError(f"{where}.between", f"device {first} with itself")
        pair = (min(link.between), max(link.between))
        if pair in seen:
            _again(where, seen[pair], link)
        if first > second:
            raise TopologyError(f"{where}.between", f"{[first, second]}; write the lower ordinal first")
        seen[pair] = link
        _positive(f"{where}.bytes_per_second", link.bytes_per_second)
        _positive(f"{where}.links", link.links)
        _positive(f"{where}.version", link.version)
        _times(where, link.latency_s, link.duplex)
        if link.kind is not PeerKind.NVLINK and (link.links is not None or link.version is not None):
            raise TopologyError(f"{where}.links", f"{link.kind.value} has no NVLinks")
        if link.kind.own and not link.peer_access:
            raise TopologyError(f"{where}.peer_access", f"false, and {link.label} is a link of its own")


def _again(where: str, earlier: PeerLink, link: PeerLink) -> None:
    pair = sorted(link.between)
    for name in ("kind", "peer_access", "links", "version", "bytes_per_second", "latency_s", "duplex"):
        one, other = getattr(earlier, name), getattr(link, name)
        if one != other:
            raise TopologyError(
                f"{where}.{name}", f"devices {pair} are linked asymmetrically: {_text(one)} and {_text(other)}"
            )
    raise TopologyError(f"{where}.between", f"devices {pair} are linked twice; list a pair once")


def _published(topology: Topology) -> None:
    for index, figure in enumerate(topology.published):
        where = f"published[{index}]"
        for name in ("nbytes", "slice_bytes", "bytes_per_second"):
            _positive(f"{where}.{name}", getattr(figure, name))
        if not figure.paths or len({path.device for path in figure.paths}) != 1:
            raise TopologyError(f"{where}.paths", "empty, or not of one device")
        _once(f"{where}.paths", [str(path) for path in figure.paths])
        for path in figure.paths:
            _device(topology, f"{where}.device", path.device)
            if path.helper is None:
                continue
            _device(topology, f"{where}.helpers", path.helper)
            link = topology.peer_link(path.device, path.helper)
            if link is None or not link.peer_access:
                raise TopologyError(f"{where}.helpers", f"device {path.helper} has no peer link to {path.device}")


# -- single values ------------------------------------------------------------------------------------
def _positive(where: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise TopologyError(where, f"{value} is not a number above zero")


def _times(where: str, latency_s: float | None, duplex: float | None) -> None:
    if latency_s is not None and not 0 <= latency_s < float("inf"):
        raise TopologyError(f"{where}.latency_s", f"{latency_s} is not a time")
    if duplex is not None and not 0.5 <= duplex <= 1:
        raise TopologyError(f"{where}.duplex", f"{duplex} is not 0.5 (one direction at a time) to 1 (both freely)")


def _pcie(where: str, holder: object) -> None:
    pcie = getattr(holder, "pcie", None)
    if pcie is None:
        return
    for name, allowed in (("generation", _GENERATIONS), ("width", _WIDTHS)):
        now, most = getattr(pcie, name), getattr(pcie, f"max_{name}")
        for field, value in ((name, now), (f"max_{name}", most)):
            if value is not None and value not in allowed:
                raise TopologyError(f"{where}.{field}", f"{value} is none of {', '.join(map(str, allowed))}")
        if now is not None and most is not None and now > most:
            raise TopologyError(f"{where}.{name}", f"{now} is more than its maximum, {most}")


def _device(topology: Topology, where: str, ordinal: int) -> None:
    if not 0 <= ordinal < len(topology.devices):
        raise TopologyError(where, f"there is no device {ordinal}; this machine has {len(topology.devices)}")


def _node(topology: Topology, where: str, node: int | None) -> None:
    if node is not None and node not in topology.numa_nodes:
        raise TopologyError(where, f"there is no NUMA node {node} among {list(topology.numa_nodes)}")


def _once(where: str, values: Iterable[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise TopologyError(where, f"{value!r} is there twice")
        seen.add(value)


def _text(value: object) -> object:
    return getattr(value, "value", value)
