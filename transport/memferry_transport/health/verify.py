"""Whether bytes come over a link as they were: peer links exist that say yes and deliver something else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import numpy as np

from memferry_allocator import Direction, Driver, DriverError, HostArena
from memferry_allocator.driver import Stream

PATTERN_BYTES = 64 << 10
_SEED = 0x5EED


def arrives(driver: Driver, stops: Sequence[int], *, on: int, kernel: Direction | None = None) -> bool:
    """Send a pattern from the host over the memory of devices and back, and compare.

    Blocks the calling thread for it.  Nothing of the caller's is touched.

    Parameters
    ----------
    driver : Driver
    stops : sequence of int
        Devices, in order.
    on : int
        The device whose stream carries it from one to the next; to and from the host it is their own.
    kernel : Direction, optional
        The hop from, or to, the host that a kernel of `on` makes instead.
    """
    with contextlib.ExitStack() as last_to_first:  # all is given back, even if a device is lost meanwhile
        arena = HostArena(driver, 2 * PATTERN_BYTES)
        last_to_first.callback(arena.close)
        taken: list[tuple[int, int]] = []
        for device in stops:
            taken.append((device, driver.malloc(device, PATTERN_BYTES)))
            last_to_first.callback(driver.free, *taken[-1])
        streams: dict[int, Stream] = {}
        for device in dict.fromkeys((*stops, on)):
            streams[device] = driver.create_stream(device)
            last_to_first.callback(streams[device].close)
        return _compare(driver, arena, taken, streams, on, kernel)


def _compare(
    driver: Driver,
    arena: HostArena,
    stops: Sequence[tuple[int, int]],
    streams: dict[int, Stream],
    on: int,
    kernel: Direction | None,
) -> bool:
    sent, back = arena.cut(PATTERN_BYTES), arena.cut(PATTERN_BYTES)
    pattern = np.random.default_rng(_SEED + len(stops)).integers(0, 256, PATTERN_BYTES, dtype=np.uint8)
    with driver.host_access(writes=[sent, back]):
        arena.array(sent)[:] = pattern
        arena.array(back)[:] = ~pattern

    def carry(dst: int, src: int, device: int) -> None:
        driver.copy(dst, src, PATTERN_BYTES, stream=streams[device])
        streams[device].synchronize()

    def carry_by_kernel(dst: int, src: int) -> None:
        driver.kernel_copy(dst, src, PATTERN_BYTES, stream=streams[on])
        streams[on].synchronize()

    for device, ptr in stops:  # what lay there before must not pass for the pattern
        carry(ptr, back.ptr, device)
    (first, start), (last, end) = stops[0], stops[-1]
    if kernel is Direction.HOST_TO_DEVICE:
        carry_by_kernel(start, driver.host_device_pointer(sent.ptr, on))
    else:
        carry(start, sent.ptr, first)
    for (_, src), (_, dst) in itertools.pairwise(stops):
        carry(dst, src, on)
    if kernel is Direction.DEVICE_TO_HOST:
        carry_by_kernel(driver.host_device_pointer(back.ptr, on), end)
    else:
        carry(back.ptr, end, last)
    with driver.host_access(reads=[back]):
        return bool(np.array_equal(arena.array(back), pattern))


def allow_peer_access(driver: Driver, device: int, peer: int) -> None:
    """Let `device` reach memory of `peer`, if it does not yet; it stays so, since others may count on it then."""
    try:
        driver.enable_peer_access(device, peer)
    except DriverError as error:
        if error.code != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
            raise
