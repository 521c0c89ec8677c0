"""What a machine is made of: devices, and the kinds of links.

What is not known is None, here and in the file; nothing is guessed into these fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from memferry_allocator import Direction

from ..cost import LinearCost
from ..paths import Path


class PeerKind(Enum):
    """How two devices are connected, in the words of ``nvidia-smi topo -m``, and one more."""

    NVLINK = "NV"
    PEER = "P2P"  # peer access over a link of its own whose make is not known, or is not NVIDIA's
    PIX = "PIX"  # at most one PCIe switch between them
    PXB = "PXB"  # several PCIe switches, no host bridge
    PHB = "PHB"  # a host bridge
    NODE = "NODE"  # several host bridges of one NUMA node
    SYS = "SYS"  # the link between NUMA nodes

    @property
    def own(self) -> bool:
        """Whether bytes between the two take a link of their own; else they take both devices' PCIe links."""
        return self in (PeerKind.NVLINK, PeerKind.PEER)


class UplinkKind(Enum):
    """What several devices' ways to host memory share."""

    SWITCH = "switch"  # the upstream link of a PCIe switch
    SOCKET = "socket"  # the link between two NUMA nodes
    MEMORY = "memory"  # the memory of one NUMA node


@dataclass(frozen=True)
class Pcie:
    """A PCIe link as it is now, and the most that it was made for."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None

    @property
    def trained_down(self) -> bool:
        """Whether it is narrower or slower now than it could be; an idle device may have slowed down to rest."""
        pairs = ((self.generation, self.max_generation), (self.width, self.max_width))
        return any(now is not None and most is not None and now < most for now, most in pairs)

    def __str__(self) -> str:
        now = f"PCIe {self.generation or '?'} x{self.width or '?'}"
        if not self.trained_down:
            return now
        return f"{now} (of {self.max_generation or '?'} x{self.max_width or '?'})"


@dataclass(frozen=True)
class Device:
    """An accelerator; `uuid` names the piece, everything else the make."""

    ordinal: int
    name: str
    pci_address: str | None = None
    numa_node: int | None = None
    capacity: int | None = None
    uuid: str | None = None


@dataclass(frozen=True)
class HostLink:
    """A device's own link to the host.

    Attributes
    ----------
    device : int
    pcie : Pcie, optional
        None: another kind of link, or none that is known.
    to_device, from_device : float, optional
        Bytes per second of long copies, each direction alone.
    latency_s : float, optional
        Of a copy.
    duplex : float, optional
        Both directions at once, as a share of the sum of each alone: 1 down to 0.5.
    through : tuple of str
        The switches on its way to the host, by name.
    """

    device: int
    pcie: Pcie | None = None
    to_device: float | None = None
    from_device: float | None = None
    latency_s: float | None = None
    duplex: float | None = None
    through: tuple[str, ...] = ()


@dataclass(frozen=True)
class PeerLink:
    """How two devices are connected; the same both ways.

    Attributes
    ----------
    between : tuple of int
        The lower ordinal first.
    kind : PeerKind
    peer_access : bool
        Whether each may read and write the other's memory.
    links, version : int, optional
        Of NVLink: how many, and their generation.
    bytes_per_second : float, optional
        Of long copies, one direction alone.
    latency_s, duplex : float, optional
        As for `HostLink`.
    """

    between: tuple[int, int]
    kind: PeerKind
    peer_access: bool = True
    links: int | None = None
    version: int | None = None
    bytes_per_second: float | None = None
    latency_s: float | None = None
    duplex: float | None = None

    @property
    def label(self) -> str:
        return (
            f"NV{'#' if self.links is None else self.links}" if self.kind is PeerKind.NVLINK else self.kind.value
        )


@dataclass(frozen=True)
class Uplink:
    """Something that several devices' ways to host memory share.

    Attributes
    ----------
    name : str
    kind : UplinkKind
    bytes_per_second : float, optional
        Each direction; None: what its `pcie` link has, or not a limit.
    pcie : Pcie, optional
        Of a switch.
    numa_nodes : tuple of int
        The two that a socket link connects; the one whose memory it is.
    """

    name: str
    kind: UplinkKind
    bytes_per_second: float | None = None
    pcie: Pcie | None = None
    numa_nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Published:
    """A figure that somebody has published of such a machine: so many bytes, over these ways, at this rate."""

    paths: tuple[Path, ...]
    direction: Direction
    nbytes: int
    slice_bytes: int
    bytes_per_second: float
    source: str
    date: str


@dataclass(frozen=True)
class FittedCosts:
    """Costs of ways fitted to published figures: they stand for what the links alone would give."""

    direct: LinearCost
    relay: LinearCost
