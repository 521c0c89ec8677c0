"""What NVML says about links: through any module with the functions of ``pynvml`` (package nvidia-ml-py)."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from .parts import Pcie, PeerKind

_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_VERSIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5}  # nvmlNvlinkVersion_t counts minor versions too
_LEVELS = {
    0: PeerKind.PIX,  # two devices of one board
    10: PeerKind.PIX,
    20: PeerKind.PXB,
    30: PeerKind.PHB,
    40: PeerKind.NODE,
    50: PeerKind.SYS,
}


@dataclass(frozen=True)
class NvmlDevice:
    """A device.

    Attributes
    ----------
    link : Pcie
    to_peers : dict of str to int
        Active NVLinks by the peer's address.
    to_switches, to_unknown : int
        Those that end in a switch, and those whose end is hidden.
    version : int, optional
        Of the NVLinks.
    answered : bool
        Whether NVML said of any NVLink whether it is active.
    """

    link: Pcie
    to_peers: dict[str, int] = field(default_factory=dict)
    to_switches: int = 0
    to_unknown: int = 0
    version: int | None = None
    answered: bool = True


@dataclass(frozen=True)
class NvmlFacts:
    """By PCI address, and by pairs of them; what NVML would not say is not in it."""

    devices: dict[str, NvmlDevice] = field(default_factory=dict)
    relations: dict[tuple[str, str], PeerKind] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def nvlinks(self, first: str | None, second: str | None) -> tuple[int, int | None]:
        """How many NVLinks connect two devices, and their version."""
        one, other = self.devices.get(first or ""), self.devices.get(second or "")
        if one is None or other is None:
            return 0, None
        direct = min(one.to_peers.get(second or "", 0), other.to_peers.get(first or "", 0))
        through = min(one.to_switches + one.to_unknown, other.to_switches + other.to_unknown)
        return direct or through, one.version

    def knows_nvlinks(self, address: str | None) -> bool:
        """Whether it is known which NVLinks a device has, or that it has none."""
        device = self.devices.get(address or "")
        return device is not None and device.answered

    def relation(self, first: str | None, second: str | None) -> PeerKind | None:
        """How far apart two devices are on PCIe."""
        if first is None or second is None:
            return None
        return self.relations.get((min(first, second), max(first, second)))


def load_nvml() -> Any | None:
    """The module, if it is installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the older package of this name only says that it is old
            return importlib.import_module("pynvml")
    except ImportError:
        return None


def read_nvml(nvml: Any | None, addresses: Sequence[str]) -> NvmlFacts:
    """Everything about the devices at these PCI addresses that NVML answers; never raises for what it does not."""
    if nvml is None:
        return NvmlFacts(notes=("NVML: nvidia-ml-py is not installed; NVLinks are not known",))
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return NvmlFacts(notes=(f"NVML: {error}; NVLinks are not known",))
    try:
        return _Reader(nvml).read(addresses)
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


class _Reader:
    """Asks, and notes each kind of question that is refused once."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._links: int = getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)
        self._refused: dict[str, str] = {}

    def read(self, addresses: Sequence[str]) -> NvmlFacts:
        handles = {}
        for address in addresses:
            handle = self._ask("nvmlDeviceGetHandleByPciBusId", address.encode())
            if handle is not None:
                handles[address] = handle
        relations = {}
        for first in handles:
            for second in handles:
                if first < second:
                    level = self._ask("nvmlDeviceGetTopologyCommonAncestor", handles[first], handles[second])
                    if level in _LEVELS:
                        relations[first, second] = _LEVELS[level]
        devices = {address: self._device(handle, tuple(handles)) for address, handle in handles.items()}
        unknown = [address for address, device in devices.items() if device.to_unknown]
        notes = [f"NVML: {name}: {why}" for name, why in self._refused.items()]
        if unknown:
            notes.append("NVML: where NVLinks end is hidden; they are taken to meet in a switch")
        return NvmlFacts(devices, relations, tuple(notes))

    def _device(self, handle: Any, addresses: tuple[str, ...]) -> NvmlDevice:
        link = Pcie(
            generation=self._ask("nvmlDeviceGetCurrPcieLinkGeneration", handle) or None,
            width=self._ask("nvmlDeviceGetCurrPcieLinkWidth", handle) or None,
            max_generation=self._ask("nvmlDeviceGetMaxPcieLinkGeneration", handle) or None,
            max_width=self._ask("nvmlDeviceGetMaxPcieLinkWidth", handle) or None,
        )
        peers: dict[str, int] = {}
        switches = unknown = 0
        version: int | None = None
        states = [self._active(handle, index) for index in range(self._links)]
        for index, state in enumerate(states):
            if not state:
                continue
            version = _VERSIONS.get(self._ask("nvmlDeviceGetNvLinkVersion", handle, index) or 0) or version
            if self._ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, index) == _SWITCH:
                switches += 1
                continue
            remote = _short(self._ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, index))
            if remote in addresses:
                peers[remote] = peers.get(remote, 0) + 1
            elif remote is None:
                unknown += 1
        return NvmlDevice(link, peers, switches, unknown, version, any(state is not None for state in states))

    def _active(self, handle: Any, index: int) -> bool | None:
        """Whether a device has an active NVLink of that number; None if NVML would not say."""
        call = getattr(self._nvml, "nvmlDeviceGetNvLinkState", None)
        if call is not None:
            try:
                return bool(call(handle, index))
            except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_InvalidArgument):
                return False  # how NVML says that there is none
            except self._nvml.NVMLError as error:
                self._refused.setdefault("nvmlDeviceGetNvLinkState", str(error))
        return None

    def _ask(self, name: str, *arguments: Any) -> Any | None:
        call: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if call is None:
            self._refused.setdefault(name, "this version has no such call")
            return None
        try:
            return call(*arguments)
        except self._nvml.NVMLError as error:
            self._refused.setdefault(name, str(error))
            return None


def _short(info: Any | None) -> str | None:
    """``0000:3b:00.0`` from NVML's ``00000000:3B:00.0``."""
    if info is None:
        return None
    text = info.busId.decode() if isinstance(info.busId, bytes) else str(info.busId)
    return normal_address(text)


def normal_address(address: str) -> str:
    """A PCI address as Linux writes it: four digits of domain where four are enough, in lower case."""
    domain, _, rest = address.strip().lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}" if re.fullmatch("[0-9a-f]{1,8}", domain) else address
