"""Several ways at once: the right bytes, in order, in the time that was predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_allocator import (
    CaptureMode,
    Direction,
    EmulatedDriver,
    EmulatedOptions,
    Event,
    RaceError,
    RegistrationMap,
    Span,
    Stream,
    registrations,
)
from memferry_allocator.driver import LinkModel
from memferry_transport import (
    InvalidTransferError,
    LinearCost,
    Measured,
    Path,
    Transfer,
    TransferEngine,
    TransferOptions,
)

from ..allocator.machine import Bytes, Machine, address, pages, pattern
from ..threads import in_threads
from .fleet import IN, OUT, Fleet, calibrated, slow_links


@pytest.fixture
def make() -> Iterator[Callable[..., Fleet]]:
    """Fleets of three devices unless told otherwise, closed at the end."""
    fleets: list[Fleet] = []

    def fleet(nbytes: int = 4000, driver: EmulatedDriver | None = None, **options: Any) -> Fleet:
        fleets.append(Fleet(driver or slow_links(3), nbytes, **options))
        return fleets[-1]

    yield fleet
    for found in fleets:
        found.close()


def timed(fleet: Fleet, direction: Direction) -> float:
    before = fleet.driver.now  # type: ignore[attr-defined]
    fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream).synchronize()
    return float(fleet.driver.now - before)  # type: ignore[attr-defined]


# -- time and choice ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_all_links_together(make: Callable[..., Fleet], direction: Direction, devices: int) -> None:
    fleet = make(8000, slow_links(devices), max_helpers=7)
    transfer = fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream)
    transfer.synchronize()
    assert fleet.arrived(direction)
    assert [way.nbytes for way in transfer.ways] == ([8000 // devices] * devices if devices > 1 else [])
    assert timed(fleet, direction) == pytest.approx(8 / devices)


def test_shares_follow_the_calibration(make: Callable[..., Fleet]) -> None:
    fleet = make(6000, calibration=calibrated(3, {1: 500.0, 2: 1500.0}), adaptive=False)
    transfer = fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    assert {str(way.path): way.nbytes for way in transfer.ways} == {
        "direct": 2000,
        "via device 1": 1000,
        "via device 2": 3000,
    }
    assert [way.slices for way in transfer.ways] == [1, 30, 10]
    assert transfer.pieces == 1 + 2 * 30 + 2 * 10
    assert [way.predicted_s for way in transfer.ways] == pytest.approx([2.0, 2.0, 2.0])
    assert transfer.predicted_s == pytest.approx(2.0)


def test_joining_is_counted_on_where_there_are_several_ways(make: Callable[..., Fleet]) -> None:
    known = dataclasses.replace(calibrated(2), join_s={(0, IN): 0.25})
    fleet = make(4000, calibration=known, adaptive=False, break_even_bytes=3000)
    for nbytes, expected in ((2999, None), (4000, 2.25)):
        dst, src = (Span(span.ptr, nbytes) for span in fleet.ends(IN))
        assert fleet.engine.copy(dst, src, IN, stream=fleet.stream).predicted_s == pytest.approx(expected)


def test_below_the_break_even_one_plain_copy(make: Callable[..., Fleet]) -> None:
    fleet = make(4000, break_even_bytes=3000)
    for nbytes, ways in ((2999, 0), (3000, 3)):
        dst, src = (Span(span.ptr, nbytes) for span in fleet.ends(IN))
        assert len(fleet.engine.copy(dst, src, IN, stream=fleet.stream).ways) == ways


def test_the_break_even_is_the_calibrated_one() -> None:
    known = calibrated(2)
    known.break_even_bytes[0, IN] = 1234  # type: ignore[index]
    fleet = Fleet(slow_links(2), calibration=known)
    for direction, least in ((IN, 1234), (OUT, 200)):
        for nbytes, ways in ((least - 1, 0), (least, 2)):
            dst, src = (Span(span.ptr, nbytes) for span in fleet.ends(direction))
            assert len(fleet.engine.copy(dst, src, direction, stream=fleet.stream).ways) == ways
    fleet.close()


@pytest.mark.parametrize("options", [{"helpers": ()}, {"break_even_bytes": 10**9}, {"max_helpers": 0}])
def test_no_helper_is_today_s_plain_copy(make: Callable[..., Fleet], options: dict[str, Any]) -> None:
    fleet = make(4000, **options)
    assert fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).ways == ()
    assert fleet.engine.health().verified == ()


def test_without_a_calibration_nobody_helps_unless_named() -> None:
    driver = slow_links(2)
    machine = Machine(driver)
    home, ptr, stream = machine.pinned(4000), machine.device(4000), machine.stream()
    for helpers, count in (("auto", 0), ((1,), 2)):
        engine = TransferEngine(driver, 0, options=TransferOptions(helpers=helpers, slice_bytes=100))  # type: ignore[arg-type]
        transfer = engine.copy(Span(ptr, 4000), Span(address(home), 4000), IN, stream=stream)
        assert len(transfer.ways) == count
        engine.close()
    machine.close()


def test_the_fastest_helpers_come_first(make: Callable[..., Fleet]) -> None:
    rates = {1: 500.0, 2: 900.0, 3: 800.0}
    fleet = make(4000, slow_links(4), calibration=calibrated(4, rates), max_helpers=2)
    transfer = fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    assert [str(way.path) for way in transfer.ways] == ["direct", "via device 2", "via device 3"]


def test_a_way_slower_than_a_quarter_is_left_out(make: Callable[..., Fleet]) -> None:
    fleet = make(4000, calibration=calibrated(3, {1: 249.0, 2: 250.0}))
    transfer = fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    assert [str(way.path) for way in transfer.ways] == ["direct", "via device 2"]


def test_a_busy_device_does_not_help_unless_named(make: Callable[..., Fleet]) -> None:
    driver = slow_links(3)
    fleet, other = make(4000, driver), make(4000, driver, device=1, helpers=())
    other.engine.copy(*other.ends(IN), IN, stream=other.stream)
    used = [str(way.path) for way in fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).ways]
    assert used == ["direct", "via device 2"]
    used = [str(way.path) for way in fleet.engine.copy(*fleet.ends(OUT), OUT, stream=fleet.stream).ways]
    assert used == ["direct", "via device 1", "via device 2"]  # the other direction is free
    other.stream.synchronize()
    other.engine.lane(IN).synchronize()
    used = [str(way.path) for way in fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).ways]
    assert used == ["direct", "via device 2"]  # it has only just been used
    other.clock.now += 0.5  # type: ignore[attr-defined]
    assert len(fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).ways) == 3
    named = make(4000, driver, helpers=(1, 2))
    other.engine.copy(*other.ends(IN), IN, stream=other.stream)
    assert len(named.engine.copy(*named.ends(IN), IN, stream=named.stream).ways) == 3


def test_devices_that_load_by_turns_do_not_help_one_another(make: Callable[..., Fleet]) -> None:
    driver = slow_links(2)
    fleets = [make(4000, driver, device=device) for device in range(2)]
    ways = []
    for _ in range(4):
        for fleet in fleets:
            transfer = fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
            transfer.synchronize()
            ways.append(len(transfer.ways))
    assert ways == [2] + [0] * 7  # the first could not know


def test_an_engine_that_is_closed_is_not_busy(make: Callable[..., Fleet]) -> None:
    driver = slow_links(2)
    fleet, other = make(4000, driver), make(4000, driver, device=1)
    other.engine.copy(*other.ends(IN), IN, stream=other.stream)
    other.engine.close()
    assert len(fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).ways) == 2


def test_both_directions_at_once(make: Callable[..., Fleet]) -> None:
    fleet, other = make(4000), None
    timed(fleet, IN)
    timed(fleet, OUT)
    away, there = fleet.machine.pinned(4000), fleet.machine.device(4000)
    before = fleet.driver.now  # type: ignore[attr-defined]
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    other = fleet.machine.stream()
    fleet.engine.copy(Span(address(away), 4000), Span(there, 4000), OUT, stream=other)
    fleet.driver.synchronize(0)
    assert fleet.driver.now - before == pytest.approx(1.4)  # type: ignore[attr-defined]


# -- adaptation --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("direction", Direction)
def test_shares_come_to_follow_what_is_measured(direction: Direction) -> None:
    """Calibrated alike, but device 1's bytes take twice as long: they cross a peer link of the same pace."""
    options = {"device_count": 2, "eagerness": 0.0, "on_device": LinkModel(0.0, 1e18)}
    link = LinkModel(0.0, 1000.0)
    driver = EmulatedDriver(
        EmulatedOptions(host_to_device=link, device_to_host=link, peer=LinkModel(0.0, 500.0), **options)  # type: ignore[arg-type]
    )
    fleet = Fleet(driver, 6000)
    found = []
    for _ in range(16):
        transfer = fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream)
        transfer.synchronize()
        found.append([way.nbytes // 100 for way in transfer.ways])
    assert found[0] == [30, 30]
    assert found[-1] == found[-2] == found[-3]
    direct, relay = found[-1]
    assert direct + relay == 60
    assert 39 <= direct <= 41
    assert fleet.arrived(direction)
    fleet.close()


def test_measured_times_are_told(make: Callable[..., Fleet]) -> None:
    fleet = make(4000)
    transfer = fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    assert [way.measured_s for way in transfer.ways] == [None] * 3
    assert "measured" not in transfer.explain()
    transfer.synchronize()
    assert [way.measured_s for way in transfer.ways] == pytest.approx([1.4, 1.3, 1.3])
    lines = transfer.explain().splitlines()
    assert lines[0] == "4000 bytes h2d over 3 paths in 53 driver copies"
    assert lines[2] == "  via device 1: 1300 bytes in 13 pieces, predicted 1300.000 ms, measured 1300.000 ms"


def test_nothing_is_measured_if_not_asked(make: Callable[..., Fleet]) -> None:
    fleet = make(4000, adaptive=False)
    transfer = fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    transfer.synchronize()
    assert [way.measured_s for way in transfer.ways] == [None] * 3


def test_a_way_measured_far_too_slow_is_left_alone() -> None:
    link = LinkModel(0.0, 1000.0)
    driver = EmulatedDriver(
        EmulatedOptions(
            device_count=2, eagerness=0.0, host_to_device=link, device_to_host=link, peer=LinkModel(0.0, 200.0)
        )
    )
    fleet = Fleet(driver, 4000)
    for _ in range(2):
        assert len(fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).ways) == 2
        fleet.stream.synchronize()
    assert fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).ways == ()
    assert "another way had" in str(fleet.engine.health())
    fleet.close()


# -- what is not cut up ------------------------------------------------------------------------------------
def test_short_pieces_and_overlapping_destinations_take_one_way(make: Callable[..., Fleet]) -> None:
    fleet = make(4000)
    host, ptr = address(fleet.home), fleet.ptr
    short = [(Span(ptr + 50 * i, 50), Span(host + 50 * i, 50)) for i in range(80)]
    assert fleet.engine.copy_regions(short, IN, stream=fleet.stream).ways == ()
    twice = [(Span(ptr, 2000), Span(host, 2000)), (Span(ptr + 1000, 2000), Span(host + 2000, 2000))]
    assert fleet.engine.copy_regions(twice, IN, stream=fleet.stream).ways == ()
    fleet.stream.synchronize()
    found = fleet.on_device()
    assert np.array_equal(found[:1000], pattern(4000)[:1000])
    assert np.array_equal(found[1000:3000], pattern(4000)[2000:])


def test_memory_that_helpers_do_not_reach_takes_one_way() -> None:
    from memferry_allocator import PageKind, PageLocation

    driver = slow_links(2)
    fleet = Fleet(driver)
    location = PageLocation(PageKind.DEVICE, 0)
    size = driver.page_granularity(location)
    where, held = driver.reserve_addresses(size), driver.create_pages(location, size)
    driver.map_pages(where, size, held, device=0)
    transfer = fleet.engine.copy(Span(where, 4000), fleet.host, IN, stream=fleet.stream)
    assert transfer.ways == ()
    transfer.synchronize()
    driver.unmap_pages(where, size)
    driver.release_pages(held)
    driver.release_addresses(where, size)
    fleet.close()


def test_a_capture_sees_one_plain_copy(make: Callable[..., Fleet]) -> None:
    fleet = make(4000)
    fleet.driver.begin_capture(fleet.stream, CaptureMode.RELAXED)
    assert fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).ways == ()
    fleet.driver.end_capture(fleet.stream)


# -- order -------------------------------------------------------------------------------------------------
def kernel(fleet: Fleet) -> None:
    with fleet.driver.launch(fleet.stream, reads=[fleet.device], writes=[fleet.device]):
        pass


@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_right_behind_sees_the_bytes(seed: int) -> None:
    fleet = Fleet(EmulatedDriver(EmulatedOptions(device_count=3, seed=seed, eagerness=0.2)))
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    with fleet.driver.launch(fleet.stream, reads=[fleet.device]):
        memory = np.frombuffer(fleet.driver.host_bytes(fleet.ptr, 4000), np.uint8)  # type: ignore[arg-type]
        assert np.array_equal(memory, pattern(4000))
    fleet.close()


@pytest.mark.parametrize("lane", Direction)
def test_a_transfer_on_a_lane_is_in_its_order(make: Callable[..., Fleet], lane: Direction) -> None:
    fleet = make(4000)
    stream = fleet.engine.lane(lane)
    fleet.driver.fill(fleet.ptr, 3, 4000, stream=stream)
    fleet.engine.copy(*fleet.ends(OUT), OUT, stream=stream)
    fleet.driver.fill(fleet.ptr, 4, 4000, stream=stream)
    stream.synchronize()
    assert set(fleet.home) == {3}


class Forgetful(EmulatedDriver):
    """Leaves out one wait between streams, by its number."""

    forgotten: int | None = None
    waits = 0

    def stream_wait(self, stream: Stream, event: Event) -> None:
        self.waits += 1
        if self.waits - 1 != self.forgotten:
            super().stream_wait(stream, event)


def waited(forgotten: int | None, direction: Direction) -> int:
    """The waits of a transfer over three ways between work on both its ends, one left out."""
    driver = Forgetful(EmulatedOptions(device_count=3, eagerness=0.0))
    fleet = Fleet(driver, adaptive=False)
    fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream).synchronize()
    driver.waits, driver.forgotten = 0, forgotten
    kernel(fleet)
    driver.fill(fleet.machine.mapped(fleet.home), 5, 4000, stream=fleet.stream)
    fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream)
    count = driver.waits
    kernel(fleet)
    driver.fill(fleet.machine.mapped(fleet.home), 6, 4000, stream=fleet.stream)
    fleet.close()
    return count


@pytest.mark.parametrize("direction", Direction)
def test_every_wait_counts(direction: Direction) -> None:
    count = waited(None, direction)
    assert count == 2 * (1 + 2 * 2)  # begin and end, of the lane and of two streams on each of two helpers
    for forgotten in range(count):
        with pytest.raises(RaceError):
            waited(forgotten, direction)


def test_only_the_consumer_is_ordered(make: Callable[..., Fleet]) -> None:
    fleet = make(4000)
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    other = fleet.machine.stream()
    with pytest.raises(RaceError):
        fleet.driver.fill(fleet.ptr + 3999, 0, 1, stream=other)
    with pytest.raises(RaceError), fleet.driver.host_access(writes=[fleet.host]):
        pass


# -- byte for byte -----------------------------------------------------------------------------------------
WORLD = 3000


@st.composite
def regions(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Ranges to copy to, from, and of what size; mostly long ones."""
    count = draw(st.integers(1, 3))
    found = []
    for _ in range(count):
        nbytes = draw(st.integers(0, WORLD))
        to, of = draw(st.integers(0, WORLD - nbytes)), draw(st.integers(0, WORLD - nbytes))
        if draw(st.booleans()):  # both ends alike, as those of nearly all memory are
            alike = of // 16 * 16 + to % 16
            of = alike if alike + nbytes <= WORLD else to
        found.append((to, of, nbytes))
    return found


@settings(max_examples=2 * settings.default.max_examples)
@given(data=st.data())
def test_any_transfers_arrive_byte_for_byte(data: st.DataObject) -> None:
    devices = data.draw(st.integers(2, 8), "devices")
    seed, eagerness = data.draw(st.integers(0, 99), "seed"), data.draw(st.sampled_from([0.0, 0.3]), "eagerness")
    driver = EmulatedDriver(EmulatedOptions(device_count=devices, seed=seed, eagerness=eagerness))
    chunk = data.draw(st.sampled_from([WORLD, 1000, 777]), "chunk")
    driver._registration_map = RegistrationMap(driver, max_chunk=chunk)  # type: ignore[attr-defined]
    device = data.draw(st.integers(0, devices - 1), "device")
    others = [other for other in range(devices) if other != device]
    helpers = tuple(data.draw(st.lists(st.sampled_from(others), unique=True), "helpers"))
    slice_bytes = data.draw(st.integers(40, 400), "slice")
    options = TransferOptions(
        helpers=helpers,
        slice_bytes=slice_bytes,
        relay=data.draw(st.sampled_from(["auto", "kernel", "staging"]), "relay"),  # type: ignore[arg-type]
        relay_blocks=data.draw(st.integers(1, 16), "blocks"),
        staging_buffers=data.draw(st.integers(2, 4), "buffers"),
        break_even_bytes=0,
    )
    rates = {other: data.draw(st.floats(200, 2000), "rate") for other in helpers}
    kernels = {other: LinearCost(0.0, data.draw(st.floats(200, 2000), "kernel")) for other in helpers}
    known = calibrated(devices, rates, kernels=kernels)
    engine = TransferEngine(driver, device, options=options, calibration=known)
    machine, home = Machine(driver), pages(WORLD)
    held, ptr = registrations(driver).register(address(home), WORLD), machine.device(WORLD, device)
    home[:] = pattern(WORLD)
    model = {IN: pattern(WORLD), OUT: pattern(WORLD, 1)}  # by direction: what is copied from
    machine.write(ptr, model[OUT], device=device)
    driver.synchronize(device)
    try:
        last = transfer_at_random(data, engine, machine, (ptr, home), model)
        last.synchronize()
        with driver.host_access(reads=[Span(address(home), WORLD)]):
            assert np.array_equal(home, model[IN])
        assert np.array_equal(machine.read(ptr, WORLD, device=device), model[OUT])
    finally:
        driver.synchronize_all()  # a draw may end the test at any time
        engine.close()
        held.close()
        machine.close()


def transfer_at_random(
    data: st.DataObject,
    engine: TransferEngine,
    machine: Machine,
    ends_of: tuple[int, Bytes],
    model: dict[Direction, Bytes],
) -> Transfer:
    """Some transfers in order, which `model` follows; the last of them."""
    ptr, home = ends_of
    streams = [machine.stream(engine.device), engine.lane(IN), engine.lane(OUT)]
    last = None
    for _ in range(data.draw(st.integers(1, 4), "transfers")):
        direction = data.draw(st.sampled_from(Direction), "direction")
        back = OUT if direction is IN else IN
        spans = []
        for to, of, nbytes in data.draw(regions(), "regions"):
            ends = (ptr + to, address(home) + of) if direction is IN else (address(home) + to, ptr + of)
            spans.append((Span(ends[0], nbytes), Span(ends[1], nbytes)))
            model[back][to : to + nbytes] = model[direction][of : of + nbytes]
        stream = data.draw(st.sampled_from(streams), "stream")
        if last is not None:
            last.wait(stream)
        named = data.draw(st.booleans(), "named") or not any(dst.nbytes for dst, _ in spans)
        last = engine.copy_regions(spans, direction if named else None, stream=stream)
        assert last.direction is direction
        if last.ways:
            assert sum(way.nbytes for way in last.ways) == last.nbytes
    assert last is not None
    return last


def test_two_engines_share_a_helper_s_link(make: Callable[..., Fleet]) -> None:
    """Each sends 2000 bytes by way of device 2, whose link to the host carries a thousand a second."""
    driver = slow_links(3)
    fleets = [make(4000, driver, device=device, helpers=(2,), adaptive=False) for device in (0, 1)]
    for fleet in fleets:
        timed(fleet, IN)
        fleet.machine.write(fleet.ptr, pattern(4000, 1), device=fleet.engine.device)
        driver.synchronize(fleet.engine.device)
    before = driver.now
    for fleet in fleets:
        assert len(fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).ways) == 2
    for fleet in fleets:
        fleet.stream.synchronize()
    assert driver.now - before == pytest.approx(4.0)
    assert all(fleet.arrived(IN) for fleet in fleets)


@pytest.mark.parametrize("seed", range(2))
def test_threads_and_engines_share_helpers(seed: int) -> None:
    """Two engines of two devices, four threads on each, all by way of the same third device."""
    driver = EmulatedDriver(EmulatedOptions(device_count=3, seed=seed, eagerness=0.2))
    options = TransferOptions(helpers=(2,), slice_bytes=100, adaptive=False)
    engines = [TransferEngine(driver, device, options=options, calibration=calibrated(3)) for device in (0, 1)]

    def work(number: int) -> None:
        engine, machine = engines[number % 2], Machine(driver)
        nbytes = 2000
        there, back = machine.pinned(nbytes), machine.pinned(nbytes)
        ptr, stream = machine.device(nbytes, engine.device), machine.stream(engine.device)
        for turn in range(5):
            data = pattern(nbytes, number * 100 + turn)
            there[:] = data
            spans = Span(ptr, nbytes), Span(address(there), nbytes), Span(address(back), nbytes)
            assert len(engine.copy(spans[0], spans[1], IN, stream=stream).ways) == 2
            assert len(engine.copy(spans[2], spans[0], OUT, stream=stream).ways) == 2
            stream.synchronize()
            with driver.host_access(reads=[spans[2]]):
                assert np.array_equal(back, data)
        stream.synchronize()
        machine.close()

    in_threads(8, work)
    for engine in engines:
        engine.close()


# -- bad input ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"helpers": "all"},
        {"helpers": [1]},
        {"helpers": (1, 1)},
        {"helpers": (-1,)},
        {"helpers": (True,)},
        {"slice_bytes": 0},
        {"slice_bytes": 1.5},
        {"staging_buffers": 1},
        {"staging_buffers": None},
        {"mode": "fast"},
        {"adaptive": 1},
        {"break_even_bytes": -1},
        {"max_helpers": -1},
        {"outstanding": 0},
        {"helper_idle_s": -1.0},
        {"helper_idle_s": "soon"},
        {"helper_idle_s": float("nan")},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidTransferError, match=next(iter(options))):
        TransferOptions(**options)


@pytest.mark.parametrize("helpers", [(0,), (2,), (1, 5)])
def test_helpers_are_other_devices(helpers: tuple[int, ...]) -> None:
    driver = slow_links(2)
    with pytest.raises(InvalidTransferError, match="no other device"):
        TransferEngine(driver, 0, options=TransferOptions(helpers=helpers))


def test_a_calibration_of_more_devices_is_refused() -> None:
    with pytest.raises(InvalidTransferError, match="device 2 is no other device"):
        TransferEngine(slow_links(2), 0, calibration=calibrated(3))


def test_ways_are_values() -> None:
    assert calibrated(2).ways[Path(0, 1), IN] == Measured(LinearCost(0.0, 1000.0))
