"""The memory and streams that measurements use, made when first asked for and kept until the end."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memferry_allocator import ArenaOptions, Driver, HostArena, Span, Stream

from ..health import allow_peer_access
from .errors import CorruptedError

Bytes = npt.NDArray[np.uint8]
_STEP = np.uint64(0x9E3779B97F4A7C15)  # odd: no two words of the pattern are equal


def pattern(nbytes: int, device: int = 0) -> Bytes:
    """Bytes of which no two aligned words are equal, and no two devices' words in the same place."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    words *= _STEP
    words ^= np.uint64(device + 1)
    return words.view(np.uint8)[:nbytes]


class Buffers:
    """Host and device memory by device and role; not thread-safe.

    The host memory is a `HostArena` on the device's NUMA node.  What is asked for under ``"source"`` holds the
    pattern of its device, on the host and on the device; nothing else has contents anyone may count on.

    Parameters
    ----------
    driver : Driver
    nbytes : int
        Of every buffer, unless another size is asked for.
    """

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.driver = driver
        self.nbytes = nbytes
        self._arenas: dict[tuple[int, str], HostArena] = {}
        self._hosts: dict[tuple[int, str], Bytes] = {}
        self._devices: dict[tuple[int, str], int] = {}
        self._streams: dict[tuple[int, str], Stream] = {}

    def host(self, device: int, role: str, nbytes: int | None = None) -> Span:
        """Registered host memory near a device."""
        array = self.host_array(device, role, nbytes)
        return Span(int(array.ctypes.data), array.nbytes)

    def host_array(self, device: int, role: str, nbytes: int | None = None) -> Bytes:
        """The same, as an array."""
        key = (device, role)
        if key not in self._hosts:
            node = self.driver.device_info(device).numa_node
            arena = self._arenas[key] = HostArena(self.driver, nbytes or self.nbytes, ArenaOptions(numa_node=node))
            array = self._hosts[key] = arena.array(arena.cut(nbytes or self.nbytes))
            if role == "source":
                with self.driver.host_access(writes=[Span(int(array.ctypes.data), array.nbytes)], label="pattern"):
                    array[:] = pattern(array.nbytes, device)
        return self._hosts[key]

    def device(self, device: int, role: str, nbytes: int | None = None) -> int:
        """Device memory."""
        key = (device, role)
        if key not in self._devices:
            ptr = self._devices[key] = self.driver.malloc(device, nbytes or self.nbytes)
            if role == "source":
                self._copy(device, ptr, self.host(device, "source").ptr, self.nbytes)
        return self._devices[key]

    def stream(self, device: int, role: str) -> Stream:
        """A stream of a device."""
        key = (device, role)
        if key not in self._streams:
            self._streams[key] = self.driver.create_stream(device)
        return self._streams[key]

    def can_reach(self, device: int, peer: int) -> bool:
        """Whether one device reads and writes another's memory; from then on it may, and stays so."""
        if not self.driver.can_access_peer(device, peer):
            return False
        allow_peer_access(self.driver, device, peer)
        return True

    # -- what arrived ----------------------------------------------------------------------------------
    def clear_device(self, device: int, ptr: int, nbytes: int) -> None:
        """Make sure that bytes found at `ptr` later have come there since."""
        stream = self.stream(device, "check")
        self.driver.fill(ptr, 0, nbytes, stream=stream)
        stream.synchronize()

    def clear_host(self, device: int, role: str, nbytes: int) -> None:
        array = self.host_array(device, role)[:nbytes]
        with self.driver.host_access(writes=[Span(int(array.ctypes.data), nbytes)], label="clear"):
            array[:] = 0

    def check_device(self, device: int, ptr: int, nbytes: int, *, of: int) -> None:
        """Refuse device memory that does not hold the pattern of device `of`."""
        self._copy(device, self.host(device, "check").ptr, ptr, nbytes)
        self.check_host(device, "check", nbytes, of=of)

    def check_host(self, device: int, role: str, nbytes: int, *, of: int) -> None:
        """Refuse host memory that does not hold the pattern of device `of`.  Errors as for `check_bytes`."""
        self.check_bytes(self.host_array(device, role)[:nbytes], device, of=of)

    def check_bytes(self, found: Bytes, device: int, *, of: int) -> None:
        """The same of any host memory that `device` has copied.

        Raises
        ------
        CorruptedError
        """
        wanted = self.host_array(of, "source")[: found.nbytes]
        spans = [Span(int(array.ctypes.data), array.nbytes) for array in (found, wanted)]
        with self.driver.host_access(reads=spans, label="verify"):
            if np.array_equal(_words(found), _words(wanted)):
                return
            first = int(np.argmax(found != wanted))
        raise CorruptedError(
            f"verification: of {found.nbytes} bytes copied with device {device}, byte {first} arrived wrong; "
            "check the machine's links and its IOMMU before any copy of it is trusted"
        )

    def close(self) -> None:
        """Wait for everything and give it back."""
        for stream in self._streams.values():
            stream.close()
        for (device, _), ptr in self._devices.items():
            self.driver.free(device, ptr)
        self._hosts.clear()
        for arena in self._arenas.values():
            arena.close()
        for held in (self._streams, self._devices, self._arenas):
            held.clear()

    def _copy(self, device: int, dst: int, src: int, nbytes: int) -> None:
        stream = self.stream(device, "check")
        self.driver.copy(dst, src, nbytes, stream=stream)
        stream.synchronize()


def _words(array: Bytes) -> npt.NDArray[Any]:
    return array.view(np.uint64) if array.nbytes % 8 == 0 else array
