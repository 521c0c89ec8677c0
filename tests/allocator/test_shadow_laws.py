"""What holds for a shadow space on every driver; bytes are touched by driver calls and host arrays only."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from memferry_allocator import (
    CaptureError,
    Driver,
    EmulatedDriver,
    EmulatedOptions,
    Mode,
    OutOfMemory,
    Partition,
    Place,
    PlannedOrder,
    ShadowSpace,
    Stream,
    open_driver,
)

from ..threads import in_threads
from .machine import Bytes, Machine, address

KIB, MIB = 1 << 10, 1 << 20


class Touch:
    """Kernels stood in for by fills and copies."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.driver = machine.driver

    def fill(
        self, part: Partition, place: Place, value: int, *, stream: Stream, start: int = 0, stop: int | None = None
    ) -> None:
        """Set some of the bytes, or all of them without having them fetched."""
        stop = part.nbytes if stop is None else stop
        mode = Mode.WRITE if (start, stop) == (0, part.nbytes) else Mode.READ_WRITE
        if place is Place.HOST:
            with part.acquire(place, mode) as view:
                view.array()[start:stop] = value
            return
        with part.acquire(place, mode, stream=stream) as view:
            self.driver.fill(view.ptr + start, value, stop - start, stream=stream)

    def read(self, part: Partition, place: Place, stream: Stream) -> Bytes:
        """The bytes as seen in a place, once everything is over."""
        if place is Place.HOST:
            with part.acquire(place, Mode.READ) as view:
                return view.array().copy()
        out = self.machine.pinned(part.nbytes)
        with part.acquire(place, Mode.READ, stream=stream) as view:
            self.driver.copy(address(out), view.ptr, part.nbytes, stream=stream)
        stream.synchronize()
        return out


class ShadowLaws:
    """To put a driver under the laws, derive a class named ``Test...`` and give it the fixture `driver`."""

    size = 4 * KIB  # of a partition: enough that a device needs a while for it

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        raise NotImplementedError

    @pytest.fixture
    def machine(self, driver: Driver) -> Iterator[Machine]:
        machine = Machine(driver)
        yield machine
        machine.close()

    @pytest.fixture
    def touch(self, machine: Machine) -> Touch:
        return Touch(machine)

    @pytest.fixture
    def space(self, driver: Driver) -> Iterator[ShadowSpace]:
        """Room for two of the partitions."""
        with ShadowSpace(driver, device_budget=2 * self.size, host_budget=16 * self.size) as space:
            yield space
            pages = [part.host.ptr for buffer in space._buffers for part in buffer]
        assert (space.host_used, space.device_used) == (0, 0)
        assert [driver.host_registration(ptr) for ptr in pages] == [None] * len(pages)

    @pytest.mark.parametrize("reads", Place)
    @pytest.mark.parametrize("writes", Place)
    def test_what_is_written_in_one_place_is_read_in_another(
        self, machine: Machine, space: ShadowSpace, touch: Touch, writes: Place, reads: Place
    ) -> None:
        part, one, other = space.allocate("b", self.size)[0], machine.stream(), machine.stream()
        for turn in range(3):
            touch.fill(part, writes, turn + 1, stream=one)
            touch.fill(part, writes, turn + 100, stream=one, start=100, stop=200)
            seen = touch.read(part, reads, other)
            assert set(seen[:100]) == set(seen[200:]) == {turn + 1}
            assert set(seen[100:200]) == {turn + 100}

    @pytest.mark.parametrize("planned", [False, True])
    @pytest.mark.parametrize("seed", range(4))
    def test_any_program_has_the_result_of_its_order(
        self, machine: Machine, space: ShadowSpace, touch: Touch, seed: int, planned: bool
    ) -> None:
        """Five partitions through room for two, on four streams that know nothing of each other."""
        rng = random.Random(seed)
        buffer = space.allocate("b", 5 * self.size - 7, partition_nbytes=self.size)
        model = [np.zeros(part.nbytes, np.uint8) for part in buffer]
        streams = [machine.stream() for _ in range(4)]
        program = [(rng.randrange(5), rng.choice(list(Place))) for _ in range(60)]
        if planned:
            space.eviction = PlannedOrder([buffer[index] for index, place in program if place is Place.DEVICE])
        for turn, (index, place) in enumerate(program):
            start, stop = sorted(rng.sample(range(len(model[index]) + 1), 2))
            touch.fill(buffer[index], place, turn, stream=rng.choice(streams), start=start, stop=stop)
            model[index][start:stop] = turn
            if rng.random() < 0.2:
                other = buffer[rng.randrange(5)]
                rng.choice([other.evict, other.write_back, other.prefetch, other.settle])()
            assert space.device_used <= space.device_budget
        for part, expected in zip(buffer, model, strict=True):
            assert np.array_equal(touch.read(part, rng.choice(list(Place)), streams[0]), expected)

    def test_readers_on_further_streams_are_waited_for(
        self, machine: Machine, space: ShadowSpace, touch: Touch
    ) -> None:
        buffer, streams = space.allocate("b", 3 * self.size, partition_nbytes=self.size), []
        touch.fill(buffer[0], Place.DEVICE, 3, stream=machine.stream())
        sinks = []
        view = buffer[0].acquire(Place.DEVICE, Mode.READ, stream=machine.stream())
        for _ in range(3):
            streams.append(machine.stream())
            view.record_stream(streams[-1])
            sinks.append(machine.pinned(self.size))
            machine.driver.copy(address(sinks[-1]), view.ptr, self.size, stream=streams[-1])
        view.release()
        for index in (1, 2):  # in its place
            touch.fill(buffer[index], Place.DEVICE, 9, stream=machine.stream())
        assert not buffer[0].resident
        for stream, sink in zip(streams, sinks, strict=True):
            stream.synchronize()
            assert set(sink) == {3}
        assert set(touch.read(buffer[0], Place.HOST, streams[0])) == {3}

    def test_a_pinned_copy_keeps_its_address(self, machine: Machine, space: ShadowSpace, touch: Touch) -> None:
        buffer, stream = space.allocate("b", 4 * self.size, partition_nbytes=self.size), machine.stream()
        touch.fill(buffer[0], Place.HOST, 1, stream=stream)
        with buffer[0].pinned():
            place = buffer[0].copy_address
            for value in (2, 3):
                for part in list(buffer)[1:]:
                    touch.fill(part, Place.DEVICE, value, stream=stream)
                touch.fill(buffer[0], Place.MAPPED, value + 10, stream=machine.stream(), start=5, stop=50)
                assert set(touch.read(buffer[0], Place.DEVICE, stream)) == {1, value + 10}
                assert buffer[0].copy_address == place
            with buffer[1].pinned(), pytest.raises(OutOfMemory):
                buffer[2].pin()

    def test_typed_views_describe_the_bytes(self, machine: Machine, space: ShadowSpace) -> None:
        part, stream = space.allocate("b", self.size)[0], machine.stream()
        with part.acquire(Place.HOST, Mode.WRITE) as view:
            view.array(np.float32, (4, 8))[:] = np.arange(32, dtype=np.float32).reshape(4, 8)
        out = machine.pinned(32)
        with part.acquire(Place.DEVICE, Mode.READ, stream=stream) as view:
            row = view.typed("float32", (4, 8)).part(16, 8)
            machine.driver.copy(address(out), row.ptr, row.nbytes, stream=row.stream)
        stream.synchronize()
        assert list(out.view(np.float32)) == list(range(16, 24))

    def test_captures_are_left_alone(self, machine: Machine, space: ShadowSpace, touch: Touch) -> None:
        part, captured, stream = space.allocate("b", self.size)[0], machine.stream(), machine.stream()
        held = space.allocate("held", self.size)[0].acquire(Place.DEVICE, Mode.WRITE, stream=captured)
        machine.driver.begin_capture(captured)
        calls: list[Callable[[], object]] = [
            lambda: part.acquire(Place.DEVICE, Mode.READ, stream=captured),
            lambda: part.acquire(Place.MAPPED, Mode.WRITE, stream=captured),
            lambda: part.prefetch(stream=captured),
            held.release,
        ]
        for call in calls:
            with pytest.raises(CaptureError):
                call()
        touch.fill(part, Place.DEVICE, 5, stream=stream)
        with part.acquire(Place.HOST, Mode.READ) as view:
            assert set(view.array()) == {5}
        part.evict()
        machine.driver.end_capture(captured)
        held.release()

    def test_threads_compete_for_room(self, machine: Machine, space: ShadowSpace, touch: Touch) -> None:
        buffer = space.allocate("b", 8 * self.size, partition_nbytes=self.size)
        streams = [machine.stream() for _ in range(2)]

        def work(number: int) -> None:
            for turn in range(12):
                part, place = buffer[2 * (turn % 4) + number], list(Place)[(turn + number) % 3]
                touch.fill(part, place, turn + 1, stream=streams[number], start=turn, stop=self.size)
                with part.acquire(Place.HOST, Mode.READ) as view:
                    assert set(view.array()[turn:]) == {turn + 1}

        in_threads(2, work)


class TestEmulated(ShadowLaws):
    @pytest.fixture(params=[0.0, 0.3, 1.0], ids=["late", "any", "eager"])
    def driver(self, request: pytest.FixtureRequest) -> Iterator[Driver]:
        return EmulatedDriver(EmulatedOptions(eagerness=request.param))


@pytest.mark.gpu
class TestCuda(ShadowLaws):
    size = 4 * MIB

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        return open_driver("cuda")
