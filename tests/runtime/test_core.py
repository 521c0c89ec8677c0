"""The parts of the runtime that know no framework."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import (
    DevicePool,
    EmulatedDriver,
    EmulatedOptions,
    HostArena,
    Mode,
    OutOfMemory,
    Place,
    ShadowSpace,
    Stream,
)
from memferry_rt.cache import LayerCache
from memferry_rt.errors import BudgetError
from memferry_rt.layout import ALIGNMENT, ParameterSpec, lay_out
from memferry_rt.staging import StagingRing
from memferry_rt.trace import NEVER, AccessTrace
from memferry_rt.updates import UpdateQueue

specs = st.builds(
    ParameterSpec,
    name=st.just("p"),
    numel=st.integers(0, 5000),
    itemsize=st.sampled_from([2, 4]),
    trainable=st.booleans(),
    updated=st.booleans(),
    master=st.booleans(),
)


@given(st.lists(specs, min_size=1, max_size=8))
def test_slots_are_aligned_and_do_not_overlap(parameters: list[ParameterSpec]) -> None:
    layout = lay_out("layer", parameters)
    for slab, nbytes in (
        ("weight", layout.weight_nbytes),
        ("gradient", layout.gradient_nbytes),
        ("state", layout.state_nbytes),
    ):
        ranges = []
        for slot in layout.slots:
            fp32 = slot.spec.numel * 4
            parts = {
                "weight": [(slot.weight, slot.spec.nbytes)],
                "gradient": [(slot.gradient, slot.spec.nbytes)],
                "state": [(slot.master, fp32), *((place, fp32) for place in slot.state.values())],
            }[slab]
            ranges += [(start, start + size) for start, size in parts if start >= 0]
        ranges.sort()
        assert all(start % ALIGNMENT == 0 for start, _ in ranges)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
        assert all(end <= nbytes for _, end in ranges)


def test_host_bytes_are_those_of_the_documentation() -> None:
    mixed = lay_out("bf16", [ParameterSpec("w", 1 << 20, 2, True, True, True)])
    single = lay_out("fp32", [ParameterSpec("w", 1 << 20, 4, True, True, False)])
    frozen = lay_out("frozen", [ParameterSpec("w", 1 << 20, 2, False, False, True)])
    assert mixed.host_nbytes == single.host_nbytes == 16 << 20
    assert frozen.host_nbytes == 2 << 20


def test_the_first_forecast_is_forward_and_back() -> None:
    trace = AccessTrace(3)
    assert list(trace.upcoming()) == [0, 1, 2]
    trace.use(0)
    assert [trace.next_use(layer) for layer in range(3)] == [4, 0, 1]
    for layer in (1, 2, 1):
        trace.use(layer)
    assert trace.next_use(2) == NEVER
    assert list(trace.upcoming()) == [0]


def test_the_forecast_learns_an_iteration() -> None:
    trace = AccessTrace(3)
    for layer in (2, 0, 0, 1):
        trace.use(layer)
    trace.end_iteration()
    assert list(trace.upcoming()) == [2, 0, 1]


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 5), max_size=30))
def test_a_forecast_may_be_wrong_without_harm(past: list[int], present: list[int]) -> None:
    trace = AccessTrace(6)
    for layer in past:
        trace.use(layer)
    trace.end_iteration()
    for layer in present:
        trace.use(layer)
        assert trace.next_use(layer) >= 0
        assert len(set(trace.upcoming())) == len(list(trace.upcoming())) <= 6


class Layers:
    """A cache over layers of 4 KiB with room for `room` of them."""

    def __init__(self, count: int, room: int) -> None:
        self.driver = EmulatedDriver(EmulatedOptions(seed=1))
        self.arena = HostArena(self.driver, count * 4096)
        self.space = ShadowSpace(self.driver, device_budget=room * 4096)
        self.buffer = self.space.buffer("layer", [self.arena.cut(4096) for _ in range(count)])
        self.trace = AccessTrace(count)
        self.held: set[int] = set()
        self.ready = set(range(count))
        self.settled: list[int] = []
        self.cache = LayerCache(
            self.buffer,
            self.trace,
            ready=self.ready.__contains__,
            held=self.held.__contains__,
            settle=self.settled.append,
        )
        self.stream = self.driver.create_stream(0)

    def use(self, *layers: int, training: bool = True) -> None:
        for layer in layers:
            self.cache.use(layer, self.stream, training=training)


def test_layers_are_loaded_ahead_and_evicted_by_farthest_use() -> None:
    layers = Layers(6, room=3)
    layers.use(0)
    assert layers.cache.resident == [0, 1, 2]
    layers.use(1)  # layer 0 is needed last of all in backward, so it makes room for 3
    assert layers.cache.resident == [1, 2, 3]
    layers.use(2, 3, 4, 5)
    assert layers.cache.resident == [3, 4, 5]  # what backward needs first
    layers.use(4)
    assert layers.cache.resident == [2, 3, 4]  # 5 is not needed again
    layers.use(3, 2, 1, 0)
    assert layers.cache.resident == [0, 1, 2]


def test_a_layer_is_evicted_after_whoever_writes_it() -> None:
    layers = Layers(3, room=2)
    layers.use(0, 1, 2)
    assert layers.settled == [0]
    assert layers.cache.resident == [1, 2]


def test_a_layer_is_not_loaded_ahead_before_it_is_ready() -> None:
    layers = Layers(6, room=3)
    layers.ready.discard(1)
    layers.use(0)
    assert layers.cache.resident == [0]


def test_pinned_and_held_layers_stay() -> None:
    layers = Layers(6, room=2)
    layers.use(0)
    layers.cache.pin(0)
    layers.use(1)
    layers.held.add(1)
    with pytest.raises(OutOfMemory, match=r"layer\[2\] needs .* layer\[0\], layer\[1\]"):
        layers.use(2)
    layers.held.clear()
    layers.use(2)
    assert layers.cache.resident == [0, 2]


def test_evaluation_does_not_disturb_the_forecast() -> None:
    layers = Layers(4, room=2)
    layers.use(0, 1, 2, 3, 2, 1, 0)
    layers.trace.end_iteration()
    layers.use(3, 1, 0, training=False)
    assert list(layers.trace.upcoming()) == [0, 1, 2, 3]


def test_room_that_is_there_is_used_and_nothing_is_evicted_for_an_early_load() -> None:
    layers = Layers(4, room=2)
    assert [layers.cache.load_early(layer) for layer in range(4)] == [True, True, False, False]


@pytest.fixture
def ring() -> Iterator[tuple[EmulatedDriver, Stream, Stream, StagingRing, HostArena]]:
    driver = EmulatedDriver(EmulatedOptions(seed=2))
    pool = DevicePool(driver, 0, 1 << 14)
    compute, copy = driver.create_stream(0), driver.create_stream(0)
    return driver, compute, copy, StagingRing(pool, 4096, compute), HostArena(driver, 1 << 16)


@given(data=st.data())
def test_the_ring_reuses_segments_only_behind_their_copies(data: st.DataObject) -> None:
    driver = EmulatedDriver(EmulatedOptions(seed=data.draw(st.integers(0, 5))))
    pool = DevicePool(driver, 0, 1 << 14)
    compute, copy = driver.create_stream(0), driver.create_stream(0)
    nbytes = 512 * data.draw(st.integers(1, 9))
    ring = StagingRing(pool, nbytes, compute)
    arena = HostArena(driver, 1 << 16)
    for value, size in enumerate(data.draw(st.lists(st.integers(1, 6000), max_size=12)), start=1):
        home = arena.address
        covered = 0
        for piece in ring.pieces(size, compute):
            assert piece.offset == covered
            assert ring.base <= piece.span.ptr
            assert piece.span.ptr + piece.span.nbytes <= ring.base + ring.nbytes
            assert piece.span.ptr % 256 == 0
            driver.fill(piece.span.ptr, value, piece.span.nbytes, stream=compute)
            copy.wait(compute.record())
            driver.copy(home + piece.offset, piece.span.ptr, piece.span.nbytes, stream=copy)
            ring.leaving(piece, copy.record())
            covered += piece.span.nbytes
        assert covered == size
        copy.synchronize()
        assert set(arena.array(arena.cut(0)._replace(ptr=home, nbytes=size)).tolist()) == {value}


def test_pieces_of_an_update_run_and_end_once_before_the_wait_returns() -> None:
    queue = UpdateQueue(threads=3)
    done: list[str] = []
    lock = threading.Lock()

    def piece(name: str) -> None:
        with lock:
            done.append(name)

    for layer in range(4):
        queue.submit(
            layer,
            [lambda layer=layer, part=part: piece(f"{layer}.{part}") for part in range(5)],
            lambda layer=layer: done.append(f"end {layer}"),
        )
    queue.wait(2)
    assert {f"2.{part}" for part in range(5)} < set(done)
    assert done.count("end 2") == 1
    queue.wait(2)
    queue.wait_all()
    assert sorted(done) == sorted(
        [f"{layer}.{part}" for layer in range(4) for part in range(5)] + [f"end {n}" for n in range(4)]
    )
    queue.close()
    queue.close()


def test_an_update_that_fails_ends_and_tells() -> None:
    queue = UpdateQueue(threads=2)
    ended = []

    def fail() -> None:
        raise ArithmeticError("in a piece")

    queue.submit(0, [fail, lambda: None], lambda: ended.append(0))
    queue.submit(1, [lambda: None], lambda: ended.append(1))
    with pytest.raises(ArithmeticError):
        queue.wait_all()
    assert sorted(ended) == [0, 1]
    assert queue.poll(0)
    queue.close()


def test_poll_does_not_block() -> None:
    queue = UpdateQueue(threads=1)
    gate = threading.Event()
    queue.submit(0, [lambda: gate.wait(10) and None], lambda: None)
    assert not queue.poll(0)
    gate.set()
    queue.wait(0)
    assert queue.poll(0)
    queue.close()


def test_a_budget_error_says_what_would_do() -> None:
    error = BudgetError("device_memory", 1 << 20, (100 << 20) + 1, "the head must be in it at once")
    assert "the smallest that works is 101MiB" in str(error)
    assert error.smallest == (100 << 20) + 1


def test_views_are_not_left_open_by_the_cache() -> None:
    layers = Layers(3, room=3)
    layers.use(0, 1, 2)
    with pytest.raises(Exception, match="open"):
        layers.buffer[1].acquire(Place.HOST, Mode.WRITE)
    layers.cache.release()
    layers.stream.synchronize()
    layers.buffer[1].acquire(Place.HOST, Mode.WRITE).release()
