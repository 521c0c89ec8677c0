"""Whether bytes come over a link as they were: peer links exist that say yes and deliver something else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from memferry_allocator import Driver, DriverError, HostArena
from memferry_allocator.driver import Stream

PATTERN_BYTES = 64 << 10
_SEED = 0x5EED


def arrives(driver: Driver, stops: Sequence[int], *, on: int) -> bool:
    """Send a pattern from the host over the memory of devices and back, and compare.

    Blocks the calling thread for it.  Nothing of the caller's is touched.

    Parameters
    ----------
    driver : Driver
    stops : sequence of int
        Devices, in order.
    on : int
        The device whose stream carries it.
    """
    arena, stream = HostArena(driver, 2 * PATTERN_BYTES), driver.create_stream(on)
    taken: list[tuple[int, int]] = []
    try:
        for device in stops:
            taken.append((device, driver.malloc(device, PATTERN_BYTES)))
        return _compare(driver, arena, [ptr for _, ptr in taken], stream)
    finally:
        stream.close()
        for device, ptr in taken:
            driver.free(device, ptr)
        arena.close()


def _compare(driver: Driver, arena: HostArena, stops: Sequence[int], stream: Stream) -> bool:
    sent, back = arena.cut(PATTERN_BYTES), arena.cut(PATTERN_BYTES)
    pattern = np.random.default_rng(_SEED + len(stops)).integers(0, 256, PATTERN_BYTES, dtype=np.uint8)
    with driver.host_access(writes=[sent, back]):
        arena.array(sent)[:] = pattern
        arena.array(back)[:] = ~pattern
    for ptr in stops:  # what lay there before must not pass for the pattern
        driver.copy(ptr, back.ptr, PATTERN_BYTES, stream=stream)
    route = [sent.ptr, *stops, back.ptr]
    for src, dst in itertools.pairwise(route):
        driver.copy(dst, src, PATTERN_BYTES, stream=stream)
    stream.synchronize()
    with driver.host_access(reads=[back]):
        return bool(np.array_equal(arena.array(back), pattern))


def allow_peer_access(driver: Driver, device: int, peer: int) -> None:
    """Let `device` reach memory of `peer`, if it does not yet; it stays so, since others may count on it then."""
    try:
        driver.enable_peer_access(device, peer)
    except DriverError as error:
        if error.code != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
            raise
