"""What each adaptor adds to the resource below it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from memferry_allocator import (
    CountedMemory,
    Counts,
    DevicePool,
    DriverError,
    DriverMemory,
    InvalidRequestError,
    LimitedMemory,
    LoggedMemory,
    MemoryResource,
    OutOfMemory,
    RetryingMemory,
    Stream,
    TrackedMemory,
    VirtualMemory,
    read_log,
)
from memferry_allocator.device import Action, Adaptor

from ..threads import in_threads
from .machine import Machine
from .test_open_driver import in_a_process

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def pool(machine: Machine) -> DevicePool:
    return DevicePool(machine.driver, 0, MIB)


class Refusing(Adaptor):
    """Fails where it is told to."""

    def __init__(self, upstream: MemoryResource) -> None:
        super().__init__(upstream)
        self.refuse = False

    def allocate(self, nbytes: int, *, stream: Stream) -> int:
        self._check()
        return super().allocate(nbytes, stream=stream)

    def deallocate(self, ptr: int, nbytes: int, *, stream: Stream) -> None:
        self._check()
        super().deallocate(ptr, nbytes, stream=stream)

    def _check(self) -> None:
        if self.refuse:
            raise DriverError("CUDA_ERROR_UNKNOWN", "test")


ADAPTORS = {
    "limited": lambda upstream, path: LimitedMemory(upstream, MIB),
    "counted": lambda upstream, path: CountedMemory(upstream),
    "logged": lambda upstream, path: LoggedMemory(upstream, path),
    "tracked": lambda upstream, path: TrackedMemory(upstream),
    "retrying": lambda upstream, path: RetryingMemory(upstream, lambda _, attempt: attempt < 3),
}


@pytest.mark.parametrize("name", ADAPTORS)
def test_a_failure_below_changes_nothing(machine: Machine, pool: DevicePool, name: str, tmp_path: Path) -> None:
    below = Refusing(pool)
    adaptor, stream = ADAPTORS[name](below, tmp_path / "log.csv"), machine.stream()
    ptr = adaptor.allocate(MIB - 256, stream=stream)
    below.refuse = True
    for _ in range(3):
        with pytest.raises(DriverError):
            adaptor.allocate(256, stream=stream)
        with pytest.raises(DriverError):
            adaptor.deallocate(ptr, MIB - 256, stream=stream)
    below.refuse = False
    other = adaptor.allocate(256, stream=stream)
    adaptor.deallocate(other, 256, stream=stream)
    adaptor.deallocate(ptr, MIB - 256, stream=stream)
    adaptor.close()
    assert pool.used == 0


def test_adaptors_pass_on_what_a_pool_needs_to_know(machine: Machine) -> None:
    source = VirtualMemory(machine.driver, 0, 8 * MIB)
    adaptor = CountedMemory(LimitedMemory(source, 8 * MIB))
    assert (adaptor.granularity, adaptor.joins, adaptor.host_ordered) == (source.granularity, True, True)
    assert not CountedMemory(DriverMemory(machine.driver, 0)).joins


# -- limit -------------------------------------------------------------------------------------------------
def test_a_limit_is_exact(machine: Machine, pool: DevicePool) -> None:
    limited, stream = LimitedMemory(pool, 1000, name="scratch"), machine.stream()
    ptr = limited.allocate(700, stream=stream)  # 768 with the alignment
    with pytest.raises(OutOfMemory, match=r"scratch: asked for 256 B, 768 B of 1000 B in use") as caught:
        limited.allocate(1, stream=stream)
    error = caught.value
    assert (error.size, error.used, error.limit, error.budget) == (256, 768, 1000, "scratch")
    limited.deallocate(ptr, 700, stream=stream)
    assert (limited.used, pool.used) == (0, 0)


def test_threads_do_not_share_the_last_bytes(machine: Machine, pool: DevicePool) -> None:
    limited, streams, taken = LimitedMemory(pool, 20 * 256), [machine.stream() for _ in range(4)], []

    def work(number: int) -> None:
        for _ in range(10):
            try:
                taken.append((limited.allocate(256, stream=streams[number]), streams[number]))
            except OutOfMemory:
                return

    in_threads(4, work)
    assert (len(taken), limited.used, pool.used) == (20, 20 * 256, 20 * 256)
    for ptr, stream in taken:
        limited.deallocate(ptr, 256, stream=stream)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_nothing(pool: DevicePool, limit: int) -> None:
    with pytest.raises(InvalidRequestError, match="not more than zero"):
        LimitedMemory(pool, limit)


# -- counts ------------------------------------------------------------------------------------------------
def test_counts(machine: Machine, pool: DevicePool) -> None:
    counted, stream = CountedMemory(pool), machine.stream()
    one, other = counted.allocate(100, stream=stream), counted.allocate(1000, stream=stream)
    counted.allocate(0, stream=stream)
    counted.deallocate(other, 1000, stream=stream)
    other = counted.allocate(50, stream=stream)
    assert counted.counts == Counts(150, 2, 1100, 2, 1150, 3)
    with pytest.raises(OutOfMemory):
        counted.allocate(2 * MIB, stream=stream)
    counted.deallocate(other, 50, stream=stream)
    counted.deallocate(one, 100, stream=stream)
    assert counted.counts == Counts(0, 0, 1100, 2, 1150, 3)


def test_scopes(machine: Machine, pool: DevicePool) -> None:
    counted, stream = CountedMemory(pool), machine.stream()
    before = counted.allocate(1000, stream=stream)
    counted.push()
    inside = counted.allocate(300, stream=stream)
    counted.push()
    counted.deallocate(before, 1000, stream=stream)
    assert counted.counts == Counts(-1000, -1, 0, 0, 0, 0)
    counted.pop()
    assert counted.counts == Counts(-700, 0, 300, 1, 300, 1)
    assert counted.pop() == Counts(-700, 0, 300, 1, 300, 1)
    assert counted.counts == Counts(300, 1, 1300, 2, 1300, 2)
    with pytest.raises(InvalidRequestError, match="pop without a push"):
        counted.pop()
    counted.deallocate(inside, 300, stream=stream)


# -- log ---------------------------------------------------------------------------------------------------
def test_a_log_says_what_happened(machine: Machine, pool: DevicePool, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    logged, one, other = LoggedMemory(pool, path), machine.stream(), machine.stream()
    first, second = logged.allocate(100, stream=one), logged.allocate(200, stream=other)
    logged.allocate(0, stream=one)
    logged.deallocate(first, 100, stream=one)
    third = logged.allocate(100, stream=one)
    with pytest.raises(OutOfMemory):
        logged.allocate(2 * MIB, stream=other)
    logged.deallocate(second, 200, stream=one)
    logged.close()
    logged.deallocate(third, 100, stream=one)
    logged.close()
    entries = list(read_log(path))
    assert [(e.action, e.id, e.pointer, e.nbytes, e.stream) for e in entries] == [
        (Action.ALLOCATE, 1, first, 100, 0),
        (Action.ALLOCATE, 2, second, 200, 1),
        (Action.FREE, 1, first, 100, 0),
        (Action.ALLOCATE, 3, third, 100, 0),
        (Action.REFUSE, 0, 0, 2 * MIB, 1),
        (Action.FREE, 2, second, 200, 0),
    ]
    assert sorted(e.seconds for e in entries) == [e.seconds for e in entries]
    assert path.read_text().splitlines()[:2] == [
        "# memferry allocation log, version 1",
        "action,seconds,thread,id,pointer,nbytes,stream",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not an allocation log"),
        ("# memferry allocation log, version 2\n", "not an allocation log"),
        ("# memferry allocation log, version 1\naction,seconds\n", "not an allocation log"),
        ("{}allocate,0,1,1,0x100,x,0\n", "line 3: 'allocate,0,1,1,0x100,x,0' is no entry"),
        ("{}allocate,0,1,1,0x100,1,0\nallocate,0\n", "line 4"),
        ("{}take,0,1,1,0x100,1,0\n", "line 3"),
    ],
)
def test_what_is_no_log(tmp_path: Path, text: str, said: str) -> None:
    head = "# memferry allocation log, version 1\naction,seconds,thread,id,pointer,nbytes,stream\n"
    path = tmp_path / "log.csv"
    path.write_text(text.format(head))
    with pytest.raises(InvalidRequestError, match=said):
        list(read_log(path))


# -- tracking ----------------------------------------------------------------------------------------------
def test_leaks_are_told_with_their_stacks(machine: Machine, pool: DevicePool) -> None:
    tracked, stream = TrackedMemory(pool), machine.stream()

    def a_leaky_function() -> int:
        return tracked.allocate(1000, stream=stream)

    leak, other = a_leaky_function(), tracked.allocate(1, stream=stream)
    tracked.deallocate(other, 1, stream=stream)
    (live,) = tracked.live
    assert (live.ptr, live.nbytes, live.number, live.thread) == (leak, 1000, 1, "MainThread")
    report = tracked.report()
    assert report.startswith("1 allocation(s) are live, 1000 B:\n#1: 1000 B at")
    assert "a_leaky_function" in report
    assert "tracked.allocate(1000, stream=stream)" in report
    with pytest.warns(ResourceWarning, match="a_leaky_function"):
        tracked.close()
    tracked.close()
    tracked.deallocate(leak, 1000, stream=stream)
    assert tracked.report() == ""


def test_no_leaks_are_no_news(machine: Machine, pool: DevicePool) -> None:
    tracked, stream = TrackedMemory(pool, depth=0), machine.stream()
    tracked.deallocate(tracked.allocate(1, stream=stream), 1, stream=stream)
    tracked.close()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_as_much_of_the_stack_as_asked_for(machine: Machine, pool: DevicePool, depth: int) -> None:
    tracked, stream = TrackedMemory(pool, depth=depth), machine.stream()
    ptr = tracked.allocate(1, stream=stream)
    (live,) = tracked.live
    assert len(live.stack) == depth
    assert all(frame.name == "test_as_much_of_the_stack_as_asked_for" for frame in live.stack[-1:])
    tracked.deallocate(ptr, 1, stream=stream)


@pytest.mark.parametrize("at_exit", [False, True])
def test_a_tracker_that_dies(
    machine: Machine, pool: DevicePool, capsys: pytest.CaptureFixture[str], at_exit: bool
) -> None:
    stream = machine.stream()
    TrackedMemory(pool, at_exit=at_exit).allocate(1, stream=stream)
    gc.collect()
    assert ("1 allocation(s) are live" in capsys.readouterr().err) is at_exit


@pytest.mark.parametrize("at_exit", [False, True])
def test_a_report_at_the_end_of_the_process(at_exit: bool) -> None:
    said = in_a_process(
        "import sys\n"
        "sys.stderr = sys.stdout\n"
        "from memferry_allocator import DriverMemory, EmulatedDriver, TrackedMemory\n"
        "driver = EmulatedDriver()\n"
        f"tracked = TrackedMemory(DriverMemory(driver, 0), at_exit={at_exit})\n"
        "tracked.allocate(1000, stream=driver.create_stream(0))\n"
        "print('end')\n"
    )
    assert said.splitlines()[0] == "end"
    assert ("1 allocation(s) are live, 1000 B" in said) is at_exit


# -- another chance ----------------------------------------------------------------------------------------
def test_memory_is_made_by_a_callback(machine: Machine, pool: DevicePool) -> None:
    stream, asked = machine.stream(), []
    held = [pool.allocate(256 * KIB, stream=stream) for _ in range(4)]

    def evict(nbytes: int, attempt: int) -> bool:
        asked.append((nbytes, attempt))
        if not held:
            return False
        pool.deallocate(held.pop(), 256 * KIB, stream=stream)
        return True

    retrying = RetryingMemory(pool, evict)
    ptr = retrying.allocate(700 * KIB, stream=stream)
    assert asked == [(700 * KIB, 1), (700 * KIB, 2), (700 * KIB, 3)]
    with pytest.raises(OutOfMemory):
        retrying.allocate(2 * MIB, stream=stream)
    assert asked[3:] == [(2 * MIB, 1), (2 * MIB, 2)]
    retrying.deallocate(ptr, 700 * KIB, stream=stream)


def test_what_a_callback_raises_is_the_answer(machine: Machine, pool: DevicePool) -> None:
    def give_up(nbytes: int, attempt: int) -> bool:
        raise KeyError("no more")

    with pytest.raises(KeyError):
        RetryingMemory(pool, give_up).allocate(2 * MIB, stream=machine.stream())


# -- accounts ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["limited", "counted", "logged", "tracked"])
def test_what_did_not_come_through_it_does_not_go_back_through_it(
    machine: Machine, pool: DevicePool, name: str, tmp_path: Path
) -> None:
    adaptor, stream = ADAPTORS[name](pool, tmp_path / "log.csv"), machine.stream()
    stranger, mine = pool.allocate(1000, stream=stream), adaptor.allocate(300, stream=stream)
    for ptr, nbytes in ((stranger, 1000), (mine, 1000), (mine, 0), (0, 1)):
        with pytest.raises(InvalidRequestError, match="not a live allocation"):
            adaptor.deallocate(ptr, nbytes, stream=stream)
    adaptor.deallocate(mine, 400, stream=stream)  # the same multiple of 256
    if isinstance(adaptor, LimitedMemory):
        assert adaptor.used == 0
    if isinstance(adaptor, CountedMemory):
        assert adaptor.counts == Counts(0, 0, 300, 1, 300, 1)
    adaptor.close()
    pool.deallocate(stranger, 1000, stream=stream)
    assert pool.used == 0


def test_a_full_disk_ends_the_log_and_loses_no_memory(machine: Machine, pool: DevicePool) -> None:
    logged, stream = LoggedMemory(pool, "/dev/full"), machine.stream()
    for _ in range(1000):  # more than the buffer of a file
        logged.deallocate(logged.allocate(100, stream=stream), 100, stream=stream)
    assert pool.used == 0
    with pytest.warns(ResourceWarning, match="not complete"):
        logged.close()
    logged.close()


def test_a_disk_that_is_full_at_the_end(machine: Machine, pool: DevicePool) -> None:
    logged = LoggedMemory(pool, "/dev/full")
    with pytest.warns(ResourceWarning, match="not complete"):
        logged.close()


# -- finalisers --------------------------------------------------------------------------------------------
FINALISERS = """
import faulthandler, gc, weakref
from memferry_allocator import *

faulthandler.dump_traceback_later(60, exit=True)
driver = EmulatedDriver()
stream, pool = driver.create_stream(0), DevicePool(driver, 0, 1 << 20)
resources = [
    LimitedMemory(pool, 1 << 20), CountedMemory(pool), TrackedMemory(pool), LoggedMemory(pool, "/dev/null"),
    DriverMemory(driver, 0), DevicePool(SizeOnlyDriver(1 << 30), 0, 0, maximum=1 << 30),
]

class Node:
    pass

gc.set_threshold(7, 2, 2)
for resource in resources:
    lane = resource.driver.create_stream(0)
    for _ in range(800):
        node = Node()
        node.me = node
        weakref.finalize(node, resource.deallocate, resource.allocate(256, stream=lane), 256, stream=lane)
gc.collect()
gc.set_threshold(50, 5, 5)
source = VirtualMemory(driver, 0, 1 << 30)
main = DevicePool(driver, 0, 0, maximum=1 << 29, source=source)
for _ in range(100):
    node = Node()
    node.me, node.pool = node, DevicePool(driver, 0, 0, maximum=4 << 20, source=source)
    node.pool.deallocate(node.pool.allocate(256, stream=stream), 256, stream=stream)
    del node
    main.deallocate(main.allocate(256, stream=stream), 256, stream=stream)
    main.trim()
gc.collect()
assert (pool.used, resources[0].used, resources[1].counts.current_bytes, resources[2].live) == (0, 0, 0, ())
assert (source.reserved, resources[4].reserved, resources[5].used) == (0, 0, 0)
print("end")
"""


def test_finalisers_give_back_in_the_middle_of_calls() -> None:
    assert in_a_process(FINALISERS) == "end"
