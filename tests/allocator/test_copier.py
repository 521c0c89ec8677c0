"""The plain copier, and the hazards that say what must be waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from memferry_allocator import (
    DirectCopier,
    Direction,
    Driver,
    EmulatedDriver,
    EmulatedOptions,
    InvalidRequestError,
    RaceError,
    RegistrationMap,
    Span,
    Stream,
    registrations,
)
from memferry_allocator.driver import LinkModel
from memferry_allocator.shadow.hazards import Hazards

from .machine import Machine, address, pages, pattern, refused
from .test_pool import Listening

N = 5000
IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


class Copies(EmulatedDriver):
    """Notes the copies that reach the driver."""

    def __init__(self, options: EmulatedOptions | None = None) -> None:
        super().__init__(options)
        self.copied: list[tuple[int, int, int, Stream]] = []

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        super().copy(dst, src, nbytes, stream=stream)
        self.copied.append((dst, src, nbytes, stream))


def chunked(driver: Driver, max_chunk: int) -> None:
    driver._registration_map = RegistrationMap(driver, max_chunk=max_chunk)  # type: ignore[attr-defined]


@pytest.fixture
def copier(machine: Machine) -> Iterator[DirectCopier]:
    copier = DirectCopier(machine.driver, 0)
    yield copier
    copier.close()


@pytest.mark.parametrize("direction", Direction)
def test_copies_join_the_order_of_a_stream(machine: Machine, copier: DirectCopier, direction: Direction) -> None:
    """After what it holds and before what it gets later, in both directions."""
    driver, stream = machine.driver, machine.stream()
    ptr, home = machine.device(N), machine.pinned(N)
    source, target = (machine.mapped(home), ptr) if direction is IN else (ptr, machine.mapped(home))
    dst, src = (ptr, address(home)) if direction is IN else (address(home), ptr)
    out = machine.pinned(N)
    driver.fill(source, 5, N, stream=stream)
    copier.copy(Span(dst, N), Span(src, N), direction, stream=stream)
    driver.copy(address(out), target, N, stream=stream)
    driver.fill(source, 6, N, stream=stream)
    stream.synchronize()
    assert set(out) == {5}


def test_each_direction_has_a_lane(machine: Machine, copier: DirectCopier) -> None:
    assert copier.lane(IN) is not copier.lane(OUT)
    assert copier.lane(IN) is copier.lane(IN)


def test_a_copy_on_its_own_lane_needs_no_events() -> None:
    driver = Listening()
    machine, copier = Machine(driver), DirectCopier(driver, 0)
    ptr, home = machine.device(N), machine.pinned(N)
    copier.copy(Span(ptr, N), Span(address(home), N), IN, stream=copier.lane(IN))
    assert driver.waits == []
    done = copier.copy(Span(address(home), N), Span(ptr, N), OUT, stream=copier.lane(IN))
    assert [stream for stream, _ in driver.waits] == [copier.lane(OUT), copier.lane(IN)]
    done.event.synchronize()
    machine.close()


@pytest.mark.parametrize("direction", Direction)
def test_copies_are_cut_where_registrations_end(direction: Direction) -> None:
    driver = Copies()
    chunked(driver, 1000)
    machine, copier, data = Machine(driver), DirectCopier(driver, 0), pages(N)
    held, ptr = registrations(driver).register(address(data), N), machine.device(N)
    data[:] = pattern(N)
    machine.write(ptr, pattern(N, 1))
    driver.copied.clear()
    host, device = Span(address(data) + 300, 2500), Span(ptr + 10, 2500)
    dst, src = (device, host) if direction is IN else (host, device)
    copier.copy(dst, src, direction, stream=copier.lane(direction)).event.synchronize()
    assert [nbytes for _, _, nbytes, _ in driver.copied] == [700, 1000, 800]
    expected = pattern(N) if direction is IN else pattern(N, 1)
    if direction is IN:
        assert np.array_equal(machine.read(ptr + 10, 2500), expected[300:2800])
    else:
        assert np.array_equal(data[300:2800], expected[10:2510])
    held.close()
    machine.close()


def test_copies_of_nothing(machine: Machine, copier: DirectCopier) -> None:
    home = machine.pinned(16)
    copier.copy(
        Span(machine.device(16), 0), Span(address(home), 0), IN, stream=machine.stream()
    ).event.synchronize()


def test_sizes_must_agree(machine: Machine, copier: DirectCopier) -> None:
    with pytest.raises(InvalidRequestError, match="16 bytes and destination 8"):
        copier.copy(
            Span(machine.device(16), 8), Span(address(machine.pinned(16)), 16), IN, stream=machine.stream()
        )


def test_pieces_before_a_refused_one_are_waited_for(emulate: Callable[..., Machine]) -> None:
    """Else the caller could use memory again that a part of the copy is still using."""
    machine = emulate(eagerness=0.0)
    chunked(machine.driver, 1000)
    copier, data, stream = DirectCopier(machine.driver, 0), pages(2000), machine.stream()
    held = registrations(machine.driver).register(address(data), 2000)
    ptr = machine.device(1500)
    with refused("INVALID_VALUE"):
        copier.copy(Span(ptr, 2000), Span(address(data), 2000), IN, stream=stream)
    machine.driver.fill(ptr, 0, 1500, stream=stream)
    stream.synchronize()
    assert set(machine.read(ptr, 1500)) == {0}
    held.close()
    copier.close()


def test_closing_waits(machine: Machine) -> None:
    copier, home = DirectCopier(machine.driver, 0), machine.pinned(N)
    ptr = machine.device(N)
    machine.write(ptr, pattern(N))
    copier.copy(Span(address(home), N), Span(ptr, N), OUT, stream=copier.lane(OUT))
    copier.close()
    copier.close()
    assert np.array_equal(home, pattern(N))
    with refused("INVALID_HANDLE"):
        copier.copy(Span(address(home), N), Span(ptr, N), OUT, stream=machine.stream())


def test_both_directions_at_once(emulate: Callable[..., Machine]) -> None:
    second = LinkModel(0.0, N)
    machine = emulate(host_to_device=second, device_to_host=second)
    copier, stream = DirectCopier(machine.driver, 0), machine.stream()
    home, away = machine.pinned(N), machine.pinned(N)
    copier.copy(Span(machine.device(N), N), Span(address(home), N), IN, stream=copier.lane(IN))
    copier.copy(Span(address(away), N), Span(machine.device(N), N), OUT, stream=copier.lane(OUT))
    copier.close()
    assert machine.driver.now == 1  # type: ignore[attr-defined]
    assert stream.query()


# -- hazards -------------------------------------------------------------------------------------------------
class Track:
    """Hazards of one block, on three streams of a driver that notes waits; who records the events is given."""

    def __init__(self, own: bool) -> None:
        self.own = own
        self.driver = Listening(EmulatedOptions(eagerness=0.0))
        self.streams = [self.driver.create_stream(0) for _ in range(3)]
        self.ptr = self.driver.malloc(0, 16)
        self.out = self.driver.malloc(0, 16 * 3)
        self.hazards = Hazards()

    def write(self, s: int) -> None:
        stream = self.streams[s]
        self.hazards.before(stream, writes=True)
        self.driver.fill(self.ptr, s, 16, stream=stream)
        if self.own:
            self.hazards.written_by(stream)
        else:
            self.hazards.wrote(stream, stream.record())

    def read(self, s: int) -> None:
        stream = self.streams[s]
        self.hazards.before(stream, writes=False)
        self.driver.copy(self.out + 16 * s, self.ptr, 16, stream=stream)
        if self.own:
            self.hazards.read_by(stream)
        else:
            self.hazards.has_read(stream, stream.record())

    def waited(self) -> list[tuple[int, int]]:
        """Who has waited since the last question, and for whose event (by the number of its recording)."""
        waits = [(self.streams.index(stream), event.sequence) for stream, event in self.driver.waits]
        self.driver.waits.clear()
        return waits


@pytest.fixture(params=[True, False], ids=["own events", "given events"])
def track(request: pytest.FixtureRequest) -> Track:
    return Track(request.param)


def test_a_reader_waits_for_the_writer_once(track: Track) -> None:
    track.write(0)
    track.read(0)
    assert track.waited() == []
    track.read(1)
    assert [who for who, _ in track.waited()] == [1]
    track.read(1)
    assert track.waited() == []


def test_readers_do_not_wait_for_readers(track: Track) -> None:
    for s in range(3):
        track.read(s)
    assert track.waited() == []


def test_a_writer_waits_for_every_reader(track: Track) -> None:
    track.write(0)
    track.read(1)
    track.read(2)
    track.waited()
    track.write(0)
    assert [who for who, _ in track.waited()] == [0, 0]
    track.write(0)
    assert track.waited() == []


def test_a_writer_waits_for_the_writer(track: Track) -> None:
    track.write(0)
    track.write(1)
    assert [who for who, _ in track.waited()] == [1]
    track.read(0)  # its own write is older
    assert [who for who, _ in track.waited()] == [0]


def test_a_new_write_must_be_waited_for_again(track: Track) -> None:
    track.write(0)
    track.read(1)
    track.write(0)
    track.waited()
    track.read(1)
    assert [who for who, _ in track.waited()] == [1]


def test_only_the_last_read_of_a_stream_counts(track: Track) -> None:
    track.read(0)
    track.read(0)
    last = track.hazards.last_uses
    assert list(last) == [track.streams[0]]
    track.write(1)
    assert track.waited() == [(1, last[track.streams[0]].sequence)]


def test_last_uses_cover_all_uses(track: Track) -> None:
    assert track.hazards.last_uses == {}
    track.write(0)
    assert list(track.hazards.last_uses) == [track.streams[0]]
    track.read(1)
    track.read(2)
    assert set(track.hazards.last_uses) == {track.streams[1], track.streams[2]}
    for event in track.hazards.last_uses.values():
        event.synchronize()
    track.driver.free(0, track.ptr)  # the host has waited for everything


def test_events_are_recorded_again_and_short_lived_streams_do_not_pile_up() -> None:
    """The same event serves a stream's next use; readers of the write before it do not wait for its reads."""
    track = Track(own=True)
    track.write(0)
    track.read(0)
    (read,) = track.hazards.last_uses.values()
    track.read(1)
    assert [event for _, event in track.driver.waits] != [read]
    track.read(0)
    assert track.hazards.last_uses[track.streams[0]] is read
    track.write(0)
    (write,) = track.hazards.last_uses.values()
    track.write(1)
    assert list(track.hazards.last_uses.values()) == [write]
    for _ in range(50):
        track.streams[2] = track.driver.create_stream(0)
        track.read(2)
        track.write(0)
    assert len(track.hazards._marks) <= 8


def test_the_host_waits_for_what_it_must() -> None:
    """A reader for writes, a writer for reads too; and what it has waited for nobody waits for again."""
    driver = Listening(EmulatedOptions(eagerness=0.0))
    machine, hazards = Machine(driver), Hazards()
    data, ptr, (one, other) = machine.pinned(16), machine.device(16), [machine.stream() for _ in range(2)]
    driver.copy(address(data), ptr, 16, stream=one)
    hazards.wrote(one, one.record())
    hazards.before(other, writes=False)
    driver.copy(ptr, address(data), 16, stream=other)
    hazards.has_read(other, other.record())
    hazards.host_before_read()
    with driver.host_access(reads=[Span(address(data), 16)]):
        pass
    with pytest.raises(RaceError), driver.host_access(writes=[Span(address(data), 16)]):
        pass
    hazards.host_before_write()
    with driver.host_access(writes=[Span(address(data), 16)]):
        pass
    driver.waits.clear()
    hazards.before(machine.stream(), writes=True)
    assert driver.waits == []
    machine.close()
