"""The transfer engine on CUDA devices: byte for byte, over one link and over several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memferry_allocator import Direction, Driver, DriverError, Span, Stream, UnsupportedError, open_driver
from memferry_transport import (
    Edge,
    Fault,
    FaultKind,
    FaultyDriver,
    InvalidTransferError,
    Path,
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
        self.path = Path(0, 1, options.get("relay", "staging"))
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


@pytest.fixture(params=["staging", "kernel"])
def relay(request: pytest.FixtureRequest, two: Driver) -> str:
    """How the helper does it."""
    if request.param == "kernel":
        try:
            two.prepare_kernel_copy(1)
        except UnsupportedError as error:
            pytest.skip(str(error))
    return str(request.param)


@pytest.fixture(params=["quota", "queue"])
def pair(request: pytest.FixtureRequest, two: Driver, relay: str) -> Iterator[Bench]:
    bench = Bench(two, helpers=(1,), mode=request.param, relay=relay)
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
            assert [way.path for way in transfer.ways] == [Path(0), pair.path], transfer.explain()
            assert sum(way.nbytes for way in transfer.ways) == pair.nbytes
            assert transfer.done
    edges = {Edge(None, 0, 1), Edge(0, None, 1)}
    if not pair.path.by_kernel:
        edges = {Edge(None, 1), Edge(1, None), Edge(1, 0), Edge(0, 1)}
    assert edges <= set(pair.engine.health().verified)


def test_times_are_taken(two: Driver, relay: str) -> None:
    bench = Bench(two, helpers=(1,), relay=relay)
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
def test_a_helper_that_fails(two: Driver, relay: str, first: int) -> None:
    if relay == "kernel" and first > 1:
        pytest.skip("there and back are two copies by a kernel")
    driver = FaultyDriver(two)
    bench = Bench(driver, helpers=(1,), relay=relay)
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


def test_a_kernel_that_changes_bytes_is_found(two: Driver) -> None:
    driver = FaultyDriver(two, [Fault(FaultKind.CORRUPT, kernel=True, count=None)])
    bench = Bench(driver, helpers=(1,), relay="kernel")
    transfers = bench.there_and_back()
    bench.stream.synchronize()
    assert [transfer.ways for transfer in transfers] == [(), ()]
    assert np.array_equal(bench.away, bench.data)
    assert "changed" in str(bench.engine.health())
    bench.machine.close()
    bench.engine.close()


@pytest.mark.parametrize("seed", range(6))
def test_any_size_at_any_alignment(two: Driver, relay: str, seed: int) -> None:
    """Regions of random sizes and offsets, in and out; what lies differently at both ends no kernel takes."""
    rng = np.random.default_rng(seed)
    bench = Bench(two, 64 * MIB, helpers=(1,), relay=relay, break_even_bytes=0, slice_bytes=MIB)
    edge = 128
    for number in range(12):
        nbytes = int(rng.integers(2 * MIB, bench.nbytes - 2 * edge))
        to, of = (int(offset) for offset in rng.integers(0, edge, 2))
        if number % 4:
            of = of // 16 * 16 + to % 16
        bench.driver.fill(bench.ptr, 0xEE, bench.nbytes, stream=bench.stream)
        inward = bench.engine.copy(
            bench.span(bench.ptr, to, nbytes), bench.span(bench.home, of, nbytes), stream=bench.stream
        )
        alike = (bench.ptr + to) % 16 == (address(bench.home) + of) % 16
        assert len(inward.ways) == (2 if alike or relay == "staging" else 0)
        bench.away[:] = 0x77
        outward = bench.engine.copy(
            bench.span(bench.away, of, nbytes), bench.span(bench.ptr, to, nbytes), stream=bench.stream
        )
        outward.synchronize()
        assert np.array_equal(bench.away[of : of + nbytes], bench.data[of : of + nbytes])
        assert set(np.unique(bench.away[:of])) | set(np.unique(bench.away[of + nbytes :])) <= {0x77}
        found = bench.machine.read(bench.ptr, bench.nbytes)
        assert set(np.unique(found[:to])) | set(np.unique(found[to + nbytes :])) <= {0xEE}
    bench.close()


def test_two_transfers_share_a_helper(two: Driver, relay: str) -> None:
    bench = Bench(two, helpers=(1,), relay=relay, adaptive=False)
    other, ptr = bench.machine.stream(), bench.machine.device(bench.nbytes)
    second = bench.machine.pinned(bench.nbytes)
    second[:] = pattern(bench.nbytes, 9)
    for _ in range(3):
        for stream, to, of in ((bench.stream, bench.ptr, bench.home), (other, ptr, second)):
            bench.driver.fill(to, 0, bench.nbytes, stream=stream)
            assert len(bench.engine.copy(bench.span(to), bench.span(of), stream=stream).ways) == 2
        for stream, of, data in ((bench.stream, bench.ptr, bench.data), (other, ptr, second)):
            stream.synchronize()
            assert np.array_equal(bench.machine.read(of, bench.nbytes), data)
    bench.close()


def test_a_kernel_right_behind_sees_the_bytes(two: Driver) -> None:
    """And what comes before a transfer on its stream is over before the transfer begins."""
    bench = Bench(two, helpers=(1,), relay="kernel")
    mapped = bench.machine.mapped(bench.away)
    for turn in range(6):
        bench.home[:] = bench.data = pattern(bench.nbytes, turn)
        bench.driver.fill(bench.ptr, turn, bench.nbytes, stream=bench.stream)
        inward = bench.engine.copy(bench.span(bench.ptr), bench.span(bench.home), stream=bench.stream)
        bench.driver.kernel_copy(mapped, bench.ptr, bench.nbytes, stream=bench.stream, blocks=64)
        bench.stream.synchronize()
        assert len(inward.ways) == 2
        assert np.array_equal(bench.away, bench.data)
    bench.close()


def test_what_no_kernel_may_touch_goes_another_way(two: Driver) -> None:
    """A destination that leaves its allocation is refused, and no device is lost by it."""
    bench = Bench(two, helpers=(1,), relay="kernel")
    bench.there_and_back()
    home = bench.machine.pinned(3 * bench.nbytes)
    for _ in range(2):
        with pytest.raises(DriverError):
            bench.engine.copy(
                Span(bench.ptr, home.nbytes), Span(address(home), home.nbytes), IN, stream=bench.stream
            )
    bench.there_and_back()
    bench.stream.synchronize()
    assert np.array_equal(bench.away, bench.data)
    bench.close()


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
