"""Whose device copy goes: policies, pins, and room in one piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memferry_allocator import (
    ArenaOptions,
    Direction,
    EmulatedDriver,
    EmulatedOptions,
    EvictionPolicy,
    InvalidRequestError,
    LeastRecentlyUsed,
    Mode,
    OutOfMemory,
    Partition,
    Place,
    PlannedOrder,
    ShadowSpace,
)

from .machine import pattern, refused
from .shadow_world import LAZY, SIZE, Moves, World, snapshot


def residency(world: World) -> list[bool]:
    return [part.resident for part in world.buffer]


# -- the least recently used ------------------------------------------------------------------------------------
def test_the_least_recently_used_copy_goes_first(world: World) -> None:
    first, second, third = world.buffer
    world.read(first, Place.DEVICE)
    world.read(second, Place.DEVICE)
    world.read(first, Place.HOST)  # a use, too
    world.read(third, Place.DEVICE)
    assert [part.resident for part in world.buffer] == [True, False, True]
    third.prefetch()
    first.prefetch()
    world.read(second, Place.DEVICE)
    assert [part.resident for part in world.buffer] == [True, True, False]


def test_copies_in_use_stay(world: World) -> None:
    first, second, third = world.buffer
    with first.acquire(Place.DEVICE, Mode.READ, stream=world.stream):
        world.read(second, Place.DEVICE)
        world.read(third, Place.DEVICE)
        assert [part.resident for part in world.buffer] == [True, False, True]


def test_the_end_of_a_use_counts(world: World) -> None:
    first, second, third = world.buffer
    with first.acquire(Place.DEVICE, Mode.READ, stream=world.stream):
        world.read(second, Place.DEVICE)
    world.read(third, Place.DEVICE)
    assert residency(world) == [True, False, True]


# -- plans ------------------------------------------------------------------------------------------------------
class Plain:
    """A space of equal partitions on a machine of its own, which counts loads."""

    def __init__(self, parts: int, room: int, *, sizes: list[int] | None = None) -> None:
        self.driver = EmulatedDriver(EmulatedOptions(eagerness=1.0))
        self.moves = Moves(self.driver, 0)
        self.space = ShadowSpace(self.driver, device_budget=room * 256, copier=self.moves)
        self.parts = self.space.allocate("b", partitions=sizes or [256] * parts, options=ArenaOptions(touch=False))
        self.stream = self.driver.create_stream(0)

    def use(self, *parts: int) -> None:
        for part in parts:
            self.parts[part].acquire(Place.DEVICE, Mode.READ, stream=self.stream).release()

    @property
    def loads(self) -> int:
        return self.moves.made.count(Direction.HOST_TO_DEVICE)


def fewest_loads(uses: list[int], room: int) -> int:
    """Bélády's rule, written down once more: what the best plan needs."""
    resident: set[int] = set()
    loads = 0
    for turn, part in enumerate(uses):
        if part not in resident:
            loads += 1
            if len(resident) == room:
                later = {p: uses.index(p, turn) if p in uses[turn:] else math.inf for p in resident}
                resident.remove(max(resident, key=lambda p: later[p]))
            resident.add(part)
    return loads


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 5), st.booleans())
def test_a_plan_that_is_followed_needs_the_fewest_loads(uses: list[int], room: int, cyclic: bool) -> None:
    world, turns = Plain(6, room), 2 if cyclic else 1
    world.space.eviction = PlannedOrder([world.parts[part] for part in uses], cyclic=cyclic)
    world.use(*uses * turns)
    if cyclic:  # the end of the second turn is planned as if a third came
        assert world.loads <= fewest_loads(uses, room) * 2
    else:
        assert world.loads == fewest_loads(uses, room)


@given(
    st.lists(st.integers(0, 5), max_size=20),
    st.lists(st.integers(0, 5), max_size=30),
    st.integers(1, 5),
    st.booleans(),
)
def test_a_plan_may_be_wrong_without_harm(plan: list[int], uses: list[int], room: int, cyclic: bool) -> None:
    world = Plain(6, room)
    policy = world.space.eviction = PlannedOrder([world.parts[part] for part in plan], cyclic=cyclic)
    for part in uses:
        before = policy.position
        world.use(part)
        assert world.parts[part].resident
        assert 0 <= policy.position - before <= len(set(plan))
        assert cyclic or policy.position <= len(plan)


def test_partitions_outside_the_plan_go_first() -> None:
    world = Plain(5, room=3)
    world.space.eviction = PlannedOrder([world.parts[part] for part in (0, 1, 2, 0, 1, 2)])
    world.use(0, 4, 1, 2)
    assert [part.resident for part in world.parts] == [True, True, True, False, False]
    world.use(3)  # room for it by what is needed last, which is 2
    assert [part.resident for part in world.parts] == [True, True, False, True, False]


def test_skipped_uses_do_not_hold_the_plan_up() -> None:
    world = Plain(4, room=2)
    policy = world.space.eviction = PlannedOrder([world.parts[part] for part in (0, 1, 2, 3, 0, 1)])
    world.use(1)
    assert policy.position == 2
    world.use(3)
    assert policy.position == 4
    world.use(3)  # outside the plan by now
    assert policy.position == 4


def test_only_device_uses_move_a_plan() -> None:
    world = Plain(2, room=1)
    policy = world.space.eviction = PlannedOrder(list(world.parts))
    world.parts[0].acquire(Place.HOST, Mode.READ).release()
    world.parts[0].acquire(Place.MAPPED, Mode.READ, stream=world.stream).release()
    assert policy.position == 0


# -- policies of others -----------------------------------------------------------------------------------------
class Scripted:
    """Gives the answers it was told to, and notes what it was asked and told."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[list[Partition]] = []
        self.told: list[Partition] = []
        self.broken = False

    def victim(self, candidates: Collection[Partition]) -> Partition | None:
        self.asked.append(list(candidates))
        return self.answers.pop(0)  # type: ignore[no-any-return]

    def used(self, partition: Partition) -> None:
        if self.broken:
            raise ArithmeticError("a policy's mistake")
        self.told.append(partition)


def test_a_policy_chooses_among_idle_copies_in_the_order_of_their_use(world: World) -> None:
    first, second, third = world.buffer
    policy: EvictionPolicy = Scripted(second)
    world.space.eviction = policy
    assert isinstance(policy, Scripted)
    world.read(second, Place.DEVICE)
    world.read(first, Place.DEVICE)
    world.read(second, Place.HOST)
    world.read(third, Place.DEVICE)
    assert policy.asked == [[first, second]]
    assert policy.told == [second, first, third]
    assert residency(world) == [True, False, True]


@pytest.mark.parametrize("answer", [None, "in use", "elsewhere", 7])
def test_answers_that_are_no_candidate(world: World, answer: Any) -> None:
    first, second, third = world.buffer
    other = ShadowSpace(world.driver, device_budget=SIZE)
    answers = {"in use": first, "elsewhere": other.allocate("o", 256, options=LAZY)[0]}
    world.space.eviction = Scripted(answers.get(answer, answer))
    with first.acquire(Place.DEVICE, Mode.READ, stream=world.stream):
        world.read(second, Place.DEVICE)
        before = snapshot(world.space)
        kind, match = (
            (OutOfMemory, "device budget") if answer is None else (InvalidRequestError, "Scripted.*candidates")
        )
        with pytest.raises(kind, match=match):
            third.acquire(Place.DEVICE, Mode.READ, stream=world.stream)
        assert snapshot(world.space) == before
    other.close()


def test_a_policy_that_fails_leaves_no_view_open(world: World) -> None:
    policy = world.space.eviction = Scripted()
    policy.broken = True
    with pytest.raises(ArithmeticError):
        world.part.acquire(Place.DEVICE, Mode.READ, stream=world.stream)
    assert not world.part.in_use
    policy.broken = False
    assert np.array_equal(world.read(world.part, Place.DEVICE), pattern(SIZE))


@pytest.mark.parametrize("way", ["constructor", "setter"])
@pytest.mark.parametrize("what", [7, "nothing of this space", "no partition"])
def test_policies_that_are_none(world: World, way: str, what: Any) -> None:
    other = ShadowSpace(world.driver, device_budget=SIZE)
    foreign = other.allocate("o", 256, options=LAZY)
    policies = {"nothing of this space": PlannedOrder(foreign), "no partition": PlannedOrder([3])}  # type: ignore[list-item]
    policy: Any = policies.get(what, what)
    held = world.driver.memory_info(0).free
    calls: dict[str, Callable[[], object]] = {
        "setter": lambda: setattr(world.space, "eviction", policy),
        "constructor": lambda: ShadowSpace(world.driver, device_budget=SIZE, eviction=policy),
    }
    with pytest.raises(InvalidRequestError, match="eviction"):
        calls[way]()
    assert isinstance(world.space.eviction, LeastRecentlyUsed)
    assert world.driver.memory_info(0).free == held
    other.close()


# -- room in one piece ------------------------------------------------------------------------------------------
@given(
    sizes=st.lists(st.integers(1, 2048), min_size=3, max_size=12),
    uses=st.lists(st.integers(0, 11), max_size=40),
    last=st.integers(0, 11),
    share=st.floats(0, 1),
)
def test_what_fits_alone_fits_whatever_lay_there(
    sizes: list[int], uses: list[int], last: int, share: float
) -> None:
    """However memory is cut up: if nothing is in use, any partition of the budget's size finds room."""
    blocks = [-(-size // 256) for size in sizes]
    room = max(blocks) + int(share * (sum(blocks) - max(blocks)))
    world = Plain(0, room, sizes=sizes)
    for part in (*uses, last):
        world.use(part % len(sizes))
        assert world.parts[part % len(sizes)].resident
        assert world.space.pool.used <= room * 256


def test_neighbours_go_rather_than_everybody() -> None:
    """Two of four side by side are enough, where the two least recently used are not neighbours."""
    world = Plain(0, 4, sizes=[256] * 4 + [512])
    world.use(0, 1, 2, 3)
    world.use(0, 2, 1, 3)
    world.use(4)
    resident = [part.resident for part in world.parts]
    assert resident[3:] == [True, True]
    assert sum(resident) == 3


@given(busy=st.sets(st.integers(0, 7), max_size=7), order=st.permutations(range(8)), want=st.integers(1, 8))
def test_copies_in_use_are_worked_round(busy: set[int], order: list[int], want: int) -> None:
    """A request succeeds exactly if what is idle or free holds it in one piece; what is in use stays."""
    world = Plain(0, 8, sizes=[256] * 8 + [256 * want])
    world.use(*range(8))
    world.use(*order)
    places = sorted(range(8), key=lambda part: world.parts[part].copy_address)
    views = [world.parts[part].acquire(Place.DEVICE, Mode.READ, stream=world.stream) for part in busy]
    longest = run = 0
    for part in places:
        run = 0 if part in busy else run + 1
        longest = max(longest, run)
    if longest >= want:
        world.use(8)
        gone = [part for part in range(8) if not world.parts[part].resident]
        assert len(gone) == want  # all are of one size, so that no more need go
    else:
        with pytest.raises(OutOfMemory):
            world.use(8)
    assert all(world.parts[part].resident for part in busy)
    for view in views:
        view.release()


def test_a_request_that_cannot_succeed_evicts_nothing(world: World) -> None:
    first, second, _ = world.buffer
    large = world.space.allocate("large", 2 * SIZE, options=LAZY)[0]
    with first.acquire(Place.DEVICE, Mode.READ, stream=world.stream):
        world.read(second, Place.DEVICE)
        before = snapshot(world.space)
        for call in (large.prefetch, large.pin, lambda: world.read(large, Place.DEVICE)):
            with pytest.raises(OutOfMemory):
                call()
            assert snapshot(world.space) == before


def test_a_copy_of_the_same_size_hands_its_memory_on(world: World) -> None:
    """It does not go through the pool: the newer bytes go home, and the next user waits for the last."""
    first, second, third = world.buffer
    world.write(first, 1)
    address = first.copy_address
    world.write(second, 2)
    world.write(third, 3, stream=world.other)
    assert third.copy_address == address
    assert not first.resident
    assert [set(world.read(part)) for part in world.buffer] == [{1}, {2}, {3}]


def test_memory_that_is_handed_on_is_as_long_as_its_new_user(world: World) -> None:
    """Both take as much of the budget, in whole multiples of the alignment."""
    space, first = world.space, world.buffer[0]
    space.resize(SIZE)
    short = space.buffer("short", [world.arena.cut(SIZE - 100)])[0]
    assert short.reserved == first.reserved
    world.arena.array(short.host)[:] = 7
    for _ in range(2):
        assert set(world.read(short, Place.DEVICE)[: SIZE - 100]) == {7}
        assert list(world.read(first, Place.DEVICE)) == list(pattern(SIZE, 0))
    with short.acquire(Place.DEVICE, Mode.READ_WRITE, stream=world.stream) as view:
        assert view.nbytes == SIZE - 100
        world.driver.fill(view.ptr, 8, view.nbytes, stream=world.stream)
    assert first.copy_address == 0
    assert [set(world.read(first, Place.DEVICE)), set(world.home(short))] == [set(pattern(SIZE, 0)), {8}]
    assert space.device_used == SIZE


# -- pins -------------------------------------------------------------------------------------------------------
def test_a_pinned_copy_stays(world: World) -> None:
    first, second, third = world.buffer
    with first.pinned() as held:
        assert held is first
        assert first.pins == 1
        assert first.resident
        for part in (second, third, second):
            world.read(part, Place.DEVICE)
        assert first.resident
        with pytest.raises(InvalidRequestError, match="unpin"):
            first.evict()
        for call in (lambda: world.space.resize(SIZE), world.space.close, world.buffer.close):
            with pytest.raises(InvalidRequestError, match=r"weights\[0\] are pinned"):
                call()
    assert first.pins == 0
    first.evict()


def test_pins_are_counted(world: World) -> None:
    world.part.pin()
    world.part.pin()
    world.part.unpin()
    assert world.part.pins == 1
    for part in (world.buffer[1], world.buffer[2]):
        world.read(part, Place.DEVICE)
    assert world.part.resident
    world.part.unpin()
    with pytest.raises(InvalidRequestError, match="not pinned"):
        world.part.unpin()
    for part in (world.buffer[1], world.buffer[2]):
        world.read(part, Place.DEVICE)
    assert not world.part.resident


def test_a_pin_that_does_not_fit(world: World) -> None:
    first, second, third = world.buffer
    first.pin()
    second.pin()
    before = snapshot(world.space)
    with pytest.raises(OutOfMemory) as caught:
        third.pin()
    assert (caught.value.used, caught.value.limit) == (2 * SIZE, 2 * SIZE)
    assert snapshot(world.space) == before
    first.unpin()
    third.pin()
    assert residency(world) == [False, True, True]
    for part in (second, third):
        part.unpin()


@pytest.mark.parametrize("place", [Place.HOST, Place.MAPPED])
@pytest.mark.parametrize("after", [Mode.READ, Mode.WRITE, Mode.READ_WRITE])
def test_a_pinned_copy_is_brought_up_to_date_in_its_place(world: World, place: Place, after: Mode) -> None:
    stream = None if place is Place.HOST else world.stream
    with world.part.pinned():
        address = world.part.copy_address
        world.write(world.part, 6)
        with world.part.acquire(place, Mode.WRITE, stream=stream) as view:
            if place is Place.HOST:
                world.home(world.part)[:] = 7
            else:
                world.driver.fill(view.ptr, 7, SIZE, stream=world.stream)
            with pytest.raises(InvalidRequestError, match="writing view"):
                world.part.pin()
        assert not world.part.resident
        assert not world.part.dirty
        assert world.space.device_used == SIZE
        world.moves.since()
        with world.part.acquire(Place.DEVICE, after, stream=world.other) as view:
            assert view.ptr == address
            if after.writes:
                world.driver.fill(view.ptr, 8, SIZE, stream=world.other)
        assert world.moves.since() == (int(after.reads), 0)
        assert set(world.read(world.part)) == {8 if after.writes else 7}


def test_an_outdated_copy_goes_with_its_last_pin(world: World) -> None:
    with world.part.pinned():
        world.part.acquire(Place.HOST, Mode.READ_WRITE).release()
    assert world.space.device_used == 0


def test_bringing_a_pinned_copy_up_to_date_may_fail(world: World) -> None:
    """Nothing passes for valid that is not, and nothing leaks."""
    with world.part.pinned():
        with world.part.acquire(Place.HOST, Mode.WRITE):
            world.home(world.part)[:] = 7
        world.moves.broken = True
        for call in (world.part.prefetch, world.part.pin, lambda: world.read(world.part, Place.DEVICE)):
            with refused("INVALID_VALUE"):
                call()
            assert not world.part.resident
            assert world.part.pins == 1
        world.moves.broken = False
        assert set(world.read(world.part, Place.DEVICE)) == {7}
    assert world.space.device_used == SIZE


def test_pinning_under_an_open_device_view(world: World) -> None:
    with world.part.acquire(Place.DEVICE, Mode.WRITE, stream=world.stream) as view:
        world.part.pin()
        world.driver.fill(view.ptr, 3, SIZE, stream=world.stream)
    assert world.part.dirty
    world.part.unpin()
    assert set(world.read(world.part)) == {3}


def test_choosing_costs_no_look_at_everybody() -> None:
    """The default policy asks for the first candidate only, however many there are."""

    class Counting(LeastRecentlyUsed):
        looked = 0

        def victim(self, candidates: Collection[Partition]) -> Partition | None:
            counting = self

            class Watched(Collection[Partition]):
                def __iter__(self) -> Any:
                    for candidate in candidates:
                        counting.looked += 1
                        yield candidate

                def __len__(self) -> int:
                    return len(candidates)

                def __contains__(self, item: object) -> bool:
                    return item in candidates

            return super().victim(Watched())

    world = Plain(64, room=48)
    policy = world.space.eviction = Counting()
    world.use(*range(64))
    assert policy.looked == 16
