"""What every memory resource must do.  `test_resource_contract.py` applies it to each of them.

To put a resource under the contract, add a line to `RESOURCES` there.  Memory is only touched by driver
calls, so that the laws hold for memory which the host cannot reach.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from memferry_allocator import (
    CaptureError,
    CaptureMode,
    Driver,
    EmulatedDriver,
    InvalidRequestError,
    MemoryResource,
    OutOfMemory,
    Stream,
)

from ..threads import in_threads
from .blocks import Blocks
from .machine import Machine, refused

KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 255, 256, 257, 4096, 100_000, MIB, 2 * MIB + 1)


@dataclass(frozen=True)
class Case:
    """How a resource is made, and how many bytes it is known to have; None where that is the machine's."""

    make: Callable[[Driver], MemoryResource]
    room: int | None = None


class ResourceContract:
    """The laws, by what they are about."""

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        raise NotImplementedError

    @pytest.fixture
    def case(self) -> Case:
        raise NotImplementedError

    @pytest.fixture
    def machine(self, driver: Driver, request: pytest.FixtureRequest) -> Iterator[Machine]:
        needs = request.node.get_closest_marker("devices")
        if needs and driver.device_count < needs.args[0]:
            pytest.skip(f"needs {needs.args[0]} devices, {driver.name} has {driver.device_count}")
        machine = Machine(driver)
        yield machine
        machine.close()

    @pytest.fixture
    def resource(self, case: Case, driver: Driver) -> Iterator[MemoryResource]:
        resource = case.make(driver)
        yield resource
        resource.close()
        resource.close()

    @pytest.fixture
    def blocks(self, resource: MemoryResource) -> Blocks:
        return Blocks(resource)

    # -- memory ---------------------------------------------------------------------------------------
    def test_alignment(self, machine: Machine, blocks: Blocks) -> None:
        stream = machine.stream()
        for nbytes in SIZES:
            block = blocks.take(nbytes, stream)
            assert block.ptr > 0
            assert block.ptr % 256 == 0
        assert blocks.disjoint()
        blocks.give_all(stream)

    @pytest.mark.parametrize("seed", range(2))
    def test_blocks_never_overlap(self, machine: Machine, blocks: Blocks, seed: int) -> None:
        choose, streams = random.Random(seed), [machine.stream(), machine.stream()]
        for _ in range(120):
            stream = choose.choice(streams)
            if len(blocks.held) < 10 and choose.random() < 0.6:
                blocks.take(choose.choice((choose.randint(1, 5000), choose.choice(SIZES[:-1]))), stream)
                assert blocks.disjoint()
            elif blocks.held:
                for other in streams:
                    stream.wait(other.record())
                blocks.give(choose.choice(blocks.held), stream)
        for other in streams:
            streams[0].wait(other.record())
        blocks.give_all(streams[0])

    def test_nothing(self, machine: Machine, blocks: Blocks) -> None:
        resource, stream = blocks.resource, machine.stream()
        assert [resource.allocate(0, stream=stream) for _ in range(3)] == [0, 0, 0]
        block = blocks.take(1000, stream)
        for _ in range(4):
            resource.deallocate(0, 0, stream=stream)
        blocks.give(block, stream)

    # -- sizes ----------------------------------------------------------------------------------------
    @pytest.mark.parametrize("nbytes", [-1, -(1 << 70), 1.5, "1MiB", None, True])
    def test_what_is_no_size(self, machine: Machine, blocks: Blocks, nbytes: Any) -> None:
        stream = machine.stream()
        block = blocks.take(1, stream)
        with pytest.raises(InvalidRequestError):
            blocks.resource.allocate(nbytes, stream=stream)
        with pytest.raises(InvalidRequestError):
            blocks.resource.deallocate(block.ptr, nbytes, stream=stream)
        blocks.give(block, stream)

    @pytest.mark.parametrize("nbytes", [1 << 50, 1 << 62, (1 << 63) - 1, 1 << 70])
    def test_more_than_there_is(self, machine: Machine, blocks: Blocks, nbytes: int) -> None:
        stream = machine.stream()
        block = blocks.take(1000, stream)
        with pytest.raises(OutOfMemory) as caught:
            blocks.resource.allocate(nbytes, stream=stream)
        error = caught.value
        assert error.size >= nbytes > error.limit - error.used
        assert error.budget
        blocks.give(block, stream)

    def test_running_out_changes_nothing(self, machine: Machine, case: Case, blocks: Blocks) -> None:
        if case.room is None:
            pytest.skip("its room is the machine's")
        stream, taken = machine.stream(), []
        for _ in range(3):
            self._fill(blocks, stream)
            for _ in range(3):
                with pytest.raises(OutOfMemory) as caught:
                    blocks.resource.allocate(2 * MIB, stream=stream)
                assert caught.value.size >= 2 * MIB
            taken.append(len(blocks.held))
            blocks.give_all(stream)
        assert taken == [case.room // (2 * MIB)] * 3

    def _fill(self, blocks: Blocks, stream: Stream) -> None:
        while True:
            try:
                blocks.take(2 * MIB, stream)
            except OutOfMemory:
                return

    # -- streams --------------------------------------------------------------------------------------
    @pytest.mark.parametrize("stream", [None, 0, "default", []])
    def test_only_streams_are_streams(self, machine: Machine, blocks: Blocks, stream: Any) -> None:
        mine = machine.stream()
        block = blocks.take(100, mine)
        for nbytes in (0, 100):
            with pytest.raises(InvalidRequestError, match="expected a memferry_allocator Stream"):
                blocks.resource.allocate(nbytes, stream=stream)
        with pytest.raises(InvalidRequestError, match="expected a memferry_allocator Stream"):
            blocks.resource.deallocate(block.ptr, 100, stream=stream)
        blocks.give(block, mine)

    def test_streams_of_another_driver(self, machine: Machine, blocks: Blocks) -> None:
        self._refuses(machine, blocks, EmulatedDriver().create_stream(0))

    @pytest.mark.devices(2)
    def test_streams_of_another_device(self, machine: Machine, blocks: Blocks) -> None:
        self._refuses(machine, blocks, machine.stream(1))

    def _refuses(self, machine: Machine, blocks: Blocks, stream: Stream) -> None:
        mine = machine.stream()
        block = blocks.take(100, mine)
        with pytest.raises(InvalidRequestError):
            blocks.resource.allocate(100, stream=stream)
        with pytest.raises(InvalidRequestError):
            blocks.resource.deallocate(block.ptr, 100, stream=stream)
        blocks.give(block, mine)

    def test_a_closed_stream(self, machine: Machine, blocks: Blocks) -> None:
        stream, closed = machine.stream(), machine.driver.create_stream(0)
        blocks.give(blocks.take(100, closed), closed)
        block = blocks.take(100, stream)
        closed.close()
        with refused("INVALID_HANDLE"):
            blocks.resource.allocate(100, stream=closed)
        with refused("INVALID_HANDLE"):
            blocks.resource.deallocate(block.ptr, 100, stream=closed)
        blocks.give(block, stream)
        other = blocks.take(100, stream)  # what the closed stream gave back is anybody's
        blocks.give(other, stream)

    def test_reuse_on_the_same_stream(self, machine: Machine, blocks: Blocks) -> None:
        stream = machine.stream()
        for _ in range(6):
            block = blocks.take(MIB, stream)
            blocks.held.remove(block)
            blocks.resource.deallocate(block.ptr, MIB, stream=stream)  # while the work may be under way

    def test_given_back_on_one_stream_and_reused_on_another(self, machine: Machine, blocks: Blocks) -> None:
        """Without a wait in between the emulated device would raise RaceError."""
        one, other = machine.stream(), machine.stream()
        for turn in range(6):
            first, second = (one, other) if turn % 2 else (other, one)
            block = blocks.take(MIB, first)
            second.wait(first.record())
            machine.driver.fill(block.ptr, 0, MIB, stream=second)
            blocks.held.remove(block)
            blocks.resource.deallocate(block.ptr, MIB, stream=second)
            blocks.give(blocks.take(MIB, first), first)

    def test_a_borrowed_stream_whose_owner_destroys_it(self, machine: Machine, blocks: Blocks) -> None:
        driver, stream = machine.driver, machine.stream()
        for _ in range(3):
            owner = driver.create_stream(0)
            borrowed = driver.stream_from_handle(0, int(owner.handle))
            block = blocks.take(MIB, borrowed)
            blocks.held.remove(block)
            blocks.resource.deallocate(block.ptr, MIB, stream=borrowed)
            owner.close()
            blocks.give(blocks.take(MIB, stream), stream)

    # -- misuse ---------------------------------------------------------------------------------------
    def test_pointers_that_are_not_live(self, machine: Machine, blocks: Blocks) -> None:
        resource, stream = blocks.resource, machine.stream()
        block, gone = blocks.take(4096, stream), blocks.take(4096, stream)
        ptr = gone.ptr
        blocks.give(gone, stream)
        calls = [(ptr, 4096), (block.ptr, 4096 + 256), (block.ptr, 0), (block.ptr + 256, 4096), (1, 1), (0, 1)]
        for wrong, nbytes in calls:
            with pytest.raises(InvalidRequestError, match="not a live allocation"):
                resource.deallocate(wrong, nbytes, stream=stream)
        blocks.give(block, stream)
        with pytest.raises(InvalidRequestError, match="freed twice"):
            resource.deallocate(block.ptr, 4096, stream=stream)

    # -- graph capture --------------------------------------------------------------------------------
    @contextmanager
    def capture(self, driver: Driver, stream: Stream) -> Iterator[None]:
        """A capture that forbids what it can, and must not be harmed."""
        driver.begin_capture(stream, CaptureMode.GLOBAL)
        try:
            yield
        finally:
            driver.end_capture(stream)

    def test_a_captured_stream_is_refused(self, machine: Machine, blocks: Blocks) -> None:
        stream = machine.stream()
        block = blocks.take(100, stream)
        blocks.give(blocks.take(4096, stream), stream)
        with self.capture(machine.driver, stream):
            for nbytes in (0, 100, 4096, MIB):
                with pytest.raises(CaptureError):
                    blocks.resource.allocate(nbytes, stream=stream)
            with pytest.raises(CaptureError):
                blocks.resource.deallocate(block.ptr, 100, stream=stream)
        blocks.give(block, stream)

    def test_beside_a_capture(self, machine: Machine, blocks: Blocks) -> None:
        """On other streams everything goes on, and the capture does not notice."""
        stream, captured = machine.stream(), machine.stream()
        known = blocks.take(3 * MIB, stream)
        used = blocks.take(3 * MIB, captured)
        blocks.held.remove(used)
        blocks.resource.deallocate(used.ptr, 3 * MIB, stream=captured)
        stream.synchronize()
        resource, taken = blocks.resource, []
        with self.capture(machine.driver, captured):
            for nbytes in (100, 3 * MIB, MIB):
                taken.append((resource.allocate(nbytes, stream=stream), nbytes))
            resource.deallocate(known.ptr, known.nbytes, stream=stream)
            for ptr, nbytes in taken:
                machine.driver.fill(ptr, 1, nbytes, stream=stream)
                resource.deallocate(ptr, nbytes, stream=stream)

    # -- threads --------------------------------------------------------------------------------------
    def test_taken_in_one_thread_and_given_back_in_another(self, driver: Driver, resource: MemoryResource) -> None:
        todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        few = threading.Semaphore(8)  # blocks on their way: there is room for so many

        def make(blocks: Blocks, stream: Stream) -> None:
            try:
                for turn in range(30):
                    assert few.acquire(timeout=60)
                    block = blocks.take(1000 * (turn % 5 + 1), stream)
                    todo.put((block, stream.record(), driver.publish()))
            finally:
                todo.put(None)

        def drop(blocks: Blocks, stream: Stream) -> None:
            while (item := todo.get(timeout=60)) is not None:
                block, written, token = item
                driver.observe(token)
                stream.wait(written)
                blocks.held.append(block)
                blocks.give(block, stream)
                few.release()

        def work(number: int) -> None:
            stream = driver.create_stream(0)
            (make if number % 2 else drop)(Blocks(resource), stream)
            stream.close()

        in_threads(4, work)
