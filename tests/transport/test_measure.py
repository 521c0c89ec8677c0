"""Measuring: the virtual clock's numbers exactly, the bytes looked at, and nothing made up."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memferry_allocator import Driver, EmulatedDriver, InvalidRequestError, Stream
from memferry_allocator.driver import LinkModel
from memferry_transport import Edge, Fault, FaultKind, FaultyDriver
from memferry_transport.measure import (
    CASES,
    Bench,
    CaseResult,
    Load,
    MeasureOptions,
    NotRunError,
    find_case,
    hold,
    leave_out,
    run_case,
)
from memferry_transport.measure.kernel_cases import CHAIN_BYTES, chain, chain_end
from memferry_transport.topology import emulated_options, machine

from .measuring import D2H, H2D, LOCAL, NBYTES, PEER, bench_of, emulated, gb_per_second

N = NBYTES
HOST_CASES = {
    "host_to_device_memcpy_ce": H2D,
    "device_to_host_memcpy_ce": D2H,
    "host_to_device_bidirectional_memcpy_ce": H2D,
    "device_to_host_bidirectional_memcpy_ce": D2H,
    "all_to_host_memcpy_ce": D2H,
    "all_to_host_bidirectional_memcpy_ce": D2H,
    "host_to_all_memcpy_ce": H2D,
    "host_to_all_bidirectional_memcpy_ce": H2D,
    "device_local_copy": LOCAL,
}
KERNEL_CASES = [name for name in CASES if name.endswith("_sm") or name.startswith("dha_")]


def run(bench: Bench, name: str) -> CaseResult:
    return run_case(bench, find_case(name))


def values(bench: Bench, name: str) -> list[list[float | None]]:
    result = run(bench, name)
    assert result.status == "passed", result.reason
    assert result.matrix is not None
    return result.matrix.values()


# -- numbers -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", HOST_CASES)
def test_each_device_has_its_link_to_itself(name: str) -> None:
    with bench_of() as bench:
        wanted = pytest.approx(gb_per_second(HOST_CASES[name]), rel=1e-9)
        assert values(bench, name) == [[wanted, wanted]]


@pytest.mark.parametrize("side", ["read", "write"])
def test_peers_are_measured_each_way_and_never_with_themselves(side: str) -> None:
    with bench_of() as bench:
        one = pytest.approx(gb_per_second(PEER), rel=1e-9)
        assert values(bench, f"device_to_device_memcpy_{side}_ce") == [[None, one], [one, None]]
        both = pytest.approx(2 * gb_per_second(PEER), rel=1e-9)
        assert values(bench, f"device_to_device_bidirectional_memcpy_{side}_ce") == [[None, both], [both, None]]


@pytest.mark.parametrize(
    "name", ["all_to_one_write_ce", "all_to_one_read_ce", "one_to_all_write_ce", "one_to_all_read_ce"]
)
def test_a_device_with_all_its_peers_has_as_many_links(name: str) -> None:
    with bench_of(emulated(3), devices=(0, 1, 2)) as bench:
        assert values(bench, name) == [[pytest.approx(2 * gb_per_second(PEER), rel=1e-9)] * 3]


@pytest.mark.parametrize(("name", "link"), [("host_to_device_by_size", H2D), ("device_to_host_by_size", D2H)])
def test_by_size_goes_from_4_kib_to_twice_the_size(name: str, link: LinkModel) -> None:
    with bench_of(devices=(1,)) as bench:
        sizes = [4096 << power for power in range(6)]
        assert values(bench, name) == [[pytest.approx(gb_per_second(link, size), rel=1e-9) for size in sizes]]


def test_links_that_are_slower_both_ways_are_found_to_be() -> None:
    driver = EmulatedDriver(emulated_options(machine("h200-x2"), eagerness=0.0))
    with bench_of(driver, nbytes=16 << 20) as bench:
        alone = [values(bench, f"{way}_memcpy_ce")[0][0] for way in ("host_to_device", "device_to_host")]
        both = [
            values(bench, f"{way}_bidirectional_memcpy_ce")[0][0] for way in ("host_to_device", "device_to_host")
        ]
        assert sum(filter(None, both)) < 0.95 * sum(filter(None, alone))


def test_memory_that_only_cuda_has_leaves_its_row_empty() -> None:
    with bench_of(devices=(0,)) as bench:
        rate = pytest.approx(gb_per_second(H2D), rel=1e-9)
        assert values(bench, "host_to_device_by_memory") == [[rate], [None], [rate]]


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
def test_what_the_host_does_between_is_not_measured(eagerness: float) -> None:
    """Whether queued work runs early or late."""
    with bench_of(emulated(eagerness=eagerness), samples=3) as bench:
        result = run(bench, "host_to_device_memcpy_ce")
        assert result.matrix is not None
        for samples in result.matrix.samples.values():
            assert samples == pytest.approx([gb_per_second(H2D)] * 3, rel=1e-9)


# -- the method --------------------------------------------------------------------------------------------
def test_streams_are_held_back_until_everything_is_enqueued() -> None:
    with bench_of() as bench:
        driver, calls = bench.driver, []
        streams = [bench.buffers.stream(device, "test") for device in bench.devices]
        ptrs = [bench.buffers.device(device, "test") for device in bench.devices]
        events = {number: [] for number in bench.devices}  # type: ignore[var-annotated]

        def enqueue(number: int) -> None:
            calls.append(number)
            events[number].append(streams[number].record(driver.create_event(number, timing=True)))
            driver.fill(ptrs[number], number, N, stream=streams[number])

        before = [stream.record(driver.create_event(stream.device, timing=True)) for stream in streams]
        loads = [Load(stream, lambda n=n: enqueue(n), 3) for n, stream in enumerate(streams)]  # type: ignore[misc]
        seconds = bench.seconds(loads)
        assert seconds == [pytest.approx([LOCAL.seconds(N)], rel=1e-9)] * 2
        assert calls == [0, 1] * 6, "a run that warms up, and one sample; all streams in turns"
        for number in bench.devices:
            begun = events[number][0].elapsed_since(before[number])
            assert begun == pytest.approx(LOCAL.seconds(N)), "one fill of the plug"


class Counting(EmulatedDriver):
    """Real enough to have no virtual clock; counts fills."""

    name = "counting"
    fills = 0

    def fill(self, ptr: int, value: int, nbytes: int, *, stream: Stream) -> None:
        self.fills += 1
        super().fill(ptr, value, nbytes, stream=stream)


def test_a_hold_that_was_too_short_is_made_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold, "_MOST_FILLS", 256)
    driver = Counting(emulated(eagerness=1.0).options)  # everything is done as soon as it is asked for
    with bench_of(driver, devices=(0,), verify=False) as bench:
        result = run(bench, "host_to_device_memcpy_ce")
        assert driver.fills == 16 + 64 + 256
        assert (result.status, result.matrix) == ("not run", None)
        assert "before all of it was enqueued" in str(result.reason)


def test_a_hold_that_was_long_enough_is_left_alone() -> None:
    driver = Counting(emulated(eagerness=0.0).options)
    with bench_of(driver, devices=(0,), verify=False) as bench:
        run(bench, "host_to_device_memcpy_ce")
        assert driver.fills == 2 * 16


def test_small_copies_are_repeated_more_often() -> None:
    options = MeasureOptions(copies=16)
    assert options.copies_of(1 << 20) == 64
    assert options.copies_of(512 << 20) == 16
    assert MeasureOptions(copies=100).copies_of(4096) == 100


# -- the bytes ---------------------------------------------------------------------------------------------
SPOILT_EDGES = {
    "host_to_device_memcpy_ce": Edge(None, 0),
    "host_to_all_bidirectional_memcpy_ce": Edge(None, 1),
    "device_to_host_memcpy_ce": Edge(1, None),
    "device_to_host_by_size": Edge(0, None),
    "host_to_device_by_memory": Edge(None, 1),
    "device_to_host_by_memory": Edge(0, None),
    "device_to_device_memcpy_read_ce": Edge(0, 1),
    "device_to_device_bidirectional_memcpy_write_ce": Edge(1, 0),
    "all_to_one_write_ce": Edge(1, 0),
    "one_to_all_write_ce": Edge(1, 0),
    "device_local_copy": Edge(0, 0),
}


@pytest.mark.parametrize("name", SPOILT_EDGES)
def test_bytes_that_arrive_wrong_make_a_case_fail(name: str) -> None:
    driver = FaultyDriver(emulated())
    with bench_of(driver) as bench:
        assert run(bench, name).status == "passed"
        driver.arm(Fault(FaultKind.CORRUPT, count=None, edge=SPOILT_EDGES[name]))
        result = run(bench, name)
        assert result.status == "failed"
        assert "arrived wrong" in str(result.reason)
        assert result.matrix is None


class Losing(EmulatedDriver):
    """Copies from, or to, the host are accepted and never made, once `loses` says which."""

    loses: bool | None = None  # what comes from the host; or what goes there

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        if self.loses is None or self.loses == (self.device_of(dst) is None):
            super().copy(dst, src, nbytes, stream=stream)


@pytest.mark.parametrize(
    ("name", "loses"), [("host_to_device_memcpy_ce", True), ("device_to_host_memcpy_ce", False)]
)
def test_bytes_of_an_earlier_run_do_not_pass_for_those_of_this_one(name: str, loses: bool) -> None:
    driver = Losing(emulated().options)
    with bench_of(driver) as bench:
        assert run(bench, name).status == "passed"
        driver.loses = loses
        assert run(bench, name).status == "failed"


def test_bytes_are_not_looked_at_where_that_is_not_wanted() -> None:
    driver = FaultyDriver(emulated(), [Fault(FaultKind.CORRUPT, count=None, edge=Edge(None, 0))])
    with bench_of(driver, verify=False) as bench:
        assert run(bench, "host_to_device_memcpy_ce").status == "passed"


def test_a_driver_that_refuses_makes_a_case_fail() -> None:
    driver = FaultyDriver(emulated(), [Fault(FaultKind.FAIL, count=None, edge=Edge(None, 0))])
    with bench_of(driver) as bench:
        result = run(bench, "host_to_device_memcpy_ce")
        assert result.status == "failed"
        assert "CUDA_ERROR_UNKNOWN" in str(result.reason)


# -- what cannot be measured -------------------------------------------------------------------------------
@pytest.mark.parametrize("name", KERNEL_CASES)
def test_kernels_are_not_run_without_a_device_that_runs_them(name: str) -> None:
    with bench_of() as bench:
        result = run(bench, name)
        assert (result.status, result.matrix) == ("not run", None)
        assert result.reason == "the emulated device runs no kernels"
        content = result.to_json()
        assert content["values"] is None
        assert content["samples"] is None


def test_one_device_has_no_peer() -> None:
    with bench_of(devices=(0,)) as bench:
        result = run(bench, "device_to_device_memcpy_read_ce")
        assert (result.status, result.reason) == ("not run", "it takes two devices")


class Apart(EmulatedDriver):
    def can_access_peer(self, device: int, peer: int) -> bool:
        return False


def test_devices_that_do_not_reach_each_other_say_so() -> None:
    with bench_of(Apart(emulated().options)) as bench:
        result = run(bench, "device_to_device_memcpy_write_ce")
        assert result.status == "not run"
        assert "reach each other" in str(result.reason)


def test_too_little_memory_is_a_reason() -> None:
    with bench_of(emulated(device_memory=NBYTES)) as bench:
        result = run(bench, "host_to_device_memcpy_ce")
        assert result.status == "not run"
        assert "not enough memory" in str(result.reason)


def test_a_case_left_out_says_why() -> None:
    result = leave_out(find_case("device_local_copy"), "no time")
    assert (result.status, result.reason, result.seconds) == ("not run", "no time", 0.0)


# -- results -----------------------------------------------------------------------------------------------
def test_results_are_numbers_and_nulls() -> None:
    with bench_of(samples=2) as bench:
        content = json.loads(json.dumps(run(bench, "device_to_device_memcpy_read_ce").to_json(), allow_nan=False))
    assert content["rows"] == content["columns"] == ["0", "1"]
    assert content["values"][0][0] is content["samples"][0][0] is None
    assert len(content["samples"][0][1]) == 2
    assert content["unit"] == "GB/s"
    assert content["seconds"] > 0


def test_names_that_are_not_known_are_refused_with_those_near() -> None:
    with pytest.raises(InvalidRequestError, match="device_local_copy"):
        find_case("local")
    with pytest.raises(InvalidRequestError, match="not known"):
        find_case("nonsense")


@pytest.mark.parametrize("options", [{"nbytes": 100}, {"nbytes": 4097}, {"samples": 0}, {"copies": 0}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        MeasureOptions(**options)


@pytest.mark.parametrize("devices", [(), (0, 0), (2,), (-1,)])
def test_devices_that_are_not_there_are_refused(devices: tuple[int, ...]) -> None:
    driver = emulated()
    with pytest.raises(InvalidRequestError, match="devices"):
        Bench(driver, devices)
    driver.close()


@pytest.mark.parametrize("broken", [False, True])
def test_everything_is_given_back(broken: bool) -> None:
    driver: Driver = emulated()
    before = [driver.memory_info(device).free for device in range(2)]
    try:
        with Bench(driver, (0, 1), MeasureOptions(nbytes=N, samples=1, copies=1)) as bench:
            run(bench, "host_to_all_bidirectional_memcpy_ce")
            run(bench, "device_to_device_memcpy_read_ce")
            source = bench.buffers.host(0, "source").ptr
            assert driver.host_registration(source) is not None
            if broken:
                raise NotRunError("enough")
    except NotRunError:
        assert broken
    assert [driver.memory_info(device).free for device in range(2)] == before
    assert driver.host_registration(source) is None
    driver.close()


# -- chains of pointers ------------------------------------------------------------------------------------
def test_a_chain_leads_through_all_of_its_memory_and_round() -> None:
    base, words, seen = 1 << 40, chain(1 << 40), set()
    at, lines = base, CHAIN_BYTES // 128
    for hops in range(lines):
        assert hops % 4096 or at == chain_end(base, hops)
        seen.add(at)
        at = int(words[(at - base) // 8])
    assert at == base == chain_end(base, lines)
    assert len(seen) == lines
