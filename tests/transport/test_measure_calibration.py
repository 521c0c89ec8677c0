"""Calibrations: fitted to what was measured, kept in files that are checked, and explained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path as File
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_allocator import Direction
from memferry_allocator.driver import LinkModel
from memferry_transport import (
    Calibration,
    CalibrationError,
    Edge,
    Fault,
    FaultKind,
    FaultyDriver,
    LinearCost,
    Measured,
    Path,
    TransferEngine,
)
from memferry_transport.calibration import calibration_path, explain, load_calibration, save_calibration
from memferry_transport.calibration.file import from_json, to_json
from memferry_transport.measure import NEVER, CorruptedError, MeasureOptions, calibrate, calibrate_on
from memferry_transport.measure.fit import fit_cost
from memferry_transport.measure.ways import ends
from memferry_transport.topology import discover, machine

from .measuring import D2H, H2D, IN, OUT, PEER, bench_of, emulated

SLICE = 256 << 10
SIZE = 1 << 20


# -- fitting -----------------------------------------------------------------------------------------------
@given(
    alpha=st.floats(0, 1e-3),
    rate=st.floats(1e8, 1e12),
    powers=st.sets(st.integers(12, 30), min_size=2),
)
def test_a_line_is_found_again(alpha: float, rate: float, powers: set[int]) -> None:
    wanted = LinearCost(alpha, rate)
    found = fit_cost({1 << power: [wanted.seconds(1 << power)] * 3 for power in powers})
    for power in powers:
        assert found.seconds(1 << power) == pytest.approx(wanted.seconds(1 << power), rel=1e-4)


@given(odd=st.integers(12, 30), times=st.floats(2, 100))
def test_one_size_at_which_something_else_went_on_does_not_bend_it(odd: int, times: float) -> None:
    wanted = LinearCost(10e-6, 50e9)
    samples = {1 << power: [wanted.seconds(1 << power)] * 3 for power in range(12, 31)}
    samples[1 << odd] = [times * sample for sample in samples[1 << odd]]
    found = fit_cost(samples)
    assert found.alpha_s == pytest.approx(wanted.alpha_s, rel=0.05)
    assert found.bytes_per_second == pytest.approx(wanted.bytes_per_second, rel=0.05)


def test_one_slow_sample_of_a_size_does_not_count() -> None:
    assert fit_cost({1 << 20: [1e-4, 9.0, 1e-4], 1 << 21: [2e-4, 2e-4, 9.0]}) == fit_cost(
        {1 << 20: [1e-4], 1 << 21: [2e-4]}
    )


def test_one_size_gives_a_rate() -> None:
    assert fit_cost({1000: [1e-6]}) == LinearCost(0.0, pytest.approx(1e9))


def test_a_start_before_zero_is_none() -> None:
    """Larger transfers may gain more than the line allows."""
    found = fit_cost({1000: [1e-6], 2000: [3e-6], 4000: [8e-6]})
    assert found.alpha_s == 0
    assert found.bytes_per_second > 0


def test_nothing_and_nonsense_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        fit_cost({})
    with pytest.raises(ValueError, match="measure again"):
        fit_cost({1000: [2e-6], 2000: [1e-6]})


# -- measuring ---------------------------------------------------------------------------------------------
def calibrated(**links: Any) -> Calibration:
    with bench_of(emulated(**links), nbytes=SIZE) as bench:
        return calibrate_on(bench, slice_bytes=SLICE)


def test_ways_cost_what_their_links_say() -> None:
    known = calibrated()
    assert set(known.ways) == {
        (path, way)
        for d in (0, 1)
        for path in (Path(d), Path(d, 1 - d), Path(d, 1 - d, "kernel"))
        for way in (IN, OUT)
    }
    for device in (0, 1):
        for direction, link in ((IN, H2D), (OUT, D2H)):
            direct = known.cost(Path(device), direction)
            assert direct is not None
            assert direct.alpha_s == pytest.approx(link.latency_s, rel=1e-6)
            assert direct.bytes_per_second == pytest.approx(link.bytes_per_second, rel=1e-6)


def test_a_relay_pays_for_each_slice_on_the_slower_link_and_once_on_the_other() -> None:
    known = calibrated()
    for direction, link in ((IN, H2D), (OUT, D2H)):
        relay = known.cost(Path(0, 1), direction)
        assert relay is not None
        assert relay.bytes_per_second == pytest.approx(SLICE / link.seconds(SLICE), rel=1e-6)
        assert relay.alpha_s == pytest.approx(PEER.seconds(SLICE), rel=1e-6)


def test_a_kernel_pays_for_the_start_of_both_links_and_for_the_slower_one() -> None:
    known = calibrated()
    for direction, link in ((IN, H2D), (OUT, D2H)):
        kernel = known.cost(Path(0, 1, "kernel"), direction)
        assert kernel is not None
        assert kernel.bytes_per_second == pytest.approx(link.bytes_per_second, rel=1e-6)
        assert kernel.alpha_s == pytest.approx(link.latency_s + PEER.latency_s, rel=1e-6)


def test_from_the_break_even_on_several_ways_are_faster() -> None:
    known = calibrated()
    assert known.slice_bytes == SLICE
    assert set(known.break_even_bytes) == {(device, way) for device in (0, 1) for way in Direction}
    for (device, direction), nbytes in known.break_even_bytes.items():
        direct, kernel = (
            known.ways[path, direction].cost for path in (Path(device), Path(device, 1 - device, "kernel"))
        )
        assert SLICE <= nbytes <= 8 * SLICE
        for size, pays in ((nbytes, True), (nbytes // 2, False)):
            unit = 64 << 10
            assert (max(kernel.seconds(unit), direct.seconds(size - unit)) < direct.seconds(size)) is pays


def test_what_joining_several_ways_takes_is_measured_and_counted_on() -> None:
    known = calibrated()
    for device, direction in known.break_even_bytes:
        assert known.join_s[device, direction] == pytest.approx(0, abs=1e-9)  # the virtual clock joins in no time
        assert f"device {device}, {direction.value}: joining ways takes 0.0 us" in explain(known)


def test_a_calibration_from_before_joining_was_measured_is_read(cache: File) -> None:
    assert from_json(without("join")) == replace(SAMPLE, join_s={})


def test_where_relays_never_help_the_break_even_is_beyond_reach() -> None:
    known = calibrated(peer=LinkModel(5e-3, 50e9))
    assert set(known.break_even_bytes.values()) == {NEVER}
    assert "never pay" in explain(known)


def test_both_directions_at_once_are_free_on_links_of_their_own() -> None:
    assert calibrated().duplex == {0: pytest.approx(1.0), 1: pytest.approx(1.0)}


@pytest.mark.parametrize(
    ("edge", "kernel", "left_out"),
    [
        (Edge(1, 0), False, {(Path(0, 1), IN), (Path(1, 0), OUT)}),
        (Edge(None, 0), True, {(Path(0, 1, "kernel"), IN)}),
        (Edge(1, None), True, {(Path(1, 0, "kernel"), OUT)}),
    ],
)
def test_a_relay_that_spoils_bytes_is_left_out_and_never_taken(
    edge: Edge, kernel: bool, left_out: set[tuple[Path, Direction]]
) -> None:
    driver = FaultyDriver(emulated(), [Fault(FaultKind.CORRUPT, count=None, edge=edge, kernel=kernel)])
    with bench_of(driver, nbytes=SIZE) as bench:
        known = calibrate_on(bench, slice_bytes=SLICE)
        relays = {
            (Path(device, 1 - device, by), direction)
            for device in (0, 1)
            for by in ("kernel", "staging")
            for direction in Direction
        }
        assert relays - set(known.ways) == left_out
        driver.arm()
        for device in (0, 1):
            engine, stream = (
                TransferEngine(driver, device, calibration=known),
                bench.buffers.stream(device, "test"),
            )
            for direction in Direction:
                transfer = engine.copy(*ends(bench, device, direction, SIZE), direction, stream=stream)
                assert len(transfer.ways) in (0, 2)
                assert not {(way.path, direction) for way in transfer.ways} & left_out
            stream.synchronize()
            engine.close()


def test_a_direct_way_that_spoils_bytes_is_an_error() -> None:
    driver = FaultyDriver(emulated(), [Fault(FaultKind.CORRUPT, count=None, edge=Edge(None, 0))])
    with bench_of(driver, nbytes=SIZE) as bench, pytest.raises(CorruptedError):
        calibrate_on(bench, slice_bytes=SLICE)


def test_one_device_has_one_way() -> None:
    with bench_of(emulated(1), devices=(0,)) as bench:
        known = bench.calibration()
        assert set(known.ways) == {(Path(0), IN), (Path(0), OUT)}
        assert known.break_even_bytes == {}
        assert bench.calibration() is known
        assert known.source == "emulated"


def test_a_machine_is_calibrated_for_what_it_is() -> None:
    driver = emulated()
    known = calibrate(driver, options=MeasureOptions(nbytes=64 << 10, samples=1, copies=1))
    assert known.machine == discover(driver).machine
    assert {path.device for path, _ in known.ways} == {0, 1}
    alone = calibrate(driver, machine("h200-x2"), devices=[1], options=MeasureOptions(nbytes=64 << 10, samples=1))
    assert alone.machine == machine("h200-x2").machine
    assert set(alone.ways) == {(Path(1), IN), (Path(1), OUT)}
    driver.close()


# -- files -------------------------------------------------------------------------------------------------
SAMPLE = Calibration(
    machine="2 x Device, NV18 [abc]",
    source="measured",
    date="2026-11-29T10:00:00+00:00",
    ways={
        (Path(0), IN): Measured(LinearCost(1e-5, 5e10), {4096: (1e-5, 2e-5), 8192: (3e-5,)}),
        (Path(0, 1), OUT): Measured(LinearCost(0.0, 4e10)),
        (Path(0, 1, "kernel"), OUT): Measured(LinearCost(1e-6, 3e10)),
    },
    slice_bytes=8 << 20,
    break_even_bytes={(0, IN): 12 << 20, (0, OUT): NEVER},
    join_s={(0, IN): 2e-5},
    duplex={0: 0.9},
)


@pytest.fixture(autouse=True)
def cache(tmp_path: File, monkeypatch: pytest.MonkeyPatch) -> File:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_calibration_comes_back_as_it_was(cache: File) -> None:
    assert load_calibration(SAMPLE.machine) is None
    path = save_calibration(SAMPLE)
    assert path == calibration_path(SAMPLE.machine)
    assert path.is_relative_to(cache / "memferry")
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert load_calibration(SAMPLE.machine) == SAMPLE


@settings(max_examples=15)
@given(
    st.builds(
        Calibration,
        machine=st.text(max_size=20),
        source=st.text(max_size=20),
        date=st.text(max_size=20),
        ways=st.dictionaries(
            st.tuples(
                st.builds(
                    Path, st.integers(0, 9), st.none() | st.integers(0, 9), st.sampled_from(["staging", "kernel"])
                ),
                st.sampled_from(Direction),
            ),
            st.builds(
                Measured,
                st.builds(LinearCost, st.floats(0, 1), st.floats(1, 1e13)),
                st.dictionaries(
                    st.integers(0, 1 << 40), st.lists(st.floats(0, 10), max_size=3).map(tuple), max_size=3
                ),
            ),
            max_size=4,
        ),
        slice_bytes=st.integers(0, 1 << 40),
        break_even_bytes=st.dictionaries(
            st.tuples(st.integers(0, 9), st.sampled_from(Direction)), st.integers(0, NEVER), max_size=3
        ),
        join_s=st.dictionaries(
            st.tuples(st.integers(0, 9), st.sampled_from(Direction)), st.floats(0, 1), max_size=3
        ),
        duplex=st.dictionaries(st.integers(0, 9), st.floats(0.1, 1), max_size=3),
    )
)
def test_every_calibration_survives_json(known: Calibration) -> None:
    assert from_json(json.loads(json.dumps(to_json(known)))) == known
    assert explain(known).startswith(f"{known.machine}: ")


def without(*keys: Any) -> Any:
    return changed(None, *keys, remove=True)


def changed(value: Any, *keys: Any, remove: bool = False) -> Any:
    """The sample's JSON with one entry of another value."""
    content = json.loads(json.dumps(to_json(SAMPLE)))
    inside = content
    for key in keys[:-1]:
        inside = inside[key]
    if remove:
        del inside[keys[-1]]
    else:
        inside[keys[-1]] = value
    return content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "no JSON object"),
        ({}, "schema"),
        (changed("memferry.bandwidth", "schema"), "memferry.bandwidth"),
        (changed(2, "schema_version"), "schema_version is 2"),
        (changed(True, "schema_version"), "schema_version"),
        (without("machine"), "has no 'machine'"),
        (changed(7, "date"), "date 7 is no text"),
        (changed({}, "ways"), "ways"),
        (changed([3], "ways"), r"ways\[0\] is no JSON object"),
        (changed(-1, "ways", 0, "device"), r"ways\[0\]: device -1"),
        (changed(1.5, "ways", 1, "helper"), r"ways\[1\]: helper 1.5"),
        (changed("magic", "ways", 1, "by"), r"ways\[1\]: by 'magic' is none of"),
        (changed("sideways", "ways", 0, "direction"), "sideways"),
        (changed(-1e-6, "ways", 0, "alpha_s"), "alpha_s"),
        (changed(0, "ways", 0, "bytes_per_second"), "bytes_per_second 0 is no number above 0"),
        (changed("fast", "ways", 0, "bytes_per_second"), "bytes_per_second"),
        (changed(float("inf"), "ways", 0, "bytes_per_second"), "bytes_per_second"),
        (changed(float("nan"), "duplex", 0, "share"), "share"),
        (changed(1e-5, "ways", 0, "samples", 0, "seconds"), "seconds"),
        (changed(["soon"], "ways", 0, "samples", 0, "seconds"), "seconds"),
        (without("ways", 0, "samples"), r"ways\[0\] has no 'samples'"),
        (changed(None, "break_even", 0, "nbytes"), "nbytes"),
        (changed(-1.0, "join", 0, "seconds"), r"join\[0\]: seconds -1.0"),
        (changed("8MiB", "slice_bytes"), "slice_bytes"),
    ],
)
def test_a_file_that_is_damaged_is_named_with_what_is_wrong(content: Any, said: str, cache: File) -> None:
    with pytest.raises(CalibrationError, match=said):
        from_json(content)
    path = cache / "calibration.json"
    path.write_text(json.dumps(content))
    with pytest.raises(CalibrationError, match=f"calibration.json is damaged.*{said}"):
        load_calibration(SAMPLE.machine, path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_file_that_is_no_json_is_damaged(content: bytes, cache: File) -> None:
    path = cache / "calibration.json"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match="damaged"):
        load_calibration(SAMPLE.machine, path)


def test_another_machines_calibration_is_refused(cache: File) -> None:
    path = save_calibration(SAMPLE, cache / "here.json")
    with pytest.raises(CalibrationError, match="measure anew"):
        load_calibration("8 x Device", path)


def test_what_cannot_be_read_or_written_says_so(cache: File) -> None:
    (cache / "file").write_text("")
    with pytest.raises(CalibrationError, match="cannot be written"):
        save_calibration(SAMPLE, cache / "file" / "calibration.json")
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_calibration(SAMPLE.machine, cache)


def test_a_cache_folder_that_is_not_absolute_is_not_used(monkeypatch: pytest.MonkeyPatch, cache: File) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(cache))
    assert calibration_path("a/b c").relative_to(cache) == File(".cache/memferry/calibration/a-b-c.json")


# -- text --------------------------------------------------------------------------------------------------
def test_the_explanation_has_figures_evidence_and_date() -> None:
    text = explain(SAMPLE)
    for part in (
        "2 x Device, NV18 [abc]: measured, 2026-11-29T10:00:00+00:00, slices of 8.00 MiB",
        "device 0, h2d, direct: 10.0 us + bytes / 50.0 GB/s (3 samples of 2 sizes, 4.00 KiB to 8.00 KiB",
        "device 0, d2h, via device 1: 0.0 us + bytes / 40.0 GB/s",
        "device 0, d2h, via device 1 by its kernel: 1.0 us + bytes / 30.0 GB/s",
        "device 0, h2d: several ways pay from 12.00 MiB on",
        "device 0, d2h: several ways never pay",
        "device 0: both directions at once reach 90.0% of the sum of each alone",
    ):
        assert part in text
