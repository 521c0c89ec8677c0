"""On a real device: every case gives numbers that a link can have, and the bytes are there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from memferry_allocator import Driver, open_driver
from memferry_tools.cli import main
from memferry_transport import TransferEngine
from memferry_transport.measure import CASES, NEVER, Bench, MeasureOptions, calibrate_on, find_case, run_case
from memferry_transport.measure.kernel_cases import chain, chain_end
from memferry_transport.measure.ways import ends

pytestmark = pytest.mark.gpu
FASTEST = {"GB/s": 1e5, "ns": 1e5, "us": 1e4, "ratio": 1e2}  # beyond, it is no measurement


@pytest.fixture(scope="module")
def driver() -> Driver:
    return open_driver("cuda")


@pytest.fixture
def bench(driver: Driver) -> Iterator[Bench]:
    devices = range(min(2, driver.device_count))
    with Bench(driver, devices, MeasureOptions(nbytes=32 << 20, samples=2, copies=4), machine="here") as bench:
        yield bench


def reach_each_other(bench: Bench) -> bool:
    access = bench.driver.can_access_peer
    return len(bench.devices) > 1 and access(0, 1) and access(1, 0)


@pytest.mark.parametrize("name", CASES)
def test_every_case_gives_possible_numbers(bench: Bench, name: str) -> None:
    result = run_case(bench, find_case(name))
    if result.status == "not run" and not reach_each_other(bench):
        pytest.skip(str(result.reason))
    assert result.status == "passed", result.reason
    assert result.matrix is not None
    for samples in result.matrix.samples.values():
        assert len(samples) == 2
        assert all(0 < sample < FASTEST[result.unit] for sample in samples)


def test_memory_is_given_back(driver: Driver) -> None:
    driver.memory_info(0)
    with Bench(driver, [0], MeasureOptions(nbytes=4 << 20, samples=1, copies=1)) as bench:
        run_case(bench, find_case("host_to_device_memcpy_sm"))
        during = driver.memory_info(0).free
    assert driver.memory_info(0).free > during


def test_a_chase_ends_where_the_chain_leads() -> None:
    """The case itself refuses anything else; this is what it compares with."""
    words, at = chain(0), 0
    for _ in range(1000):
        at = int(words[at // 8])
    assert at == chain_end(0, 1000)


def test_an_engine_goes_by_what_was_calibrated(bench: Bench) -> None:
    if not reach_each_other(bench):
        pytest.skip("needs two devices that reach each other")
    known = calibrate_on(bench, slice_bytes=4 << 20)
    assert all(1e9 < measured.cost.bytes_per_second < 1e12 for measured in known.ways.values())
    assert all(0 <= measured.cost.alpha_s < 1e-2 for measured in known.ways.values())
    for (device, direction), size in known.break_even_bytes.items():
        if size <= 64 << 20:
            stream = bench.buffers.stream(device, "test")
            engine = TransferEngine(bench.driver, device, calibration=known)
            transfer = engine.copy(*ends(bench, device, direction, 64 << 20), direction, stream=stream)
            assert len(transfer.ways) > 1
            stream.synchronize()
            engine.close()
        else:
            assert size == NEVER


def test_the_command_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "out.json"
    arguments = ["--device", "cuda", "--quick", "--size", "16MiB", "--json", str(path)]
    assert main(["bandwidth", *arguments]) == 0
    content = json.loads(path.read_text())
    assert content["machine"]["emulated"] is False
    assert content["summary"]["direct_over_plain"] > 0.5
