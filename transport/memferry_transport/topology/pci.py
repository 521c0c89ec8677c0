"""What Linux says about PCI devices: links, NUMA nodes, and the bridges above them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .parts import Pcie, PeerKind

SYSFS = Path("/sys")
_GENERATION = {"2.5": 1, "5": 2, "5.0": 2, "8": 3, "8.0": 3, "16": 4, "16.0": 4, "32": 5, "32.0": 5, "64.0": 6}
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


@dataclass(frozen=True)
class PciDevice:
    """A PCI device.

    Attributes
    ----------
    address : str
    link : Pcie
    numa_node : int, optional
    host_bridge : str
    bridges : tuple of str
        Addresses of the bridges above it, the one next to the host bridge first.
    """

    address: str
    link: Pcie
    numa_node: int | None
    host_bridge: str
    bridges: tuple[str, ...]


def read_pci(address: str, root: Path = SYSFS) -> PciDevice | None:
    """A PCI device by its address; None where Linux does not show it."""
    entry = root / "bus" / "pci" / "devices" / address.lower()
    try:
        parts = entry.resolve(strict=True).parts
    except OSError:
        return None
    above = [index for index, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
    if not above:
        return None
    bridges = tuple(part for part in parts[above[-1] + 1 : -1] if _ADDRESS.fullmatch(part))
    node = _number(_text(entry / "numa_node"))
    return PciDevice(
        address=address.lower(),
        link=read_link(entry),
        numa_node=node if node is not None and node >= 0 else None,  # -1: Linux does not know
        host_bridge=parts[above[-1]],
        bridges=bridges,
    )


def read_bridge(address: str, root: Path = SYSFS) -> Pcie:
    """The link of a bridge."""
    return read_link(root / "bus" / "pci" / "devices" / address)


def read_link(entry: Path) -> Pcie:
    return Pcie(
        generation=_generation(_text(entry / "current_link_speed")),
        width=_width(_text(entry / "current_link_width")),
        max_generation=_generation(_text(entry / "max_link_speed")),
        max_width=_width(_text(entry / "max_link_width")),
    )


def shared_bridges(devices: Sequence[PciDevice]) -> dict[str, tuple[str, ...]]:
    """Bridges above more than one device, with the addresses of those; of a chain that all share, the topmost."""
    below: dict[str, list[str]] = {}
    for device in devices:
        for bridge in device.bridges:
            below.setdefault(bridge, []).append(device.address)
    shared: dict[str, tuple[str, ...]] = {}
    for bridge, under in below.items():  # in each device's order: from the host down
        if len(under) > 1 and tuple(under) not in shared.values():
            shared[bridge] = tuple(under)
    return shared


def relation(first: PciDevice, second: PciDevice) -> PeerKind:
    """How far apart two devices are."""
    if first.host_bridge != second.host_bridge:
        same = first.numa_node is not None and first.numa_node == second.numa_node
        return PeerKind.NODE if same else PeerKind.SYS
    common = 0
    for one, other in zip(first.bridges, second.bridges, strict=False):
        if one != other:
            break
        common += 1
    if not common:
        return PeerKind.PHB
    # Below a switch's upstream port there is one port for each device; anything more is another switch.
    single = len(first.bridges) - common <= 1 and len(second.bridges) - common <= 1
    return PeerKind.PIX if single else PeerKind.PXB


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?[0-9]{1,9}", text) else None


def _generation(text: str | None) -> int | None:
    """Of ``"32.0 GT/s PCIe"``; ``"Unknown"`` says nothing."""
    return None if text is None else _GENERATION.get(text.split(" ")[0])


def _width(text: str | None) -> int | None:
    """0, or more than any link has, is how Linux says that it does not know."""
    width = _number(text)
    return width if width in (1, 2, 4, 8, 12, 16, 32) else None
