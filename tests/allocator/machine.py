"""Memory of a driver under test, read and written by driver calls only, and given back at the end."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from memferry_allocator import Driver, DriverError, Stream, registrations
from memferry_allocator.host import Registration

Bytes = npt.NDArray[np.uint8]


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    """Random bytes, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def address(data: Bytes) -> int:
    return int(data.ctypes.data)


def pages(nbytes: int) -> Bytes:
    """Anonymous zero pages of their own; unmapped with the last array of them."""
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)


@contextmanager
def refused(code: str, kind: type[DriverError] = DriverError) -> Iterator[None]:
    """The block must raise the driver's answer `code`."""
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.code == f"CUDA_ERROR_{code}"
    assert caught.value.code in str(caught.value)
    assert caught.value.call


class Machine:
    """A driver, and what a test takes from it."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._streams: list[Stream] = []
        self._device: list[tuple[int, int]] = []
        self._pinned: list[Registration] = []
        self.keep: list[Bytes] = []
        self._last: list[Callable[[], None]] = []

    def finally_do(self, action: Callable[[], None]) -> None:
        """Do something at the end, once everything has been waited for."""
        self._last.append(action)

    def stream(self, device: int = 0) -> Stream:
        stream = self.driver.create_stream(device)
        self._streams.append(stream)
        return stream

    def device(self, nbytes: int, device: int = 0) -> int:
        ptr = self.driver.malloc(device, nbytes)
        self._device.append((device, ptr))
        return ptr

    def pinned(self, nbytes: int) -> Bytes:
        """Registered host memory, exactly the array."""
        data = pages(nbytes)
        self._pinned.append(registrations(self.driver).register(address(data), nbytes))
        self.keep.append(data)
        return data

    def mapped(self, data: Bytes, device: int = 0) -> int:
        """The pointer under which `device` reaches a registered array."""
        return self.driver.host_device_pointer(address(data), device)

    def read(self, ptr: int, nbytes: int, *, device: int = 0) -> Bytes:
        """What is behind any pointer, after the work enqueued so far on that device."""
        self.driver.synchronize(device)
        out = np.empty(nbytes, np.uint8)
        stream = self.driver.create_stream(device)
        self.driver.copy(address(out), ptr, nbytes, stream=stream)
        stream.close()
        return out

    def write(self, ptr: int, data: Bytes, *, device: int = 0) -> None:
        stream = self.driver.create_stream(device)
        self.driver.copy(ptr, address(data), data.nbytes, stream=stream)
        stream.close()

    def close(self) -> None:
        """Wait for everything and give it back, what a test has given back already excepted."""
        for device in range(self.driver.device_count):
            self.driver.synchronize(device)
        for action in reversed(self._last):
            action()
        for stream in self._streams:
            stream.close()
        for device, ptr in self._device:
            self.driver.free(device, ptr)
        for held in self._pinned:
            held.close()
