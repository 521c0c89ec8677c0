"""Single copies by the copy engines: what the cases are put together from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from memferry_allocator import Direction

from .bench import Bench, Load

GB = 1e9


class Side(Enum):
    """Which device's copy engines carry a copy between two devices, in nvbandwidth's words."""

    READ = "read"  # the one that gets the bytes
    WRITE = "write"  # the one that has them


@dataclass(frozen=True)
class Copy:
    """A copy that is repeated.

    Attributes
    ----------
    load : Load
    nbytes : int
        Of one copy.
    """

    load: Load
    nbytes: int

    def rates(self, seconds: list[float]) -> list[float]:
        """Samples in GB/s."""
        return [self.nbytes / sample / GB for sample in seconds]


def host_copy(
    bench: Bench, device: int, direction: Direction, nbytes: int | None = None, *, beside: bool = False
) -> Copy:
    """A copy between a device and host memory near it.

    Parameters
    ----------
    beside : bool
        It only runs beside what is measured: twice the size, so that it does not end first.
    """
    options, buffers = bench.options, bench.buffers
    size = nbytes or options.nbytes
    size, times = (2 * size if beside else size), options.copies_of(size)
    stream = buffers.stream(device, direction.value + "beside" * beside)
    if direction is Direction.HOST_TO_DEVICE:
        src, dst = buffers.host(device, "source").ptr, buffers.device(device, "target")
    else:
        src, dst = buffers.device(device, "source"), buffers.host(device, "home").ptr
    return Copy(Load(stream, lambda: bench.driver.copy(dst, src, size, stream=stream), times), size)


def peer_copy(bench: Bench, source: int, target: int, side: Side, *, into: str = "target") -> Copy:
    """A copy from one device's memory to another's, or within one; `into` its buffer of that role."""
    options, buffers = bench.options, bench.buffers
    stream = buffers.stream(target if side is Side.READ else source, f"peer {source} {target}")
    src, dst = buffers.device(source, "source"), buffers.device(target, into)
    size = options.nbytes
    return Copy(Load(stream, lambda: bench.driver.copy(dst, src, size, stream=stream), options.copies), size)


def clear(bench: Bench, device: int, direction: Direction, nbytes: int | None = None) -> None:
    """Before a measurement: nothing is where the bytes of a `host_copy` will arrive."""
    if bench.options.verify:
        size = nbytes or bench.options.nbytes
        if direction is Direction.HOST_TO_DEVICE:
            bench.buffers.clear_device(device, bench.buffers.device(device, "target"), size)
        else:
            bench.buffers.clear_host(device, "home", size)


def check(bench: Bench, device: int, direction: Direction, nbytes: int | None = None) -> None:
    """After it: they have arrived.

    Raises
    ------
    CorruptedError
    """
    if bench.options.verify:
        size = nbytes or bench.options.nbytes
        if direction is Direction.HOST_TO_DEVICE:
            bench.buffers.check_device(device, bench.buffers.device(device, "target"), size, of=device)
        else:
            bench.buffers.check_host(device, "home", size, of=device)
