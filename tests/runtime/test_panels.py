"""Panels on the emulated device: right bytes, in any order of queued work, with every wait that they need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import (
    DevicePool,
    Direction,
    EmulatedOptions,
    HostArena,
    RaceError,
    Span,
    Stream,
    open_driver,
)
from memferry_allocator.sizes import align_up
from memferry_rt.adapters.torch.operators import (
    LaneOutbox,
    linear_forward,
    linear_input_gradient,
    same_bytes,
    weight_gradient,
)
from memferry_rt.adapters.torch.tensors import TensorFactory
from memferry_rt.device_kernels import DeviceMoves, open_device_moves
from memferry_rt.panels import Cut, HostMatrix, PanelRing, borders, panel_step
from memferry_rt.staging import StagingRing
from memferry_transport import TransferEngine

KIB = 1 << 10
ITEMSIZE = 4


class World:
    """An emulated device, and a matrix in host memory."""

    def __init__(self, seed: int, rows: int, columns: int) -> None:
        self.driver = open_driver("emulated", emulated=EmulatedOptions(seed=seed))
        self.stream = self.driver.create_stream(0)
        self.engine = TransferEngine(self.driver, 0)
        self.pool = DevicePool(self.driver, 0, 64 * KIB)
        self.factory = TensorFactory(self.driver, 0)
        self.arena = HostArena(self.driver, max(512, rows * columns * ITEMSIZE))
        self.span = self.arena.allocate(rows * columns * ITEMSIZE)
        self.matrix = HostMatrix(self.span, rows, columns, ITEMSIZE)
        self.weight = self.factory.host(self.arena, self.span).view(torch.float32).view(rows, columns)
        with self.driver.host_access(writes=[self.span]):
            self.weight.copy_(torch.arange(rows * columns).view(rows, columns) % 251)

    def ring(self, nbytes: int = 2 * KIB, slots: int = 3, moves: DeviceMoves | None = None) -> PanelRing:
        return PanelRing(self.driver, self.engine, self.pool, self.stream, nbytes=nbytes, slots=slots, moves=moves)

    def panels(
        self, ring: PanelRing, cut: Cut, stream: Stream | None = None
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        for panel in ring.panels(self.matrix, cut, stream=stream or self.stream):
            flat = self.factory.device(panel.span).view(torch.float32)
            yield panel.start, panel.stop, flat.view(panel.rows, panel.columns)


def random(*size: int) -> torch.Tensor:
    return torch.randint(-2, 3, size, generator=torch.Generator().manual_seed(3)).float()


cases = st.tuples(
    st.integers(0, 1000),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(2, 4),
    st.booleans(),
)


@given(case=cases, by_kernel=st.booleans())
def test_panels_pass_through_the_ring(case: tuple[int, int, int, int, int, bool], by_kernel: bool) -> None:
    seed, rows, columns, step, slots, prefetch = case
    world = World(seed, rows, columns)
    moves = open_device_moves(world.driver, 0) if by_kernel else None
    ring = world.ring(4 * KIB, slots, moves)
    for by_columns in (False, True, False):
        cut = Cut(by_columns, step)
        if prefetch:
            ring.prefetch(world.matrix, cut)
        found = [(start, stop, panel.clone()) for start, stop, panel in world.panels(ring, cut)]
        assert [(start, stop) for start, stop, _ in found] == cut.borders(world.matrix)
        assert torch.equal(torch.cat([panel for *_, panel in found], dim=int(by_columns)), world.weight)
    assert ring.bytes_in == 3 * world.span.nbytes
    moved = world.engine.bytes_moved[Direction.HOST_TO_DEVICE]
    assert moved == ring.bytes_in - ring.strided_bytes_in
    assert (ring.strided_bytes_in > 0) == (step < columns)
    ring.close(world.stream)
    world.driver.synchronize(0)


@given(case=cases)
def test_a_linear_layer_over_the_ring(case: tuple[int, int, int, int, int, bool]) -> None:
    seed, rows, columns, step, slots, _ = case
    world = World(seed, rows, columns)
    ring = world.ring(4 * KIB, slots)
    x, dy = random(5, columns), random(5, rows)
    y = linear_forward(x, world.weight, None, world.panels(ring, Cut(False, step)))
    assert torch.equal(y, x @ world.weight.t())
    dx = linear_input_gradient(dy, world.weight, world.panels(ring, Cut(True, step)))
    assert torch.equal(dx, dy @ world.weight)


def test_a_ring_waits_for_whoever_had_its_memory() -> None:
    world = World(7, 16, 16)
    before = world.pool.allocate(64 * KIB, stream=world.stream)
    with world.driver.launch(world.stream, writes=[Span(before, 64 * KIB)]):
        pass
    world.pool.deallocate(before, 64 * KIB, stream=world.stream)
    ring = world.ring(20 * KIB)
    ring.prefetch(world.matrix, Cut(False, 16))
    assert torch.equal(next(world.panels(ring, Cut(False, 16)))[2], world.weight)


def test_what_was_prefetched_of_another_matrix_is_dropped() -> None:
    world = World(1, 16, 16)
    ring = world.ring(256)
    ring.prefetch(world.matrix, Cut(True, 4))
    found = [panel.clone() for *_, panel in world.panels(ring, Cut(False, 3))]
    assert torch.equal(torch.cat(found), world.weight)


def test_a_matrix_that_is_left_early_leaves_the_ring_usable() -> None:
    world = World(2, 16, 16)
    ring = world.ring(256)
    panels = world.panels(ring, Cut(False, 1))
    next(panels)
    with pytest.raises(RuntimeError, match="in use"):
        next(world.panels(ring, Cut(False, 2)))
    ring.prefetch(world.matrix, Cut(False, 2))  # which waits for its turn
    panels.close()
    found = [panel.clone() for *_, panel in world.panels(ring, Cut(False, 2))]
    assert torch.equal(torch.cat(found), world.weight)


def test_a_panel_may_not_be_read_after_the_next_is_taken() -> None:
    world = World(3, 16, 16)
    ring = world.ring(256, slots=2)
    panels = ring.panels(world.matrix, Cut(False, 4), stream=world.stream)
    first = next(panels)
    next(panels)
    other = world.driver.create_stream(0)
    with pytest.raises(RaceError), world.driver.launch(other, reads=[first.span]):
        pass


def test_a_panel_that_does_not_fit_is_refused() -> None:
    world = World(4, 4, 300)
    ring = world.ring(1 * KIB)
    with pytest.raises(ValueError, match="does not fit"):
        ring.cut(world.matrix, by_columns=False)
    assert ring.cut(world.matrix, by_columns=True).step <= 64


@given(count=st.integers(0, 5000), nbytes=st.integers(1, 9000), largest=st.integers(9000, 1 << 20))
def test_panels_fit_and_are_aligned(count: int, nbytes: int, largest: int) -> None:
    step = panel_step(count, nbytes, largest)
    assert 1 <= step <= max(1, count)
    assert step * nbytes <= largest
    assert step == max(1, count) or step % 256 == 0 or largest // nbytes < 256
    parts = borders(count, step)
    assert sum(stop - start for start, stop in parts) == count


@given(
    case=cases,
    tokens=st.integers(1, 6),
    partial=st.booleans(),
    by_kernel=st.booleans(),
)
def test_a_weight_gradient_leaves_through_the_outbox(
    case: tuple[int, int, int, int, int, bool], tokens: int, partial: bool, by_kernel: bool
) -> None:
    seed, rows, columns, step, _, _ = case
    columns = columns * 4  # whole units of 16 bytes
    step = min(step, 8 * KIB // (columns * ITEMSIZE))
    world = World(seed, rows, columns)
    ring = StagingRing(world.pool, 2 * align_up(step * columns * ITEMSIZE, 256), world.stream)
    x, dy = random(tokens, columns), random(tokens, rows)
    before = world.weight.clone()
    homes: list[Span] = []
    box = LaneOutbox(
        world.driver,
        world.engine,
        ring,
        world.factory.device,
        stream=world.stream,
        home=world.span,
        left=lambda home, event: homes.append(home),
        moves=open_device_moves(world.driver, 0) if by_kernel else None,
    )
    mapped = world.factory.mapped(world.arena, world.span).view(torch.float32).view(rows, columns)
    seen = []
    weight_gradient(
        dy,
        x,
        mapped,
        partial=partial,
        borders=borders(rows, step),
        outbox=box,
        visit=lambda start, stop, panel: seen.append(panel.clone()),
    )
    assert box.last is not None
    box.last.synchronize()
    with world.driver.host_access(reads=[world.span]):
        found = world.weight.clone()
    expected = dy.t() @ x
    assert torch.equal(found, before + expected if partial else expected)
    assert torch.equal(torch.cat(seen), found)
    assert sum(home.nbytes for home in homes) == world.span.nbytes
    assert world.engine.bytes_moved[Direction.DEVICE_TO_HOST] == (0 if by_kernel else world.span.nbytes)


def test_a_panel_that_fails_is_not_sent() -> None:
    world = World(5, 8, 8)
    ring = StagingRing(world.pool, 4 * KIB, world.stream)
    box = LaneOutbox(world.driver, world.engine, ring, world.factory.device, stream=world.stream, home=world.span)
    with pytest.raises(ZeroDivisionError), box.panel(0, world.weight[:2]):
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="half of a ring"), box.panel(0, torch.empty(33, 16)):
        pass
    assert box.last is None
    assert world.engine.bytes_moved[Direction.DEVICE_TO_HOST] == 0


def test_memory_that_the_host_waits_for_is_the_homes() -> None:
    """Without waiting for the last panel the host's read is a race."""
    world = World(6, 8, 8)
    ring = StagingRing(world.pool, 4 * KIB, world.stream)
    box = LaneOutbox(world.driver, world.engine, ring, world.factory.device, stream=world.stream, home=world.span)
    weight_gradient(random(3, 8), random(3, 8), world.weight, borders=[(0, 8)], outbox=box)
    with pytest.raises(RaceError), world.driver.host_access(reads=[world.span]):
        pass


def test_same_bytes_tells_zeros_apart() -> None:
    assert same_bytes(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
