"""The free blocks of a pool: they merge exactly, and know who used which part."""

from __future__ import annotations

import pytest

from memferry_allocator import Driver, Stream
from memferry_allocator.device.blocks import MANY_USES, Block, FreeBlocks
from memferry_allocator.device.marks import Mark

from .machine import Machine

START = 1 << 20


def block(index: int, *marks: Mark, size: int = 1, run: int = 0) -> Block:
    """`size` units of 256 bytes from the unit `index` on."""
    start, end = START + 256 * index, START + 256 * (index + size)
    return Block(start, end - start, run, [(start, end, mark) for mark in marks])


def recorded(driver: Driver, stream: Stream) -> Mark:
    return Mark(driver, stream, stream.record())


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 2, 0), (2, 1, 0)])
def test_neighbours_merge_in_any_order(order: tuple[int, ...]) -> None:
    free = FreeBlocks()
    for index in order:
        free.add(block(index))
    (whole,) = free
    assert (whole.start, whole.size, free.largest) == (START, 768, 768)
    assert free.starting_at(START) is free.ending_at(START + 768) is whole
    assert free.starting_at(START + 256) is free.ending_at(START + 256) is None


def test_neighbours_of_different_runs_stay_apart() -> None:
    free = FreeBlocks()
    for index in (1, 0, 2):
        free.add(block(index, run=index))
    assert (len(list(free)), free.largest) == (3, 256)


def test_the_tightest_block_at_the_lowest_address(machine: Machine) -> None:
    free, stream = FreeBlocks(), machine.stream()
    for index, size in ((20, 2), (0, 4), (10, 2), (30, 3)):
        free.add(block(index, size=size))
    fits = [free.fit(256 * size, stream) for size in (1, 2, 3, 4, 5)]
    assert [None if fit is None else (fit[1] - START) // 256 for fit in fits] == [10, 10, 30, 0, None]


def test_cutting_leaves_both_ends_with_their_uses(machine: Machine) -> None:
    free, marks = FreeBlocks(), [recorded(machine.driver, machine.stream()) for _ in range(3)]
    for index, mark in enumerate(marks):
        free.add(block(2 * index, mark, size=2))
    (whole,) = free
    middle = free.cut(whole, START + 256, 4 * 256)
    assert (middle.start, middle.size, middle.uses) == (START + 256, 4 * 256, [])
    left, right = sorted(free, key=lambda part: part.start)
    assert left.uses == [(START, START + 256, marks[0])]
    assert right.uses == [(START + 5 * 256, START + 6 * 256, marks[2])]


def test_marks_are_those_of_the_part(machine: Machine) -> None:
    free, marks = FreeBlocks(), [recorded(machine.driver, machine.stream()) for _ in range(2)]
    free.add(block(0, marks[0]))
    free.add(block(1, marks[1]))
    (whole,) = free
    assert whole.marks(START, START + 256) == [marks[0]]
    assert whole.marks(START + 256, START + 512) == [marks[1]]
    assert whole.marks(START + 255, START + 257) == marks


def test_of_every_stream_the_last_mark_counts(machine: Machine) -> None:
    free, one, other = FreeBlocks(), machine.stream(), machine.stream()
    marks = [recorded(machine.driver, stream) for stream in (one, other, one)]
    for index, mark in enumerate(marks):
        free.add(block(index, mark))
    (whole,) = free
    assert whole.marks(START, START + 3 * 256) == [marks[2], marks[1]]


def test_one_mark_on_neighbours_is_one_use(machine: Machine) -> None:
    free, mark = FreeBlocks(), Mark(machine.driver, machine.stream())
    for index in range(100):
        free.add(block(index, mark))
    (whole,) = free
    assert whole.uses == [(START, START + 100 * 256, mark)]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("unrecorded", [False, True])
def test_many_uses_become_one_a_stream_with_its_last_event(
    machine: Machine, backwards: bool, unrecorded: bool
) -> None:
    free, streams = FreeBlocks(), [machine.stream() for _ in range(3)]
    count = 3 * (MANY_USES // 3 + 1)
    marks = [recorded(machine.driver, streams[index % 3]) for index in range(count)]
    if unrecorded:
        marks[3] = Mark(machine.driver, streams[0])
    last = {streams[0]: marks[3] if unrecorded else marks[-3], streams[1]: marks[-2], streams[2]: marks[-1]}
    for index in range(count):
        free.add(block(index, marks[count - 1 - index if backwards else index]))
    (whole,) = free
    assert {mark.stream: mark for _, _, mark in whole.uses} == last
    for index in range(count):
        used_by = marks[count - 1 - index if backwards else index].stream
        assert used_by in {mark.stream for mark in whole.marks(START + 256 * index, START + 256 * index + 256)}


def test_what_the_host_has_waited_for_is_kept_apart(machine: Machine) -> None:
    """Each token is the knowledge of another thread."""
    free = FreeBlocks()
    marks = [Mark(machine.driver, None, token=machine.driver.publish()) for _ in range(MANY_USES + 1)]
    for index, mark in enumerate(marks):
        free.add(block(index, mark))
    (whole,) = free
    assert [mark for _, _, mark in whole.uses] == marks


@pytest.mark.parametrize(
    ("first", "last", "opening"), [(0, 2, 2), (2, 6, 0), (1, 5, 5), (1, 6, 6), (1, 7, None), (0, 8, None)]
)
def test_a_captured_stream_bars_its_part_only(
    machine: Machine, first: int, last: int, opening: int | None
) -> None:
    """Of eight units, those from `first` on are shut; two units are looked for."""
    free, stream, captured = FreeBlocks(), machine.stream(), machine.stream()
    shut = Mark(machine.driver, captured)
    for index in range(8):
        free.add(block(index, *([shut] if first <= index < last else [])))
    machine.driver.begin_capture(captured)
    fit = free.fit(512, stream)
    machine.driver.end_capture(captured)
    assert (None if fit is None else (fit[1] - START) // 256) == opening
    after = free.fit(512, stream)
    assert after is not None
    assert after[1] == START
