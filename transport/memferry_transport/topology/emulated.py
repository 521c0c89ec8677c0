"""Emulated devices with the links of a topology, and the topology of emulated devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from memferry_allocator import Direction, EmulatedDriver, EmulatedOptions
from memferry_allocator.driver import LinkModel, Route, Wiring

from .model import Topology
from .parts import Device, HostLink, PeerKind, PeerLink, Uplink, UplinkKind
from .rates import (
    host_duplex,
    host_latency,
    host_rate,
    peer_duplex,
    peer_latency,
    peer_rate,
    uplink_rate,
)
from .shared import passed

_IN, _OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


def emulated_options(topology: Topology, *, host_node: int | None = None, **overrides: Any) -> EmulatedOptions:
    """Options of an emulated machine that has a topology's links.

    Parameters
    ----------
    topology : Topology
        Of 1 to 8 devices.
    host_node : int, optional
        The NUMA node on which all host memory lies; by default every device finds it on its own.
    **overrides
        Other fields of `EmulatedOptions`.  Devices have their capacity of the first, else the default.
    """
    count = len(topology.devices)
    capacity = topology.devices[0].capacity if count else None
    settings: dict[str, Any] = {"device_count": count, "wiring": wiring(topology, host_node)}
    if capacity is not None:
        settings["device_memory"] = capacity
    return EmulatedOptions(**{**settings, **overrides})


def wiring(topology: Topology, host_node: int | None = None) -> Wiring:
    """A topology's links as an emulated machine takes them."""
    shared: dict[str, float] = {}
    routes = {
        (device.ordinal, direction): _host_route(topology, device, direction, host_node, shared)
        for device in topology.devices
        for direction in Direction
    }
    peer: dict[tuple[int, int], Route] = {}
    for link in topology.peer_links:
        if link.peer_access:
            for source, target in (link.between, link.between[::-1]):
                peer[source, target] = _peer_route(topology, link, source, target, shared)
    return Wiring(
        host_to_device=tuple(routes[device.ordinal, _IN] for device in topology.devices),
        device_to_host=tuple(routes[device.ordinal, _OUT] for device in topology.devices),
        peer=peer,
        shared=shared,
    )


def _host_route(
    topology: Topology, device: Device, direction: Direction, host_node: int | None, shared: dict[str, float]
) -> Route:
    link = topology.host_link(device.ordinal)
    rate = host_rate(link, direction)
    names = _both_ways(
        f"host link {device.ordinal}", [host_rate(link, each) for each in Direction], host_duplex(link)
    )
    shared.update(names)
    lane = {f"lanes of device {device.ordinal}, {direction.value}": rate} if _pcie_peers(topology, device) else {}
    for uplink in passed(topology, device.ordinal, host_node):
        limit = uplink_rate(uplink)
        if limit is not None:
            lane[_named(uplink, direction)] = limit
    shared.update(lane)
    return Route(LinkModel(host_latency(link), rate), (*names, *lane))


def _peer_route(topology: Topology, link: PeerLink, source: int, target: int, shared: dict[str, float]) -> Route:
    rate = peer_rate(topology, link)
    if link.kind.own:
        names = _both_ways(f"peer link {link.between[0]}-{link.between[1]}", [rate, rate], peer_duplex(link))
        shared.update(names)
        return Route(LinkModel(peer_latency(link), rate), tuple(names))
    lanes = (f"lanes of device {source}, {_OUT.value}", f"lanes of device {target}, {_IN.value}")
    return Route(LinkModel(peer_latency(link), rate), lanes)


def _both_ways(name: str, rates: Iterable[float], duplex: float) -> dict[str, float]:
    """Both directions of a link share so much less than their sum."""
    return {} if duplex == 1 else {f"{name}, both ways": duplex * sum(rates)}


def _named(uplink: Uplink, direction: Direction) -> str:
    """Each direction has its own capacity; memory has one for both."""
    return uplink.name if uplink.kind is UplinkKind.MEMORY else f"{uplink.name}, {direction.value}"


def _pcie_peers(topology: Topology, device: Device) -> bool:
    """Whether copies from and to peers take the device's link to the host."""
    return any(
        device.ordinal in link.between and link.peer_access and not link.kind.own for link in topology.peer_links
    )


# -- the other way round --------------------------------------------------------------------------------
def topology_of_emulated(driver: EmulatedDriver) -> Topology:
    """The links that an emulated machine was given.

    What all directions of several devices share, as host memory is, is not told apart by NUMA node there, and so
    is left out.
    """
    options, wired = driver.options, driver.options.wired()
    devices = range(options.device_count)
    return Topology(
        devices=tuple(
            Device(info.ordinal, info.name, info.pci_address, info.numa_node, info.capacity, info.uuid)
            for info in map(driver.device_info, devices)
        ),
        host_links=tuple(_host_link(wired, device) for device in devices),
        peer_links=tuple(_peer_link(wired, *pair) for pair in itertools.combinations(devices, 2)),
        uplinks=tuple(
            Uplink(name, UplinkKind.SWITCH, rate) for name, rate in wired.shared.items() if _above(wired, name)
        ),
        source="emulated",
    )


def _host_link(wired: Wiring, device: int) -> HostLink:
    into, out = wired.host_to_device[device], wired.device_to_host[device]
    return HostLink(
        device,
        to_device=into.link.bytes_per_second,
        from_device=out.link.bytes_per_second,
        latency_s=into.link.latency_s,
        duplex=_duplex(wired, into, out),
        through=tuple(name for name in into.shared if _above(wired, name)),
    )


def _peer_link(wired: Wiring, first: int, second: int) -> PeerLink:
    there, back = wired.peer.get((first, second)), wired.peer.get((second, first))
    if there is None or back is None:
        return PeerLink((first, second), PeerKind.SYS, peer_access=False)
    pcie = any(name in wired.host_to_device[second].shared for name in there.shared)
    return PeerLink(
        (first, second),
        PeerKind.SYS if pcie else PeerKind.PEER,
        bytes_per_second=min(there.link.bytes_per_second, back.link.bytes_per_second),
        latency_s=there.link.latency_s,
        duplex=_duplex(wired, there, back),
    )


def _duplex(wired: Wiring, there: Route, back: Route) -> float:
    """What the two share with nobody else, as a share of their sum."""
    most = there.link.bytes_per_second + back.link.bytes_per_second
    users = [*wired.host_to_device, *wired.device_to_host, *wired.peer.values()]
    limits = [
        wired.shared[name]
        for name in there.shared
        if name in back.shared and sum(name in route.shared for route in users) == 2
    ]
    return min([1.0, *(max(0.5, limit / most) for limit in limits)])


def _above(wired: Wiring, name: str) -> bool:
    """Whether it is a switch: several devices' ways from the host share it, and their ways back do not."""
    back = any(name in route.shared for route in wired.device_to_host)
    return not back and sum(name in route.shared for route in wired.host_to_device) > 1
