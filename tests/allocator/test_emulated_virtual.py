"""Virtual memory of the emulated device: capacities, poison, and the order of accesses through any address."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from memferry_allocator import DriverError, DriverOutOfMemory, EmulatedDriver, RaceError, Span

from .contract_virtual import DEVICE, HOST, Ranges
from .machine import Machine, address

MIB = 1 << 20


@pytest.fixture
def late(emulate: Callable[..., Machine]) -> Machine:
    return emulate(device_count=2, device_memory=16 * MIB, eagerness=0.0)


def test_host_pages_take_no_device_memory(late: Machine) -> None:
    ranges = Ranges(late.driver)
    ranges.mixed(*[HOST] * 16, *[DEVICE] * 4)
    assert late.driver.memory_info(0).free == 8 * MIB
    assert late.driver.memory_info(1).free == 16 * MIB
    with pytest.raises(DriverOutOfMemory):
        late.driver.malloc(0, 8 * MIB + 1)
    with pytest.raises(DriverOutOfMemory):
        late.driver.create_pages(DEVICE, 10 * MIB)
    ranges.close()
    assert late.driver.memory_info(0).free == 16 * MIB


@pytest.mark.parametrize("location", [DEVICE, HOST])
def test_new_pages_are_poisoned(late: Machine, location: object) -> None:
    ranges = Ranges(late.driver)
    for _ in range(2):
        base = ranges.mixed(location)  # type: ignore[arg-type]
        seen = late.driver.host_bytes(base, ranges.granule)
        assert seen is not None
        assert set(np.frombuffer(seen, np.uint8)) == {0xFF}
        seen[:] = bytes(len(seen))
        seen.release()
        ranges.close()
        ranges = Ranges(late.driver)


def test_a_view_that_is_kept_sees_poison(late: Machine) -> None:
    ranges = Ranges(late.driver)
    seen = late.driver.host_bytes(ranges.mixed(DEVICE, HOST), 2 * ranges.granule)
    assert seen is not None
    ranges.close()
    gc.collect()
    assert set(np.frombuffer(seen, np.uint8)) == {0xFE}


def test_host_bytes_span_mappings_but_no_hole(late: Machine) -> None:
    ranges = Ranges(late.driver)
    base = ranges.mixed(DEVICE, HOST)
    seen = late.driver.host_bytes(base + ranges.granule - 4, 8)
    assert seen is not None
    seen[:] = bytes(range(8))
    assert list(late.read(base + ranges.granule, 4)) == [4, 5, 6, 7]
    ranges.unmap(base, 1)
    with pytest.raises(DriverError):
        late.driver.host_bytes(base + ranges.granule - 4, 8)
    seen.release()
    ranges.close()


def test_two_addresses_of_the_same_pages_race(late: Machine) -> None:
    ranges = Ranges(late.driver)
    base, handle = ranges.reserve(2), ranges.create()
    ranges.map(base, 0, handle)
    ranges.map(base, 1, handle)
    one, other = late.stream(), late.stream()
    late.driver.fill(base + 8, 1, 8, stream=one)
    late.driver.fill(base + ranges.granule, 1, 8, stream=other)  # other bytes of the same pages
    with pytest.raises(RaceError):
        late.driver.fill(base + ranges.granule + 12, 1, 8, stream=other)
    other.wait(one.record())
    late.driver.fill(base + ranges.granule + 12, 1, 8, stream=other)
    ranges.close()


def test_a_race_on_any_part_of_a_range_is_seen(late: Machine) -> None:
    ranges = Ranges(late.driver)
    base, data = ranges.mixed(DEVICE, HOST, DEVICE), late.pinned(3 * ranges.granule)
    one, other = late.stream(), late.stream()
    for at in range(3):
        late.driver.fill(base + at * ranges.granule, 1, 8, stream=one)
        with pytest.raises(RaceError):
            late.driver.copy(address(data), base, 3 * ranges.granule, stream=other)
        with pytest.raises(RaceError):
            late.driver.launch(other, reads=[Span(base, 3 * ranges.granule)])
        one.synchronize()
    late.driver.copy(address(data), base, 3 * ranges.granule, stream=other)
    other.synchronize()
    ranges.close()


def test_unmapping_what_is_in_use(late: Machine) -> None:
    ranges = Ranges(late.driver)
    base, stream = ranges.mixed(DEVICE, HOST), late.stream()
    late.driver.fill(base + ranges.granule, 1, 8, stream=stream)
    with pytest.raises(RaceError, match="unmap_pages"):
        ranges.unmap(base, 1)
    ranges.unmap(base, 0)  # its neighbour is not
    stream.synchronize()
    ranges.unmap(base, 1)
    ranges.close()


def test_mapped_for_one_device_only(late: Machine) -> None:
    ranges = Ranges(late.driver)
    base, ptr, stream = ranges.mixed(DEVICE), late.device(8, 1), late.stream(1)
    for call in (
        lambda: late.driver.fill(base, 0, 8, stream=stream),
        lambda: late.driver.copy(ptr, base, 8, stream=stream),
        lambda: late.driver.copy(base, ptr, 8, stream=stream),
        lambda: late.driver.launch(stream, reads=[Span(base, 8)]),
    ):
        with pytest.raises(DriverError, match="device"):
            call()
    ranges.close()


def test_a_range_partly_on_the_host_goes_at_the_links_pace(late: Machine) -> None:
    driver = late.driver
    assert isinstance(driver, EmulatedDriver)
    ranges, stream = Ranges(driver), late.stream()
    times = []
    for base in (ranges.mixed(DEVICE, DEVICE), ranges.mixed(DEVICE, HOST)):
        start = driver.now
        driver.copy(late.device(ranges.granule), base + ranges.granule // 2, ranges.granule, stream=stream)
        stream.synchronize()
        times.append(driver.now - start)
    link = driver.options.host_to_device
    assert times[1] == pytest.approx(link.seconds(ranges.granule))
    assert times[0] < times[1] / 5
    ranges.close()
