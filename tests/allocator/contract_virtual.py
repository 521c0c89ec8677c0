"""What virtual memory must do on every driver that has it; mixed into the classes of `test_driver_contract.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from memferry_allocator import (
    Driver,
    DriverError,
    DriverOutOfMemory,
    PageKind,
    PageLocation,
    Span,
    UnsupportedError,
)

from .machine import Machine, address, pattern, refused

DEVICE, HOST = PageLocation(PageKind.DEVICE), PageLocation(PageKind.HOST)


class Ranges:
    """Reservations, pages and mappings of a test, taken apart at the end."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.granule = max(driver.page_granularity(DEVICE), driver.page_granularity(HOST))
        self.reservations: list[Span] = []
        self.handles: list[int] = []
        self.mappings: list[Span] = []

    def reserve(self, granules: int) -> int:
        nbytes = granules * self.granule
        self.reservations.append(Span(self.driver.reserve_addresses(nbytes), nbytes))
        return self.reservations[-1].ptr

    def create(self, location: PageLocation = DEVICE, granules: int = 1) -> int:
        self.handles.append(self.driver.create_pages(location, granules * self.granule))
        return self.handles[-1]

    def map(self, base: int, at: int, handle: int, granules: int = 1) -> None:
        span = Span(base + at * self.granule, granules * self.granule)
        self.driver.map_pages(*span, handle, device=0)
        self.mappings.append(span)

    def unmap(self, base: int, at: int, granules: int = 1) -> None:
        span = Span(base + at * self.granule, granules * self.granule)
        self.driver.unmap_pages(*span)
        self.mappings.remove(span)

    def release(self, handle: int) -> None:
        self.driver.release_pages(handle)
        self.handles.remove(handle)

    def mixed(self, *locations: PageLocation) -> int:
        """A reservation with one granule of each location, in order."""
        base = self.reserve(len(locations))
        for at, location in enumerate(locations):
            self.map(base, at, self.create(location))
        return base

    def close(self) -> None:
        self.driver.synchronize(0)
        for span in self.mappings:
            self.driver.unmap_pages(*span)
        for handle in self.handles:
            self.driver.release_pages(handle)
        for span in self.reservations:
            self.driver.release_addresses(*span)


class VirtualMemoryContract:
    """The laws of reserved addresses, pages, and what is between them."""

    @pytest.fixture
    def ranges(self, driver: Driver, machine: Machine) -> Iterator[Ranges]:
        try:
            ranges = Ranges(driver)
        except UnsupportedError as error:
            pytest.skip(str(error))
        yield ranges
        ranges.close()

    def test_granularity(self, ranges: Ranges) -> None:
        for location in (DEVICE, HOST):
            nbytes = ranges.driver.page_granularity(location)
            assert nbytes >= 4096
            assert nbytes & (nbytes - 1) == 0

    @pytest.mark.parametrize("location", [DEVICE, HOST])
    def test_pages_behind_a_range_are_memory(
        self, machine: Machine, ranges: Ranges, location: PageLocation
    ) -> None:
        base, nbytes = ranges.mixed(location), ranges.granule
        machine.write(base, pattern(nbytes))
        assert np.array_equal(machine.read(base, nbytes), pattern(nbytes))
        machine.driver.fill(base + 5, 7, 100, stream=machine.stream())
        machine.driver.synchronize(0)
        assert set(machine.read(base + 5, 100)) == {7}

    def test_a_range_over_several_mappings_is_one(self, machine: Machine, ranges: Ranges) -> None:
        base, nbytes = ranges.mixed(DEVICE, HOST, DEVICE), 3 * ranges.granule
        stream, data = machine.stream(), machine.pinned(nbytes)
        data[:] = pattern(nbytes)
        other = machine.device(nbytes)
        with machine.driver.launch(stream, reads=[Span(base + 1, nbytes - 1)], writes=[Span(base, 1)]):
            pass
        machine.driver.copy(base, address(data), nbytes, stream=stream)
        machine.driver.fill(base + ranges.granule - 3, 9, ranges.granule + 6, stream=stream)
        machine.driver.copy(other, base, nbytes, stream=stream)
        stream.synchronize()
        expected = pattern(nbytes)
        expected[ranges.granule - 3 : 2 * ranges.granule + 3] = 9
        assert np.array_equal(machine.read(other, nbytes), expected)

    def test_pages_mapped_twice_are_the_same_bytes(self, machine: Machine, ranges: Ranges) -> None:
        base, handle = ranges.reserve(3), ranges.create()
        ranges.map(base, 0, handle)
        ranges.map(base, 2, handle)
        machine.write(base + 10, pattern(1000))
        assert np.array_equal(machine.read(base + 2 * ranges.granule + 10, 1000), pattern(1000))

    def test_pages_keep_their_bytes_when_they_move(self, machine: Machine, ranges: Ranges) -> None:
        base, handle = ranges.reserve(2), ranges.create()
        ranges.map(base, 0, handle)
        machine.write(base, pattern(5000))
        ranges.unmap(base, 0)
        ranges.map(base, 1, handle)
        assert np.array_equal(machine.read(base + ranges.granule, 5000), pattern(5000))

    def test_mapped_pages_outlive_their_handle(self, machine: Machine, ranges: Ranges) -> None:
        base, handle = ranges.reserve(1), ranges.create()
        ranges.map(base, 0, handle)
        machine.write(base, pattern(5000))
        ranges.release(handle)
        assert np.array_equal(machine.read(base, 5000), pattern(5000))
        with refused("INVALID_VALUE"):
            machine.driver.map_pages(base, ranges.granule, handle, device=0)

    def test_device_pages_take_the_devices_memory(self, ranges: Ranges) -> None:
        driver = ranges.driver
        ranges.mixed(DEVICE)
        before = driver.memory_info(0).free
        base, handle = ranges.reserve(8), ranges.create(DEVICE, 8)
        assert before - driver.memory_info(0).free >= 8 * ranges.granule
        ranges.map(base, 0, handle, 8)
        ranges.release(handle)
        assert before - driver.memory_info(0).free >= 8 * ranges.granule
        ranges.unmap(base, 0, 8)
        assert before - driver.memory_info(0).free < 8 * ranges.granule

    def test_out_of_device_pages(self, ranges: Ranges) -> None:
        nbytes = (ranges.driver.device_info(0).capacity // ranges.granule + 4) * ranges.granule
        with pytest.raises(DriverOutOfMemory) as caught:
            ranges.driver.create_pages(DEVICE, nbytes)
        assert caught.value.size == nbytes
        assert caught.value.budget == f"{ranges.driver.name}:0"
        ranges.create()

    def test_sizes_are_whole_granules(self, ranges: Ranges) -> None:
        driver, granule = ranges.driver, ranges.granule
        base = ranges.reserve(4)
        handle = ranges.create(DEVICE, 2)
        for nbytes in (0, -granule, granule - 1, granule + 4096):
            calls: list[Callable[[], object]] = [
                lambda nbytes=nbytes: driver.reserve_addresses(nbytes),  # type: ignore[misc]
                lambda nbytes=nbytes: driver.create_pages(DEVICE, nbytes),  # type: ignore[misc]
                lambda nbytes=nbytes: driver.map_pages(base, nbytes, handle, device=0),  # type: ignore[misc]
                lambda nbytes=nbytes: driver.unmap_pages(base, nbytes),  # type: ignore[misc]
                lambda nbytes=nbytes: driver.release_addresses(base, nbytes),  # type: ignore[misc]
            ]
            for call in calls:
                with refused("INVALID_VALUE"):
                    call()
        with refused("INVALID_VALUE"):
            driver.reserve_addresses(granule, alignment=3)
        ranges.map(base, 1, handle, 2)

    def test_alignment(self, ranges: Ranges) -> None:
        alignment = 8 * ranges.granule
        for _ in range(3):
            base = ranges.driver.reserve_addresses(ranges.granule, alignment=alignment)
            ranges.reservations.append(Span(base, ranges.granule))
            assert base % alignment == 0

    def test_mappings_that_are_refused(self, ranges: Ranges) -> None:
        driver, granule = ranges.driver, ranges.granule
        base, one, two = ranges.reserve(4), ranges.create(), ranges.create(HOST, 2)
        ranges.map(base, 1, one)
        for start, nbytes, handle in [
            (base + granule, granule, one),  # mapped already
            (base, 2 * granule, two),  # overlaps its end
            (base + granule, 2 * granule, two),  # its start
            (base + 3 * granule, 2 * granule, two),  # leaves the reservation
            (base - granule, granule, one),
            (base + 2 * granule + 4096, granule, one),  # begins within a granule
            (base + 2 * granule, granule, two),  # not the size of the pages
            (base + 2 * granule, granule, 987654321),  # no such pages
        ]:
            with refused("INVALID_VALUE"):
                driver.map_pages(start, nbytes, handle, device=0)
        ranges.map(base, 2, two, 2)

    def test_unmapping(self, ranges: Ranges) -> None:
        driver, granule = ranges.driver, ranges.granule
        base, large = ranges.reserve(5), ranges.create(DEVICE, 2)
        ranges.map(base, 0, large, 2)
        ranges.map(base, 2, ranges.create(HOST))
        for at, granules in [(0, 1), (1, 1), (1, 2), (3, 1), (0, 4), (2, 2), (6, 1)]:
            with refused("INVALID_VALUE"):
                driver.unmap_pages(base + at * granule, granules * granule)
        driver.unmap_pages(base, 3 * granule)  # whole mappings, several at once
        ranges.mappings.clear()
        with refused("INVALID_VALUE"):
            driver.unmap_pages(base, 2 * granule)
        ranges.map(base, 3, large, 2)

    def test_releasing(self, ranges: Ranges) -> None:
        driver, granule = ranges.driver, ranges.granule
        base, handle = ranges.reserve(4), ranges.create()
        ranges.map(base, 1, handle)
        for start, nbytes in [
            (base, 4 * granule),
            (base, granule),
            (base + granule, 3 * granule),
            (base, 8 * granule),
        ]:
            with refused("INVALID_VALUE"):
                driver.release_addresses(start, nbytes)
        ranges.unmap(base, 1)
        driver.release_addresses(base, 4 * granule)
        ranges.reservations.clear()
        with refused("INVALID_VALUE"):
            driver.release_addresses(base, 4 * granule)
        with refused("INVALID_VALUE"):
            driver.map_pages(base, granule, handle, device=0)
        ranges.release(handle)
        with refused("INVALID_VALUE"):
            driver.release_pages(handle)

    def test_what_is_not_mapped_is_no_memory(self, machine: Machine, ranges: Ranges) -> None:
        granule, stream, ptr = ranges.granule, machine.stream(), machine.device(4 * ranges.granule)
        base = ranges.reserve(4)
        ranges.map(base, 0, ranges.create())
        ranges.map(base, 2, ranges.create(HOST))
        for start, nbytes in [(granule, 16), (granule - 8, 16), (0, 3 * granule), (2 * granule - 8, granule + 16)]:
            for call in (
                lambda at=base + start, n=nbytes: machine.driver.copy(ptr, at, n, stream=stream),
                lambda at=base + start, n=nbytes: machine.driver.copy(at, ptr, n, stream=stream),
                lambda at=base + start, n=nbytes: machine.driver.fill(at, 0, n, stream=stream),
            ):
                with pytest.raises(DriverError):
                    call()
        machine.driver.fill(base, 1, granule, stream=stream)

    def test_other_locations(self, ranges: Ranges) -> None:
        driver = ranges.driver
        for location in (PageLocation(PageKind.DEVICE, driver.device_count), PageLocation(PageKind.HOST, 4097)):
            for call in (driver.page_granularity, lambda where: driver.create_pages(where, ranges.granule)):
                with pytest.raises((DriverError, UnsupportedError)):
                    call(location)
        base, handle = ranges.reserve(1), ranges.create()
        with refused("INVALID_DEVICE"):
            driver.map_pages(base, ranges.granule, handle, device=driver.device_count)
