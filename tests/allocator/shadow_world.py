"""A small shadow space for tests, with a copier that counts and can be broken."""

from __future__ import annotations

from typing import Any

import numpy as np

from memferry_allocator import (
    ArenaOptions,
    DirectCopier,
    Direction,
    Driver,
    DriverError,
    EmulatedDriver,
    HostArena,
    Mode,
    Partition,
    Place,
    ShadowBuffer,
    ShadowSpace,
    Span,
    Stream,
    registrations,
)
from memferry_allocator.shadow.hazards import Hazards

from .machine import Bytes, Machine, pattern

SIZE = 1024
LAZY = ArenaOptions(touch=False)


class Moves(DirectCopier):
    """Counts the copies of each direction, and refuses them while `broken`, some after `begun` of their bytes."""

    def __init__(self, driver: Driver, device: int) -> None:
        super().__init__(driver, device)
        self.made: list[Direction] = []
        self.broken = False
        self.begun = 0.0

    def copy(self, dst: Span, src: Span, direction: Direction, *, stream: Stream) -> Any:
        if self.broken:
            half = int(self.begun * dst.nbytes)
            super().copy(Span(dst.ptr, half), Span(src.ptr, half), direction, stream=stream)
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "copy", "broken on purpose")
        self.made.append(direction)
        return super().copy(dst, src, direction, stream=stream)

    def since(self) -> tuple[int, int]:
        """Copies in and out since the last question."""
        counts = (self.made.count(Direction.HOST_TO_DEVICE), self.made.count(Direction.DEVICE_TO_HOST))
        self.made.clear()
        return counts


class World:
    """A space with room for two of the three partitions of a buffer."""

    def __init__(self, machine: Machine, *, budget: int = 2 * SIZE, parts: int = 3) -> None:
        self.machine = machine
        self.driver: EmulatedDriver = machine.driver  # type: ignore[assignment]
        self.arena = HostArena(self.driver, 16 * SIZE, LAZY)
        self.moves = Moves(self.driver, 0)
        self.space = ShadowSpace(self.driver, device_budget=budget, copier=self.moves)
        self.buffer: ShadowBuffer = self.space.buffer("weights", [self.arena.cut(SIZE) for _ in range(parts)])
        self.part: Partition = self.buffer[0]
        self.stream, self.other = machine.stream(), machine.stream()
        for index, part in enumerate(self.buffer):
            self.home(part)[:] = pattern(SIZE, index)

    def home(self, part: Partition) -> Bytes:
        """The host pages, whoever may be writing them."""
        return self.arena.array(part.host)

    def write(
        self, part: Partition, value: int, *, place: Place = Place.DEVICE, stream: Stream | None = None
    ) -> None:
        """Replace every byte by a kernel that runs late."""
        stream = stream or self.stream
        with part.acquire(place, Mode.WRITE, stream=stream) as view:
            self.driver.fill(view.ptr, value, SIZE, stream=stream)

    def read(self, part: Partition, place: Place = Place.HOST, stream: Stream | None = None) -> Bytes:
        """The bytes as seen in a place."""
        if place is Place.HOST:
            with part.acquire(place, Mode.READ) as view:
                assert view.ptr == part.host.ptr
                return self.home(part).copy()
        with part.acquire(place, Mode.READ, stream=stream or self.stream) as view:
            memory = self.driver.host_bytes(view.ptr, SIZE)
            assert memory is not None
            return np.frombuffer(memory, np.uint8).copy()

    def close(self) -> None:
        self.driver.synchronize(0)
        self.space.close()
        self.moves.close()
        self.arena.close()


def snapshot(space: ShadowSpace) -> Any:
    """Everything that a refused call must have left as it was."""

    def uses(hazards: Hazards) -> list[tuple[Stream, int]]:
        return [(stream, event.sequence) for stream, event in hazards.last_uses.items()]

    def state(part: Partition) -> tuple[Any, ...]:
        copy = part._copy
        device = None if copy is None else (copy.span, copy.valid, copy.dirty, uses(copy.hazards))
        return part.name, part.in_use, part.pins, part.closed, uses(part._home), device

    return (
        [[state(part) for part in buffer] for buffer in space._buffers],
        (list(space.room.idle), space.room.idle_bytes, space.device_used, space.pool.used, space.device_budget),
        (space.host_used, list(space._ranges._spans), space.closed),
        registrations(space.driver).nbytes,
    )
