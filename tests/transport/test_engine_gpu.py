"""The transfer engine on CUDA devices: byte for byte, over one link and over several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memferry_allocator import Direction, Driver, Span, Stream, open_driver
from memferry_transport import (
    Edge,
    Fault,
    FaultKind,
    FaultyDriver,
    InvalidTransferError,
    Transfer,
    TransferEngine,
    TransferOptions,
    TransferStatus,
)
from memferry_transport.faults import DelegatingDriver

from ..allocator.machine import Bytes, Machine, address, pattern

pytestmark = pytest.mark.gpu
MIB = 1 << 20
N = 96 * MIB + 4321
IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


class Bench:
    """An engine on device 0, long ranges at its two ends, and a stream between."""

    def __init__(self, driver: Driver, nbytes: int = N, **options: Any) -> None:
        self.driver, self.nbytes = driver, nbytes
        self.machine = Machine(driver)
        self.engine = TransferEngine(
            driver, 0, options=TransferOptions(**{"helpers": (), "slice_bytes": 4 * MIB, **options})
        )
        self.home, self.away = self.machine.pinned(nbytes), self.machine.pinned(nbytes)
        self.ptr, self.stream = self.machine.device(nbytes), self.machine.stream()
        self.data = pattern(nbytes)
        self.home[:] = self.data

    def span(self, what: int | Bytes, start: int = 0, nbytes: int | None = None) -> Span:
        where = what if isinstance(what, int) else address(what)
        return Span(where + start, self.nbytes - start if nbytes is None else nbytes)

    def there_and_back(self) -> list[Transfer]:
        """In, inverted nowhere, and out to another place, with nothing but the stream's order between."""
        self.away[:] = 0
        return [
            self.engine.copy(self.span(self.ptr), self.span(self.home), stream=self.stream),
            self.engine.copy(self.span(self.away), self.span(self.ptr), stream=self.stream),
        ]

    def close(self) -> None:
        self.engine.close()
        self.machine.close()


@pytest.fixture
def driver() -> Driver:
    return open_driver("cuda")


@pytest.fixture
def two(driver: Driver) -> Driver:
    """A driver of two devices that reach each other."""
    if driver.device_count < 2 or not (driver.can_access_peer(0, 1) and driver.can_access_peer(1, 0)):
        pytest.skip("needs two devices that reach each other")
    return driver


@pytest.fixture(params=["quota", "queue"])
def pair(request: pytest.FixtureRequest, two: Driver) -> Iterator[Bench]:
    bench = Bench(two, helpers=(1,), mode=request.param)
    yield bench
    bench.close()


# -- one device --------------------------------------------------------------------------------------------
def test_there_and_back(driver: Driver) -> None:
    bench = Bench(driver)
    transfers = bench.there_and_back()
    bench.stream.synchronize()
    assert np.array_equal(bench.away, bench.data)
    assert [transfer.direction for transfer in transfers] == [IN, OUT]
    assert all(transfer.done and transfer.status is TransferStatus.DONE for transfer in transfers)
    assert all(transfer.ways == () for transfer in transfers)
    bench.close()


def test_regions(driver: Driver) -> None:
    bench = Bench(driver, 10 * MIB)
    cuts = [(0, 5 * MIB, 1000), (MIB, 17, 3 * MIB + 1), (9 * MIB, 9 * MIB, MIB)]
    regions = [(bench.span(bench.ptr, to, n), bench.span(bench.home, of, n)) for to, of, n in cuts]
    bench.engine.copy_regions(regions, IN, stream=bench.stream)
    bench.engine.copy(bench.span(bench.away), bench.span(bench.ptr), OUT, stream=bench.stream).synchronize()
    for to, of, n in cuts:
        assert np.array_equal(bench.away[to : to + n], bench.data[of : of + n])
    bench.close()


def test_within_a_device(driver: Driver) -> None:
    bench = Bench(driver, 2 * MIB)
    bench.engine.copy(bench.span(bench.ptr), bench.span(bench.home), stream=bench.stream)
    halves = bench.span(bench.ptr, MIB, MIB), bench.span(bench.ptr, 0, MIB)
    assert bench.engine.copy(*halves, stream=bench.stream).direction is None
    bench.engine.copy(bench.span(bench.away), bench.span(bench.ptr), stream=bench.stream).synchronize()
    assert np.array_equal(bench.away[MIB:], bench.data[:MIB])
    with pytest.raises(InvalidTransferError, match="overlap"):
        bench.engine.copy(bench.span(bench.ptr, 1, MIB), bench.span(bench.ptr, 0, MIB), stream=bench.stream)
    bench.close()


def test_unregistered_memory_is_refused(driver: Driver) -> None:
    bench = Bench(driver, MIB)
    with pytest.raises(InvalidTransferError, match="neither all registered"):
        bench.engine.copy(bench.span(bench.ptr), bench.span(pattern(MIB)), stream=bench.stream)
    bench.close()


# -- two devices -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("turn", range(3))
def test_over_two_links(pair: Bench, turn: int) -> None:
    pair.home[:] = pair.data = pattern(pair.nbytes, turn)
    for _ in range(3):  # shares move between transfers
        transfers = pair.there_and_back()
        pair.stream.synchronize()
        assert np.array_equal(pair.away, pair.data)
        for transfer in transfers:
            assert [str(way.path) for way in transfer.ways] == ["direct", "via device 1"], transfer.explain()
            assert sum(way.nbytes for way in transfer.ways) == pair.nbytes
            assert transfer.done
    edges = {Edge(None, 1), Edge(1, None), Edge(1, 0), Edge(0, 1)}
    assert edges <= set(pair.engine.health().verified)


def test_times_are_taken(two: Driver) -> None:
    bench = Bench(two, helpers=(1,))
    bench.there_and_back()
    for transfer in bench.there_and_back():
        transfer.synchronize()
        assert all((way.measured_s or 0) > 0 for way in transfer.ways)
    bench.close()


def test_a_lane_s_own_order(pair: Bench) -> None:
    stream = pair.engine.lane(OUT)
    for value in (7, 8):
        pair.driver.fill(pair.ptr, value, pair.nbytes, stream=stream)
        pair.engine.copy(pair.span(pair.away), pair.span(pair.ptr), stream=stream)
        pair.driver.fill(pair.ptr, 0, pair.nbytes, stream=stream)
        stream.synchronize()
        assert set(np.unique(pair.away)) == {value}


@pytest.mark.parametrize("first", [0, 1, 4, 9])
def test_a_helper_that_fails(two: Driver, first: int) -> None:
    driver = FaultyDriver(two)
    bench = Bench(driver, helpers=(1,))
    bench.there_and_back()
    bench.stream.synchronize()
    driver.arm(Fault(FaultKind.FAIL, first=first, on=1))
    bench.there_and_back()
    bench.stream.synchronize()
    assert np.array_equal(bench.away, bench.data)
    assert sum(path.errors for path in bench.engine.health().paths) == 1
    bench.machine.close()
    bench.engine.close()


def test_a_link_that_changes_bytes_is_found(two: Driver) -> None:
    driver = FaultyDriver(two, [Fault(FaultKind.CORRUPT, edge=Edge(1, 0), count=None)])
    bench = Bench(driver, helpers=(1,))
    inward, _ = bench.there_and_back()
    bench.stream.synchronize()
    assert inward.ways == ()
    assert np.array_equal(bench.away, bench.data)
    assert "changed" in str(bench.engine.health())
    bench.machine.close()
    bench.engine.close()


class Apart(DelegatingDriver):
    """Devices that do not reach each other."""

    def can_access_peer(self, device: int, peer: int) -> bool:
        return False


@pytest.mark.parametrize("apart", [False, True])
def test_from_device_to_device(two: Driver, apart: bool) -> None:
    bench = Bench(Apart(two) if apart else two)
    other = bench.machine.device(bench.nbytes, 1)
    stream: Stream = bench.stream
    bench.engine.copy(bench.span(bench.ptr), bench.span(bench.home), stream=stream)
    out = bench.engine.copy(bench.span(other), bench.span(bench.ptr), stream=stream)
    bench.driver.fill(bench.ptr, 0, bench.nbytes, stream=stream)
    bench.engine.copy(bench.span(bench.ptr), bench.span(other), stream=stream)
    bench.engine.copy(bench.span(bench.away), bench.span(bench.ptr), stream=stream)
    stream.synchronize()
    assert np.array_equal(bench.away, bench.data)
    assert ("by way of the host" in out.explain()) is apart
    bench.close()
