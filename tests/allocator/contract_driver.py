"""What every driver must do.  `test_driver_contract.py` applies it to each of them.

To put a driver under the contract, derive a class named ``Test...`` and give it the fixture `driver`; or name a
registered one: ``pytest tests/allocator/test_given_driver.py --driver NAME`` (docs/new-accelerator.md).
Memory is only touched by driver calls, so that the laws hold for memory which the host cannot reach; and
whatever is freed or unregistered has been waited for, as the seam demands.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from memferry_allocator import (
    Driver,
    DriverError,
    DriverOutOfMemory,
    EmulatedDriver,
    InvalidRequestError,
    MemFerryError,
    OutOfMemory,
    Span,
    Stream,
    UnsupportedError,
)

from .machine import Bytes, Machine, address, pages, pattern, refused

KIB, MIB = 1 << 10, 1 << 20
KINDS = ("device", "registered", "mapped", "pageable")


class DriverContract:
    """The laws, by what they are about."""

    big = MIB  # bytes of a copy that a device needs a while for

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        raise NotImplementedError

    @pytest.fixture
    def machine(self, driver: Driver, request: pytest.FixtureRequest) -> Iterator[Machine]:
        needs = request.node.get_closest_marker("devices")
        if needs and driver.device_count < needs.args[0]:
            pytest.skip(f"needs {needs.args[0]} devices, {driver.name} has {driver.device_count}")
        machine = Machine(driver)
        yield machine
        machine.close()

    # -- devices ------------------------------------------------------------------------------------
    def test_device_info(self, driver: Driver) -> None:
        infos = [driver.device_info(device) for device in range(driver.device_count)]
        assert len({info.uuid for info in infos}) == len(infos) >= 1
        for ordinal, info in enumerate(infos):
            assert info.ordinal == ordinal
            assert info.name
            assert info.capacity > 0
            assert info.capabilities["HOST_REGISTER_SUPPORTED"] in (0, 1)
            assert info.numa_node is None or info.numa_node >= 0
            assert info.pci_address is None or re.fullmatch(
                "[0-9a-f]{8}:[0-9a-f]{2}:[0-9a-f]{2}.0", info.pci_address
            )
            assert info == driver.device_info(ordinal)
        assert re.fullmatch(r"[a-z][a-z0-9_]*", driver.name)

    @pytest.mark.parametrize("offset", [-1, "count"])
    def test_a_device_that_is_not_there(self, driver: Driver, offset: Any) -> None:
        device = driver.device_count if offset == "count" else offset
        calls: list[Callable[[], object]] = [
            lambda: driver.device_info(device),
            lambda: driver.memory_info(device),
            lambda: driver.synchronize(device),
            lambda: driver.malloc(device, 256),
            lambda: driver.free(device, 0),
            lambda: driver.create_stream(device),
            lambda: driver.create_event(device),
            lambda: driver.stream_from_handle(device, 1),
            lambda: driver.can_access_peer(0, device),
            lambda: driver.can_access_peer(device, 0),
        ]
        for call in calls:
            with refused("INVALID_DEVICE"):
                call()

    def test_memory_info_moves_with_malloc(self, machine: Machine) -> None:
        nbytes = min(64 * MIB, machine.driver.device_info(0).capacity // 4)
        machine.device(1)  # whatever the driver sets up with the first call
        before = machine.driver.memory_info(0)
        ptr = machine.driver.malloc(0, nbytes)
        within = machine.driver.memory_info(0)
        machine.driver.free(0, ptr)
        after = machine.driver.memory_info(0)
        assert before.total == within.total == after.total <= machine.driver.device_info(0).capacity
        assert before.free - within.free >= nbytes
        assert after.free - within.free >= nbytes

    # -- device memory --------------------------------------------------------------------------------
    def test_allocations_are_aligned_and_apart(self, machine: Machine) -> None:
        sizes = [1, 2, 255, 256, 257, 1000, 4096, 5000, 65537, 1, 3]
        spans = sorted(Span(machine.device(size), size) for size in sizes)
        assert all(span.ptr % 256 == 0 for span in spans)
        for one, other in itertools.pairwise(spans):
            assert one.ptr + one.nbytes <= other.ptr

    def test_allocations_hold_their_bytes(self, machine: Machine) -> None:
        written = [(machine.device(size), pattern(size, size)) for size in (1, 257, 4096, 70_001)]
        for ptr, data in written:
            machine.write(ptr, data)
        for ptr, data in written:
            assert np.array_equal(machine.read(ptr, data.nbytes), data)

    @pytest.mark.parametrize("nbytes", [0, -1, -(1 << 70)])
    def test_malloc_of_nothing(self, driver: Driver, nbytes: int) -> None:
        with refused("INVALID_VALUE"):
            driver.malloc(0, nbytes)

    @pytest.mark.parametrize("nbytes", ["capacity", 1 << 60, 1 << 64, 1 << 80])
    def test_out_of_memory_says_how_much(self, driver: Driver, nbytes: Any) -> None:
        size = driver.device_info(0).capacity + 1 if nbytes == "capacity" else nbytes
        with refused("OUT_OF_MEMORY", DriverOutOfMemory):
            driver.malloc(0, size)
        with pytest.raises(OutOfMemory) as caught:
            driver.malloc(0, size)
        error = caught.value
        assert isinstance(error, MemoryError)
        assert error.size == size
        assert 0 <= error.used <= error.limit <= driver.device_info(0).capacity
        assert error.budget == f"{driver.name}:0"
        assert str(size) in str(error)

    def test_an_exhausted_device_recovers(self, machine: Machine) -> None:
        ptr = machine.device(4096)
        with pytest.raises(DriverOutOfMemory):
            machine.device(machine.driver.memory_info(0).total)
        machine.write(ptr, pattern(4096))
        assert np.array_equal(machine.read(ptr, 4096), pattern(4096))

    def test_free(self, driver: Driver) -> None:
        ptr = driver.malloc(0, 4 * MIB)
        with refused("INVALID_VALUE"):
            driver.free(0, ptr + 512)
        driver.free(0, ptr)
        with refused("INVALID_VALUE"):
            driver.free(0, ptr)
        driver.free(0, 0)

    def test_free_of_host_memory(self, machine: Machine) -> None:
        data = machine.pinned(4096)
        with refused("INVALID_VALUE"):
            machine.driver.free(0, address(data))

    # -- registered host memory -----------------------------------------------------------------------
    def test_registered_memory_is_reached_from_the_device(self, machine: Machine) -> None:
        data, stream = machine.pinned(64 * KIB), machine.stream()
        data[:] = pattern(64 * KIB)
        ptr, inside = machine.device(64 * KIB), machine.mapped(data)
        machine.driver.copy(ptr, inside, 64 * KIB, stream=stream)
        machine.driver.fill(inside + 100, 7, 50, stream=stream)
        stream.synchronize()
        expected = pattern(64 * KIB)
        assert np.array_equal(machine.read(ptr, 64 * KIB), expected)
        expected[100:150] = 7
        assert np.array_equal(data, expected)

    def test_device_pointers_of_interior_addresses_keep_the_offset(self, machine: Machine) -> None:
        data = machine.pinned(64 * KIB)
        for offset in (0, 1, 24, 4096 + 24, 64 * KIB - 1):
            assert machine.driver.host_device_pointer(address(data) + offset, 0) == machine.mapped(data) + offset

    def test_device_pointers_of_what_is_not_registered(self, machine: Machine) -> None:
        data = pages(3 * 4096)
        machine.driver.host_register(address(data) + 4096, 4096)
        for offset in (0, 2 * 4096):
            with refused("INVALID_VALUE"):
                machine.driver.host_device_pointer(address(data) + offset, 0)
        machine.driver.host_unregister(address(data) + 4096)
        with refused("INVALID_VALUE"):
            machine.driver.host_device_pointer(address(data) + 4096, 0)

    @pytest.mark.parametrize("nbytes", [0, -1, -4096])
    def test_registering_nothing(self, driver: Driver, nbytes: int) -> None:
        data = pages(4096)
        with refused("INVALID_VALUE"):
            driver.host_register(address(data), nbytes)

    @pytest.mark.parametrize("where", [0, -4096])
    def test_registering_at_no_address(self, driver: Driver, where: int) -> None:
        with refused("INVALID_VALUE"):
            driver.host_register(where, 4096)

    @pytest.mark.parametrize(
        ("start", "nbytes"), [(0, 4), (1, 1), (0, 1), (1, 3), (-1, 2), (2, 3), (-1, 6), (1, 2)]
    )
    def test_overlapping_registrations(self, driver: Driver, start: int, nbytes: int) -> None:
        data, page = pages(8 * 4096), 4096
        base = address(data) + 2 * page
        driver.host_register(base, 4 * page)
        with refused("HOST_MEMORY_ALREADY_REGISTERED"):
            driver.host_register(base + start * page, nbytes * page)
        driver.host_unregister(base)
        driver.host_register(base + start * page, nbytes * page)
        driver.host_unregister(base + start * page)

    def test_unregistering(self, driver: Driver) -> None:
        data, other = pages(4 * 4096), pages(4096)
        driver.host_register(address(data), 4 * 4096)
        with refused("INVALID_VALUE"):
            driver.host_unregister(address(data) + 4096)
        with refused("HOST_MEMORY_NOT_REGISTERED"):
            driver.host_unregister(address(other))
        driver.host_unregister(address(data))
        with refused("HOST_MEMORY_NOT_REGISTERED"):
            driver.host_unregister(address(data))
        driver.host_register(address(data), 4 * 4096)
        driver.host_unregister(address(data))

    # -- copies ---------------------------------------------------------------------------------------
    @pytest.mark.parametrize("source", KINDS)
    @pytest.mark.parametrize("target", KINDS)
    def test_copies_between_all_kinds_of_memory(self, machine: Machine, source: str, target: str) -> None:
        nbytes, stream = 70_001, machine.stream()
        places = [_place(machine, kind, nbytes) for kind in (source, target)]
        machine.write(places[0], pattern(nbytes))
        machine.write(places[1], np.zeros(nbytes, np.uint8))
        machine.driver.copy(places[1] + 1, places[0] + 2, nbytes - 3, stream=stream)
        stream.synchronize()
        expected = np.zeros(nbytes, np.uint8)
        expected[1:-2] = pattern(nbytes)[2:-1]
        assert np.array_equal(machine.read(places[1], nbytes), expected)

    @pytest.mark.parametrize("source", KINDS)
    @pytest.mark.parametrize("target", KINDS)
    def test_copies_rows_between_all_kinds_of_memory(self, machine: Machine, source: str, target: str) -> None:
        rows, width, pitches, stream = 7, 500, (640, 513), machine.stream()
        places = [
            _place(machine, kind, rows * pitch) for kind, pitch in zip((source, target), pitches, strict=True)
        ]
        machine.write(places[0], pattern(rows * pitches[0]))
        machine.write(places[1], np.zeros(rows * pitches[1], np.uint8))
        machine.driver.copy_rows(places[1] + 3, pitches[1], places[0] + 16, pitches[0], width, rows, stream=stream)
        stream.synchronize()
        expected = np.zeros((rows, pitches[1]), np.uint8)
        expected[:, 3 : 3 + width] = pattern(rows * pitches[0]).reshape(rows, -1)[:, 16 : 16 + width]
        assert np.array_equal(machine.read(places[1], rows * pitches[1]), expected.reshape(-1))

    def test_rows_that_overlap_are_refused(self, machine: Machine) -> None:
        ptr, data, stream = machine.device(4096), machine.pinned(4096), machine.stream()
        machine.write(ptr, pattern(4096))
        with refused("INVALID_VALUE"):
            machine.driver.copy_rows(ptr, 128, address(data), 256, 129, 2, stream=stream)
        with refused("INVALID_VALUE"):
            machine.driver.copy_rows(ptr, 256, address(data), 128, 129, 2, stream=stream)
        machine.driver.copy_rows(ptr, 256, address(data), 256, 64, 0, stream=stream)
        machine.driver.copy_rows(ptr, 256, address(data), 256, 0, 4, stream=stream)
        assert np.array_equal(machine.read(ptr, 4096), pattern(4096))

    @pytest.mark.devices(2)
    def test_copies_between_devices(self, machine: Machine) -> None:
        there, here = machine.device(70_001, 0), machine.device(70_001, 1)
        machine.write(there, pattern(70_001))
        for device in (0, 1):
            stream = machine.stream(device)
            machine.driver.fill(here, 0, 70_001, stream=machine.stream(1))
            machine.driver.synchronize(1)
            machine.driver.copy(here, there, 70_001, stream=stream)
            stream.synchronize()
            assert np.array_equal(machine.read(here, 70_001, device=1), pattern(70_001))

    def test_copies_of_nothing(self, machine: Machine) -> None:
        ptr, data, stream = machine.device(256), machine.pinned(256), machine.stream()
        machine.write(ptr, pattern(256))
        machine.driver.copy(ptr, address(data), 0, stream=stream)
        machine.driver.fill(ptr, 0, 0, stream=stream)
        assert np.array_equal(machine.read(ptr, 256), pattern(256))

    def test_copies_of_less_than_nothing(self, machine: Machine) -> None:
        ptr, data, stream = machine.device(256), machine.pinned(256), machine.stream()
        with refused("INVALID_VALUE"):
            machine.driver.copy(ptr, address(data), -1, stream=stream)
        with refused("INVALID_VALUE"):
            machine.driver.fill(ptr, 0, -1, stream=stream)

    def test_copies_out_of_bounds(self, machine: Machine) -> None:
        ptr, data, stream = machine.device(4096), machine.pinned(4 * MIB), machine.stream()
        with refused("INVALID_VALUE"):
            machine.driver.copy(ptr, address(data), 4 * MIB, stream=stream)
        with refused("INVALID_VALUE"):
            machine.driver.copy(address(data), ptr, 4 * MIB, stream=stream)
        with refused("INVALID_VALUE"):
            machine.driver.fill(ptr, 0, 4 * MIB, stream=stream)

    @pytest.mark.parametrize("second", [True, False])
    def test_copies_across_the_edge_of_a_registration(self, machine: Machine, second: bool) -> None:
        data, ptr, stream = pages(2 * 4096), machine.device(2 * 4096), machine.stream()
        driver, start = machine.driver, address(data)
        driver.host_register(start, 4096)
        if second:
            driver.host_register(start + 4096, 4096)
        with refused("INVALID_VALUE"):
            driver.copy(ptr, start, 2 * 4096, stream=stream)
        with refused("INVALID_VALUE"):
            driver.copy(start + 4090, ptr, 12, stream=stream)
        for offset in (0, 4096):
            driver.copy(ptr + offset, start + offset, 4096, stream=stream)
        stream.synchronize()
        driver.host_unregister(start)
        if second:
            driver.host_unregister(start + 4096)

    # -- copies by a kernel -------------------------------------------------------------------------
    @pytest.fixture
    def copying(self, machine: Machine) -> Machine:
        """A machine whose devices copy by kernels."""
        try:
            for device in range(machine.driver.device_count):
                machine.driver.prepare_kernel_copy(device)
        except UnsupportedError as error:
            pytest.skip(str(error))
        return machine

    @pytest.mark.parametrize("to", [0, 1, 2, 4, 8, 16, 31])
    @pytest.mark.parametrize("of", [0, 3, 16])
    def test_kernels_copy_at_any_alignment(self, copying: Machine, to: int, of: int) -> None:
        driver, stream = copying.driver, copying.stream()
        there, home = copying.device(3 * KIB), copying.pinned(3 * KIB)
        back = copying.pinned(3 * KIB)
        home[:], back[:] = pattern(3 * KIB), 7
        for nbytes in (1, 15, 17, 1000, 2 * KIB + 5):
            driver.fill(there, 9, 3 * KIB, stream=stream)
            driver.kernel_copy(there + to, copying.mapped(home) + of, nbytes, stream=stream, blocks=2)
            driver.kernel_copy(copying.mapped(back) + of, there + to, nbytes, stream=stream)
            stream.synchronize()
            wanted = np.full(3 * KIB, 9, np.uint8)
            wanted[to : to + nbytes] = home[of : of + nbytes]
            assert np.array_equal(copying.read(there, 3 * KIB), wanted)
            assert np.array_equal(back[of : of + nbytes], home[of : of + nbytes])
            assert set(back[:of]) | set(back[of + nbytes :]) == {7}

    @pytest.mark.devices(2)
    def test_kernels_copy_between_the_host_and_a_peer(self, copying: Machine) -> None:
        driver, stream = copying.driver, copying.stream(1)
        if not driver.can_access_peer(1, 0):
            pytest.skip("the devices do not reach each other")
        there, home, back = copying.device(MIB), copying.pinned(MIB), copying.pinned(MIB)
        home[:] = pattern(MIB)
        with contextlib.suppress(DriverError):  # it may be from an earlier test
            driver.enable_peer_access(1, 0)
        driver.kernel_copy(there, copying.mapped(home, 1), MIB, stream=stream)
        driver.kernel_copy(copying.mapped(back, 1), there, MIB, stream=stream)
        stream.synchronize()
        assert np.array_equal(back, pattern(MIB))

    def test_kernels_copy_nothing_out_of_bounds(self, copying: Machine) -> None:
        driver, stream = copying.driver, copying.stream()
        there, home, loose = copying.device(4 * MIB), copying.pinned(KIB), pages(KIB)
        mapped = copying.mapped(home)
        driver.kernel_copy(there, mapped, 0, stream=stream)
        for dst, src, nbytes in (
            (there, mapped, 3 * MIB),
            (mapped, there, 3 * MIB),
            (there + 3 * MIB, there, 2 * MIB),
            (there, address(loose), KIB),
            (there, mapped, -1),
        ):
            with refused("INVALID_VALUE"):
                driver.kernel_copy(dst, src, nbytes, stream=stream)
        stream.synchronize()
        with refused("INVALID_HANDLE"):
            stream.close()
            driver.kernel_copy(there, mapped, KIB, stream=stream)

    @pytest.mark.parametrize("value", [0, 1, 127, 128, 255])
    def test_fill(self, machine: Machine, value: int) -> None:
        ptr, stream = machine.device(5000), machine.stream()
        machine.write(ptr, pattern(5000))
        machine.driver.fill(ptr + 3, value, 4001, stream=stream)
        expected = pattern(5000)
        expected[3:4004] = value
        assert np.array_equal(machine.read(ptr, 5000), expected)

    @pytest.mark.parametrize("value", [-1, 256])
    def test_fill_with_what_is_no_byte(self, machine: Machine, value: int) -> None:
        ptr, stream = machine.device(256), machine.stream()
        with refused("INVALID_VALUE"):
            machine.driver.fill(ptr, value, 256, stream=stream)

    def test_fill_of_pageable_memory(self, machine: Machine) -> None:
        data, stream = pages(4096), machine.stream()
        with refused("INVALID_VALUE"):
            machine.driver.fill(address(data), 0, 4096, stream=stream)

    # -- order ----------------------------------------------------------------------------------------
    def test_a_stream_keeps_its_order(self, machine: Machine) -> None:
        driver, stream, nbytes = machine.driver, machine.stream(), self.big
        ptr, out = machine.device(nbytes), [machine.pinned(nbytes) for _ in range(2)]
        for value in range(2):
            driver.fill(ptr, value + 1, nbytes, stream=stream)
            driver.copy(address(out[value]), ptr, nbytes, stream=stream)
        driver.fill(ptr, 9, nbytes, stream=stream)
        stream.synchronize()
        assert [set(np.unique(data)) for data in out] == [{1}, {2}]
        assert set(np.unique(machine.read(ptr, nbytes))) == {9}

    def test_events_order_streams(self, machine: Machine) -> None:
        driver, nbytes = machine.driver, self.big
        streams = [machine.stream() for _ in range(3)]
        source, out = machine.pinned(nbytes), machine.pinned(nbytes)
        source[:] = pattern(nbytes)
        one, other = machine.device(nbytes), machine.device(nbytes)
        driver.copy(one, address(source), nbytes, stream=streams[0])
        streams[1].wait(streams[0].record())
        driver.copy(other, one, nbytes, stream=streams[1])
        streams[2].wait(streams[1].record())
        driver.copy(address(out), other, nbytes, stream=streams[2])
        streams[2].synchronize()
        assert np.array_equal(out, source)

    @pytest.mark.devices(2)
    def test_events_order_streams_of_two_devices(self, machine: Machine) -> None:
        driver, nbytes = machine.driver, self.big
        here, there = machine.stream(0), machine.stream(1)
        ptr, out = machine.device(nbytes, 0), machine.pinned(nbytes)
        driver.fill(ptr, 5, nbytes, stream=here)
        there.wait(here.record())
        driver.copy(address(out), ptr, nbytes, stream=there)
        there.synchronize()
        assert set(np.unique(out)) == {5}

    def test_a_wait_is_for_the_recording_before_it(self, machine: Machine) -> None:
        driver, nbytes = machine.driver, self.big
        writer, first, second = (machine.stream() for _ in range(3))
        early, late = machine.device(nbytes), machine.device(nbytes)
        out = [machine.pinned(nbytes) for _ in range(2)]
        event = driver.create_event(0)
        for value, reader, ptr in ((1, first, early), (2, second, late)):
            driver.fill(ptr, value, nbytes, stream=writer)
            assert writer.record(event) is event
            reader.wait(event)
        for data, reader, ptr in zip(out, (first, second), (early, late), strict=True):
            driver.copy(address(data), ptr, nbytes, stream=reader)
        driver.synchronize(0)
        assert [set(np.unique(data)) for data in out] == [{1}, {2}]

    def test_a_wait_counts_again_after_the_host_has_waited(self, machine: Machine) -> None:
        """What a stream was synchronised for need not be waited for; what it got later must be."""
        driver, nbytes = machine.driver, self.big
        writer, reader = machine.stream(), machine.stream()
        ptr, out, event = machine.device(nbytes), machine.pinned(nbytes), driver.create_event(0)
        for value in (1, 2, 3):
            driver.fill(ptr, value, nbytes, stream=writer)
            writer.record(event)
            if value == 1:
                writer.synchronize()
            reader.wait(event)
            driver.copy(address(out), ptr, nbytes, stream=reader)
            writer.wait(reader.record())
            if value != 2:
                reader.synchronize()
                with driver.host_access(reads=[Span(address(out), nbytes)]):
                    assert set(np.unique(out)) == {value}

    def test_an_event_that_was_never_recorded_is_done(self, machine: Machine) -> None:
        event, stream = machine.driver.create_event(0), machine.stream()
        assert event.query()
        event.synchronize()
        stream.wait(event)
        stream.synchronize()

    def test_synchronize_waits(self, machine: Machine) -> None:
        driver, nbytes = machine.driver, self.big
        waits: list[Callable[[Stream], object]] = [
            lambda stream: stream.synchronize(),
            lambda stream: stream.record().synchronize(),
            lambda _: driver.synchronize(0),
            lambda _: driver.synchronize_all(),
            lambda stream: _ask(stream.query),
            lambda stream: _ask(stream.record().query),
        ]
        ptr, out = machine.device(nbytes), machine.pinned(nbytes)
        for value, wait in enumerate(waits, start=1):
            stream = machine.stream()
            driver.fill(ptr, value, nbytes, stream=stream)
            driver.copy(address(out), ptr, nbytes, stream=stream)
            wait(stream)
            with driver.host_access(reads=[Span(address(out), nbytes)]):
                assert set(np.unique(out)) == {value}
            assert stream.query()

    def test_elapsed(self, machine: Machine) -> None:
        driver, stream = machine.driver, machine.stream()
        ptr, data = machine.device(self.big), machine.pinned(self.big)
        start, end = (driver.create_event(0, timing=True) for _ in range(2))
        stream.record(start)
        driver.copy(ptr, address(data), self.big, stream=stream)
        stream.record(end)
        end.synchronize()
        assert 0 < end.elapsed_since(start) < 60

    def test_elapsed_needs_timed_and_recorded_events(self, machine: Machine) -> None:
        driver, stream = machine.driver, machine.stream()
        timed, untimed, never = driver.create_event(0, timing=True), driver.create_event(0), None
        stream.record(timed)
        stream.record(untimed)
        stream.synchronize()
        never = driver.create_event(0, timing=True)
        for other in (untimed, never):
            with refused("INVALID_HANDLE"):
                other.elapsed_since(timed)
            with refused("INVALID_HANDLE"):
                timed.elapsed_since(other)

    @pytest.mark.parametrize("timing", [True, False])
    def test_a_new_event_has_no_past(self, machine: Machine, timing: bool) -> None:
        """Drivers keep the handles of events that died, and what was recorded in them."""
        driver, stream = machine.driver, machine.stream()
        ptr = machine.device(self.big)
        for _ in range(4):
            stream.record(driver.create_event(0, timing=timing))
        driver.fill(ptr, 0, self.big, stream=stream)
        stream.record(driver.create_event(0, timing=timing))
        event, other = (driver.create_event(0, timing=timing) for _ in range(2))
        assert (event.query(), other.query()) == (True, True)
        with refused("INVALID_HANDLE"):
            event.elapsed_since(other)
        driver.synchronize(0)
        with refused("INVALID_HANDLE"):
            event.elapsed_since(other)

    @pytest.mark.devices(2)
    def test_an_event_of_another_device_is_not_recorded(self, machine: Machine) -> None:
        event, stream = machine.driver.create_event(0), machine.stream(1)
        with refused("INVALID_HANDLE"):
            stream.record(event)
        machine.stream(0).record(event)

    def test_a_closed_stream(self, machine: Machine) -> None:
        driver, data = machine.driver, machine.pinned(self.big)
        ptr, stream, event = machine.device(self.big), driver.create_stream(0), driver.create_event(0)
        driver.fill(ptr, 3, self.big, stream=stream)
        driver.copy(address(data), ptr, self.big, stream=stream)
        stream.close()  # once its work is done
        with driver.host_access(reads=[Span(address(data), self.big)]):
            assert set(np.unique(data)) == {3}
        stream.close()
        calls: list[Callable[[], object]] = [
            stream.synchronize,
            stream.query,
            stream.record,
            lambda: stream.wait(event),
            lambda: driver.copy(ptr, address(data), 1, stream=stream),
            lambda: driver.fill(ptr, 0, 1, stream=stream),
        ]
        for call in calls:
            with refused("INVALID_HANDLE"):
                call()

    def test_events_outlive_their_stream(self, machine: Machine) -> None:
        driver, ptr = machine.driver, machine.device(256)
        stream, other = driver.create_stream(0), machine.stream()
        driver.fill(ptr, 1, 256, stream=stream)
        event = stream.record()
        stream.close()
        assert event.query()
        event.synchronize()
        other.wait(event)
        other.synchronize()

    def test_a_borrowed_stream(self, machine: Machine) -> None:
        driver, owner = machine.driver, machine.stream()
        borrowed = driver.stream_from_handle(0, int(owner.handle))
        assert (owner.owned, borrowed.owned) == (True, False)
        ptr, out = machine.device(self.big), machine.pinned(self.big)
        driver.fill(ptr, 1, self.big, stream=owner)
        driver.copy(address(out), ptr, self.big, stream=borrowed)  # the same stream: in order
        borrowed.close()
        driver.destroy_stream(borrowed)
        driver.fill(ptr, 2, self.big, stream=owner)
        owner.synchronize()
        assert set(np.unique(out)) == {1}

    @pytest.mark.parametrize("priority", [-1, 0, 1])
    def test_priorities(self, machine: Machine, priority: int) -> None:
        ptr, stream = machine.device(256), machine.driver.create_stream(0, priority=priority)
        machine.driver.fill(ptr, 4, 256, stream=stream)
        stream.close()
        assert set(machine.read(ptr, 256)) == {4}

    @pytest.mark.parametrize("stream", [None, 0, "default"])
    def test_only_streams_are_streams(self, machine: Machine, stream: Any) -> None:
        ptr = machine.device(256)
        with pytest.raises(InvalidRequestError, match="create_stream"):
            machine.driver.copy(ptr, ptr + 128, 128, stream=stream)
        with pytest.raises(InvalidRequestError, match="create_stream"):
            machine.driver.fill(ptr, 0, 128, stream=stream)

    def test_handles_of_another_driver(self, machine: Machine) -> None:
        driver, foreign = machine.driver, EmulatedDriver()
        ptr, stream, event = machine.device(256), machine.stream(), machine.driver.create_event(0, timing=True)
        their_stream, their_event = foreign.create_stream(0), foreign.create_event(0, timing=True)
        calls: list[Callable[[], object]] = [
            lambda: driver.copy(ptr, ptr + 128, 128, stream=their_stream),
            lambda: driver.fill(ptr, 0, 128, stream=their_stream),
            lambda: driver.stream_wait(their_stream, event),
            lambda: driver.stream_wait(stream, their_event),
            lambda: driver.stream_synchronize(their_stream),
            lambda: driver.stream_query(their_stream),
            lambda: driver.destroy_stream(their_stream),
            lambda: driver.event_record(their_event, stream),
            lambda: driver.event_record(event, their_stream),
            lambda: driver.event_query(their_event),
            lambda: driver.event_synchronize(their_event),
            lambda: driver.event_elapsed(event, their_event),
            lambda: driver.event_elapsed(their_event, event),
        ]
        for call in calls:
            with refused("INVALID_HANDLE"):
                call()
        their_stream.record(their_event)
        their_stream.synchronize()

    def test_recordings_are_numbered_in_their_order(self, machine: Machine) -> None:
        stream, other = machine.stream(), machine.stream()
        events = [stream.record(), other.record(), stream.record(), stream.record()]
        numbers = [event.sequence for event in events]
        assert numbers == sorted(set(numbers))
        stream.record(events[0])
        assert events[0].sequence > numbers[-1]

    # -- where memory lies ----------------------------------------------------------------------------
    def test_allocations_are_found_on_their_device(self, machine: Machine) -> None:
        driver = machine.driver
        for device in range(driver.device_count):
            ptr = machine.device(5000, device)
            assert [driver.device_of(ptr), driver.device_of(ptr + 4999)] == [device] * 2

    def test_host_memory_is_on_no_device(self, machine: Machine) -> None:
        driver, pinned, pageable = machine.driver, machine.pinned(5000), pages(5000)
        assert [driver.device_of(address(data)) for data in (pinned, pageable)] == [None] * 2
        assert driver.device_of(machine.mapped(pinned)) is None
        assert driver.device_of(12345) is None

    # -- peers ----------------------------------------------------------------------------------------
    def test_a_device_is_not_its_own_peer(self, driver: Driver) -> None:
        assert not driver.can_access_peer(0, 0)

    @pytest.mark.devices(2)
    def test_peer_access_is_switched_one_way_and_once(self, driver: Driver, machine: Machine) -> None:
        if not driver.can_access_peer(0, 1):
            pytest.skip("devices 0 and 1 cannot reach each other")
        for pair in ((0, 1), (1, 0)):  # engines of this process leave it enabled
            with contextlib.suppress(DriverError):
                driver.disable_peer_access(*pair)
            with refused("PEER_ACCESS_NOT_ENABLED"):
                driver.disable_peer_access(*pair)
        driver.enable_peer_access(0, 1)
        with refused("PEER_ACCESS_ALREADY_ENABLED"):
            driver.enable_peer_access(0, 1)
        with refused("PEER_ACCESS_NOT_ENABLED"):
            driver.disable_peer_access(1, 0)
        driver.disable_peer_access(0, 1)
        with refused("PEER_ACCESS_NOT_ENABLED"):
            driver.disable_peer_access(0, 1)

    # -- brackets -------------------------------------------------------------------------------------
    def test_brackets_change_no_bytes(self, machine: Machine) -> None:
        driver, stream = machine.driver, machine.stream()
        ptr, data = machine.device(256), machine.pinned(256)
        with driver.launch(stream, reads=[Span(machine.mapped(data), 256)], writes=[Span(ptr, 256)], label="test"):
            driver.fill(ptr, 6, 256, stream=stream)
        bracket = driver.launch(stream, reads=[Span(ptr, 256), Span(0, 0)])
        bracket.end()
        bracket.end()
        stream.synchronize()
        with driver.host_access(reads=[Span(0, 0)], writes=[Span(address(data), 256)]):
            data[:] = 1
        driver.observe(driver.publish())
        assert set(machine.read(ptr, 256)) == {6}

    def test_finalisers_run(self, driver: Driver) -> None:
        ran: list[int] = []
        driver.finalise(lambda: ran.append(1))
        assert ran == [1]

    # -- threads --------------------------------------------------------------------------------------
    def test_threads_on_streams_of_their_own(self, driver: Driver) -> None:
        def work(number: int) -> None:
            nbytes, data = 40_000, pages(40_000)
            for turn in range(4):
                seed = number * 100 + turn
                stream = driver.create_stream(0)
                driver.host_register(address(data), nbytes)
                one, other = driver.malloc(0, nbytes), driver.malloc(0, nbytes)
                data[:] = pattern(nbytes, seed)
                driver.copy(one, address(data), nbytes, stream=stream)
                driver.copy(other, one, nbytes, stream=stream)
                stream.synchronize()
                assert np.array_equal(_read_on(driver, stream, other, nbytes), pattern(nbytes, seed))
                driver.free(0, one)
                driver.free(0, other)
                stream.close()
                driver.host_unregister(address(data))

        _in_threads([lambda number=number: work(number) for number in range(8)])

    def test_threads_on_one_stream(self, driver: Driver) -> None:
        machine = Machine(driver)
        stream, nbytes = machine.stream(), 10_000
        blocks = [machine.device(nbytes) for _ in range(8)]
        known = driver.publish()

        def work(ptr: int, value: int) -> None:
            driver.observe(known)
            for _ in range(20):
                driver.fill(ptr, value, nbytes, stream=stream)
                stream.record().synchronize()
                assert set(_read_on(driver, stream, ptr, nbytes)) == {value}

        _in_threads([lambda ptr=ptr, value=value: work(ptr, value) for value, ptr in enumerate(blocks)])
        machine.close()

    def test_memory_allocated_in_one_thread_and_freed_in_another(self, driver: Driver) -> None:
        todo: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def produce() -> None:
            stream = driver.create_stream(0)
            for value in range(50):
                ptr = driver.malloc(0, 4096)
                driver.fill(ptr, value, 4096, stream=stream)
                stream.synchronize()
                todo.put((ptr, value, driver.publish()))
            stream.close()
            todo.put(None)

        def consume() -> None:
            stream = driver.create_stream(0)
            while (item := todo.get()) is not None:
                ptr, value, token = item
                driver.observe(token)
                assert set(_read_on(driver, stream, ptr, 4096)) == {value}
                driver.free(0, ptr)
            stream.close()

        _in_threads([produce, consume])

    # -- end ------------------------------------------------------------------------------------------
    def test_close(self, driver: Driver) -> None:
        machine = Machine(driver)
        ptr, stream, event, data = machine.device(256), machine.stream(), driver.create_event(0), pages(4096)
        driver.fill(ptr, 0, 256, stream=stream)
        driver.close()
        driver.close()
        stream.close()
        calls: list[Callable[[], object]] = [
            lambda: driver.device_info(0),
            lambda: driver.memory_info(0),
            lambda: driver.synchronize(0),
            driver.synchronize_all,
            lambda: driver.malloc(0, 256),
            lambda: driver.free(0, ptr),
            lambda: driver.host_register(address(data), 4096),
            lambda: driver.host_device_pointer(address(data), 0),
            lambda: driver.create_stream(0),
            lambda: driver.create_event(0),
            lambda: driver.can_access_peer(0, 0),
            lambda: driver.event_query(event),
        ]
        for call in calls:
            with refused("DEINITIALIZED"):
                call()

    def test_errors_are_of_one_tree(self, driver: Driver) -> None:
        with pytest.raises(MemFerryError) as caught:
            driver.malloc(0, 0)
        assert isinstance(caught.value, DriverError)
        assert caught.value.call == "malloc"
        assert "a pointer, size or flag is outside what the driver knows" in str(caught.value)


def _place(machine: Machine, kind: str, nbytes: int) -> int:
    if kind == "device":
        return machine.device(nbytes)
    if kind == "pageable":
        data: Bytes = pages(nbytes)
        machine.keep.append(data)
        return address(data)
    data = machine.pinned(nbytes)
    return machine.mapped(data) if kind == "mapped" else address(data)


def _read_on(driver: Driver, stream: Stream, ptr: int, nbytes: int) -> Bytes:
    out = np.empty(nbytes, np.uint8)
    driver.copy(address(out), ptr, nbytes, stream=stream)
    stream.synchronize()
    return out


def _ask(done: Callable[[], bool]) -> None:
    """Ask until it is done; work must not wait for somebody to block on it."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "the work never ran"


def _in_threads(actions: list[Callable[[], None]]) -> None:
    """Run the actions at once, each in a thread, and raise what any of them raised."""
    start, errors = threading.Barrier(len(actions)), []

    def run(action: Callable[[], None]) -> None:
        try:
            start.wait()
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
