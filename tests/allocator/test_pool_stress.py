"""Threads that take memory and others that give it back, on streams of their own."""

from __future__ import annotations

import queue
import random
from typing import Any

import pytest

from memferry_allocator import DevicePool, EmulatedDriver, EmulatedOptions, SizeOnlyDriver, VirtualMemory

from ..threads import in_threads
from .blocks import Blocks

KIB, MIB = 1 << 10, 1 << 20
SIZES = (256, 1000, 4096, 4096, 64 * KIB, MIB)


def hand_over(pool: DevicePool, operations: int, *, look: bool) -> None:
    """Four threads take, four give back what they are handed; `look` has every block's bytes checked."""
    driver = pool.driver
    lines: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(4)]
    turns = operations // 8

    def take(number: int) -> None:
        choose, stream, blocks = random.Random(number), driver.create_stream(0), Blocks(pool)
        for _ in range(turns):
            nbytes = choose.choice(SIZES)
            if look:
                block = blocks.take(nbytes, stream)
                lines[number].put((block, stream.record(), driver.publish()))
            else:
                lines[number].put((pool.allocate(nbytes, stream=stream), nbytes))
        lines[number].put(None)
        stream.close()

    def give(number: int) -> None:
        stream, blocks = driver.create_stream(0), Blocks(pool)
        while (item := lines[number].get()) is not None:
            if look:
                block, written, token = item
                driver.observe(token)
                stream.wait(written)
                blocks.held.append(block)
                blocks.give(block, stream)
            else:
                pool.deallocate(*item, stream=stream)
        stream.close()

    in_threads(8, lambda number: take(number) if number < 4 else give(number - 4))
    assert pool.used == 0


def test_every_block_keeps_its_bytes() -> None:
    driver = EmulatedDriver(EmulatedOptions(device_memory=2 << 30))
    source = VirtualMemory(driver, 0, 8 << 30)
    pool = DevicePool(driver, 0, 0, maximum=2 << 30, source=source)
    hand_over(pool, 1600, look=True)
    assert pool.largest_free == pool.reserved
    pool.close()
    source.close()


def churn(operations: int) -> None:
    driver = SizeOnlyDriver(1 << 42)
    pool = DevicePool(driver, 0, 0, maximum=1 << 42, source=VirtualMemory(driver, 0, 1 << 44))
    hand_over(pool, operations, look=False)
    assert pool.largest_free == pool.reserved
    pool.close()


def test_no_byte_is_lost() -> None:
    churn(20_000)


@pytest.mark.slow
def test_no_byte_is_lost_in_a_million_operations() -> None:
    churn(1_000_000)
