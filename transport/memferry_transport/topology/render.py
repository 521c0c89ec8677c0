"""A topology as text: the matrix of ``nvidia-smi topo -m``, and its links with their rates."""

from __future__ import annotations

from collections.abc import Sequence

from memferry_allocator import Direction, format_size

from .model import Topology
from .parts import HostLink, PeerLink, Uplink
from .rates import host_duplex, host_rate, peer_duplex, peer_rate, uplink_rate
from .ways import candidates

LEGEND = {
    "X": "the device itself",
    "NV#": "so many NVLinks",
    "P2P": "peer access over a link whose make is not known, or is not NVIDIA's",
    "PIX": "at most one PCIe switch",
    "PXB": "several PCIe switches, no host bridge",
    "PHB": "a PCIe host bridge",
    "NODE": "several host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
    "?": "not known",
}


def render_matrix(topology: Topology) -> str:
    """How each two devices are connected, as ``nvidia-smi topo -m`` shows it; ``*``: no peer access."""
    head = ["", *(f"GPU{device.ordinal}" for device in topology.devices), "NUMA Affinity"]
    rows = [head]
    for device in topology.devices:
        cells = [_cell(topology, device.ordinal, other.ordinal) for other in topology.devices]
        node = "N/A" if device.numa_node is None else str(device.numa_node)
        rows.append([f"GPU{device.ordinal}", *cells, node])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*(line.rstrip() for line in lines), "", *_legend(rows)])


def _cell(topology: Topology, first: int, second: int) -> str:
    if first == second:
        return "X"
    link = topology.peer_link(first, second)
    if link is None:
        return "?"
    return link.label if link.peer_access else f"{link.label}*"


def _legend(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = {cell.rstrip("*") for row in rows[1:] for cell in row[1:-1]}
    names = {"NV#" if cell.startswith("NV") else cell for cell in cells}
    lines = [f"{name:4} = {text}" for name, text in LEGEND.items() if name in names]
    return [*lines, *(["*    = no peer access"] if any("*" in cell for row in rows for cell in row) else [])]


def describe(topology: Topology) -> str:
    """A topology in full: the matrix, devices, links with their rates, ways, and what is not known.

    Rates after ``~`` are expected of the link's make; the others were given.
    """
    lines = [topology.machine]
    origin = ", ".join(text for text in (topology.source, topology.date) if text)
    lines += [f"source: {origin}"] if origin else []
    lines += ["", render_matrix(topology), "", "devices"]
    for device in topology.devices:
        capacity = "" if device.capacity is None else f", {format_size(device.capacity)}"
        lines.append(
            f"  {device.ordinal}: {device.name}{capacity}, {device.pci_address or 'PCI address not known'}"
        )
    lines += ["links to the host (in, out, share both ways)"]
    lines += [f"  {_host(link)}" for link in topology.host_links]
    if topology.uplinks:
        lines += ["shared"]
        lines += [f"  {_uplink(topology, uplink)}" for uplink in topology.uplinks]
    reached = [link for link in topology.peer_links if link.peer_access]
    if reached:
        lines += ["links between devices"]
        lines += [f"  {line}" for line in _peers(topology, reached)]
    lines += ["ways from host memory"]
    for device in topology.devices:
        ways = ", ".join(str(path) for path in candidates(topology, device.ordinal))
        lines.append(f"  {device.ordinal}: {ways}")
    return "\n".join([*lines, *(f"note: {note}" for note in topology.notes)])


def _host(link: HostLink) -> str:
    into, out = (host_rate(link, direction) for direction in Direction)
    marks = ["" if given else "~" for given in (link.to_device, link.from_device)]
    make = "make not known" if link.pcie is None else str(link.pcie)
    rates = f"{marks[0]}{into / 1e9:.1f}, {marks[1]}{out / 1e9:.1f} GB/s"
    share = f"{'~' if link.duplex is None else ''}{host_duplex(link):.2f}"
    behind = f", behind {' and '.join(link.through)}" if link.through else ""
    return f"{link.device}: {make}, {rates}, {share}{behind}"


def _peers(topology: Topology, links: Sequence[PeerLink]) -> list[str]:
    """One line for all pairs that are connected alike."""
    alike: dict[str, list[str]] = {}
    for link in links:
        alike.setdefault(_peer(topology, link), []).append(f"{link.between[0]}-{link.between[1]}")
    count = len(topology.devices)
    every = count * (count - 1) // 2
    return [f"{'each two' if len(pairs) == every else ' '.join(pairs)}: {text}" for text, pairs in alike.items()]


def _peer(topology: Topology, link: PeerLink) -> str:
    rate = f"{'' if link.bytes_per_second else '~'}{peer_rate(topology, link) / 1e9:.1f} GB/s"
    share = f"{'~' if link.duplex is None else ''}{peer_duplex(link):.2f}"
    return f"{link.label}, {rate}, {share}"


def _uplink(topology: Topology, uplink: Uplink) -> str:
    rate = uplink_rate(uplink)
    capacity = "capacity not known" if rate is None else f"{rate / 1e9:.1f} GB/s"
    make = "" if uplink.pcie is None else f", {uplink.pcie}"
    nodes = f", NUMA node {' and '.join(map(str, uplink.numa_nodes))}" if uplink.numa_nodes else ""
    below = ", ".join(map(str, topology.below(uplink)))
    return f"{uplink.name} ({uplink.kind.value}){make}{nodes}: {capacity}, devices {below}"
