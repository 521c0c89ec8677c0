"""What a link's make lets one expect of it, where nothing was measured.

The shares of the raw rate that long copies reach are those measured on an H200 (PCIe 5 x16: 55.4 of 63.0 GB/s;
18 NVLinks: 391 of 450 GB/s), and so are latencies and both directions at once.
"""

from __future__ import annotations

from memferry_allocator import Direction

from .model import Topology
from .parts import HostLink, Pcie, PeerLink, Uplink

HOST_LATENCY_S = 10e-6
PEER_LATENCY_S = 10e-6
HOST_DUPLEX = 0.91
PEER_DUPLEX = 0.5
_PCIE_SHARE = 0.88
_NVLINK_SHARE = 0.87

_LANE = {  # bytes per second of a lane and direction, after its encoding
    1: 2.5e9 * 0.8 / 8,
    2: 5e9 * 0.8 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
    7: 128e9 * 242 / 256 / 8,
}
_NVLINK = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}  # bytes per second of a link and direction
_UNKNOWN_PCIE = Pcie(generation=3, width=16)  # a cautious guess, until it is measured


def pcie_rate(link: Pcie | None) -> float | None:
    """Bytes per second of long copies, each direction alone; None where generation or width is not known."""
    if link is None or link.width is None or link.generation not in _LANE:
        return None
    return _PCIE_SHARE * _LANE[link.generation] * link.width


def nvlink_rate(links: int | None, version: int | None) -> float | None:
    """Bytes per second of long copies over so many NVLinks, one direction."""
    if links is None or version not in _NVLINK:
        return None
    return _NVLINK_SHARE * _NVLINK[version] * links


def host_rate(link: HostLink, direction: Direction) -> float:
    """A given rate, else that of the PCIe link, else a cautious guess."""
    given = link.to_device if direction is Direction.HOST_TO_DEVICE else link.from_device
    rate = given or pcie_rate(link.pcie) or pcie_rate(_UNKNOWN_PCIE)
    assert rate is not None
    return rate


def peer_rate(topology: Topology, link: PeerLink) -> float:
    """A given rate, else that of the NVLinks, else no more than the slower of the two devices' host links."""
    slower = min(
        host_rate(topology.host_link(device), direction) for device in link.between for direction in Direction
    )
    return link.bytes_per_second or nvlink_rate(link.links, link.version) or slower


def uplink_rate(uplink: Uplink) -> float | None:
    """Each direction; None for what is not known to be a limit."""
    return uplink.bytes_per_second or pcie_rate(uplink.pcie)


def host_latency(link: HostLink) -> float:
    return HOST_LATENCY_S if link.latency_s is None else link.latency_s


def peer_latency(link: PeerLink) -> float:
    return PEER_LATENCY_S if link.latency_s is None else link.latency_s


def host_duplex(link: HostLink) -> float:
    return HOST_DUPLEX if link.duplex is None else link.duplex


def peer_duplex(link: PeerLink) -> float:
    return PEER_DUPLEX if link.duplex is None else link.duplex
