"""``memferry bandwidth``: what it shows, keeps, draws, compares and refuses, on emulated devices."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memferry_allocator import DeviceLostError, EmulatedDriver, InvalidRequestError
from memferry_allocator.driver import LinkModel
from memferry_tools.bandwidth import job
from memferry_tools.bandwidth.document import SCHEMA
from memferry_tools.bandwidth.options import EMULATED, FULL, QUICK, BandwidthOptions
from memferry_transport import Edge, Fault, FaultKind, FaultyDriver
from memferry_transport.calibration import calibration_path
from memferry_transport.measure import CASES, Bench, Matrix, hold
from memferry_transport.topology import loads

from .conftest import Command, Outcome

SMALL = ("bandwidth", "--device", "emulated", "--size", "64KiB", "--samples", "1", "--copies", "2")
IN = "host_to_device_memcpy_ce"
H2D = LinkModel(10e-6, 55.4e9)  # of an emulated device by default


def rate(nbytes: int) -> Any:
    return pytest.approx(nbytes / H2D.seconds(nbytes) / 1e9, rel=1e-9)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hold, "PLUG_BYTES", 65536)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_list_has_every_case_and_runs_none(memferry: Command) -> None:
    outcome = memferry("bandwidth", "--list")
    assert outcome.status == 0
    assert [line.split()[0] for line in outcome.out.splitlines()[1:]] == list(CASES)
    assert not outcome.err


def test_a_case_is_shown_with_its_numbers_and_that_they_are_emulated(memferry: Command) -> None:
    outcome = memferry(*SMALL, "--case", IN)
    assert outcome.status == 0
    assert "bandwidth, EMULATED" in outcome.out
    assert "virtual clock" in outcome.out
    assert f"host           {65536 / H2D.seconds(65536) / 1e9:.2f}" in outcome.out
    assert "device_to_host_memcpy_ce" not in outcome.out
    assert "\x1b" not in outcome.out


def test_json_has_settings_machine_samples_and_summary(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("--samples", "2", "--case", IN, "--case", "host_device_latency_sm", "--json", str(path))
    assert memferry(*SMALL, *arguments).status == 0
    content = read(path)
    assert (content["schema"], content["schema_version"]) == (SCHEMA, 1)
    assert content["settings"] == {"nbytes": 65536, "samples": 2, "copies": 2, "verify": True, "devices": [0, 1]}
    machine = content["machine"]
    assert (machine["driver"], machine["emulated"], machine["clock"]) == ("emulated", True, "virtual")
    assert machine["cpu"]
    topology = loads(json.dumps(machine["topology"]))
    assert topology.machine == machine["make"]
    assert {device.uuid for device in topology.devices} == {None}
    assert machine["date"]
    first, second = content["cases"]
    assert first["values"] == [[rate(65536), rate(65536)]]
    assert first["samples"] == [[[rate(65536)] * 2] * 2]
    assert (second["status"], second["values"]) == ("not run", None)
    assert "no kernels" in second["reason"]
    sizes = ["16777216", "67108864", "268435456", "1073741824"]
    assert content["summary"] == {
        "multipath_h2d_ratio": dict.fromkeys(sizes),
        "multipath_d2h_ratio": dict.fromkeys(sizes),
        "direct_over_plain": None,
        "submission_overhead_us": None,
        "cpu_share": None,
        "both_pulling_ratio": None,
        "predicted_within_10_percent": None,
        "break_even_bytes": {"h2d": None, "d2h": None},
    }
    assert content["calibration"] is None


def test_all_cases_are_run_and_fill_the_summary(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    outcome = memferry(*SMALL, "--all", "--json", str(path))
    assert outcome.status == 0
    content = read(path)
    assert [case["name"] for case in content["cases"]] == list(CASES)
    assert {case["name"] for case in content["cases"] if case["status"] != "passed"} == {
        name for name in CASES if name.endswith("_sm") or name.startswith("dha_") or name == "cpu_share"
    }
    summary = content["summary"]
    assert summary["direct_over_plain"] == pytest.approx(1)
    assert isinstance(summary["submission_overhead_us"], float), "of this machine's clock, whatever it says"
    assert summary["both_pulling_ratio"] == pytest.approx(1, abs=0.2)
    assert summary["predicted_within_10_percent"] == 1
    assert summary["cpu_share"] is None
    assert content["calibration"]["source"] == "emulated"
    assert "predicted_within_10_percent" in outcome.out


def test_several_ways_are_set_against_the_direct_copy_of_the_run(memferry: Command, tmp_path: Path) -> None:
    """At a size at which the first figure by size appears."""
    path = tmp_path / "out.json"
    arguments = ("--size", "8MiB", "--copies", "1", "--case", "engine_h2d", "--case", "engine_d2h")
    assert memferry(*SMALL, *arguments, "--json", str(path)).status == 0
    summary = read(path)["summary"]
    for name in ("multipath_h2d_ratio", "multipath_d2h_ratio"):
        assert 1.3 < summary[name]["16777216"] < 2
        assert summary[name]["67108864"] is None
    assert all(1 << 20 <= size <= 16 << 20 for size in summary["break_even_bytes"].values())


def test_csv_has_a_line_for_each_value(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    names = ("--case", "device_to_device_memcpy_read_ce", "--case", "dha_read_by_blocks")
    assert memferry(*SMALL, *names, "--csv", str(path)).status == 0
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert [(line["row"], line["column"], bool(line["median"])) for line in lines] == [
        ("0", "0", False),
        ("0", "1", True),
        ("1", "0", True),
        ("1", "1", False),
        ("", "", False),
    ]
    assert lines[1]["median"] == lines[1]["samples"]
    assert lines[4]["status"] == "not run"


def test_nvbandwidths_form_has_text_for_numbers(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "nv.json"
    assert memferry(*SMALL, "--nvbandwidth-compat", str(path)).status == 0, "its cases are the default"
    found = read(path)["nvbandwidth"]
    cases = {case["name"]: case for case in found["testcases"]}
    assert list(cases) == [name for name, case in CASES.items() if case.form]
    assert cases["device_to_device_latency_sm"] == {"name": "device_to_device_latency_sm", "status": "Waived"}
    peers = cases["device_to_device_memcpy_write_ce"]
    assert peers["status"] == "Passed"
    assert peers["bandwidth_description"] == "memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)"
    assert peers["bandwidth_matrix"][0][0] == peers["bandwidth_matrix"][1][1] == "N/A"
    assert float(peers["bandwidth_matrix"][0][1]) == pytest.approx(peers["max"], rel=1e-4)
    assert peers["sum"] == pytest.approx(2 * peers["average"])
    assert found["GPU Device list"] == ["0: Emulated accelerator", "1: Emulated accelerator"]


def test_a_fixture_gives_emulated_devices_its_links(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("--fixture", "hgx-h200-x8", "--devices", "0,7", "--case", "host_to_all_memcpy_ce")
    assert memferry(*SMALL, *arguments, "--json", str(path)).status == 0
    content = read(path)
    assert content["settings"]["devices"] == [0, 7]
    assert content["machine"]["make"].startswith("8 x ")
    assert content["cases"][0]["columns"] == ["0", "7"]


def test_the_picture_is_a_png(memferry: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert memferry(*SMALL, "--case", "host_to_device_by_size", "--plot", str(path)).status == 0
    assert path.read_bytes().startswith(b"\x89PNG")


# -- what the engine decides by ------------------------------------------------------------------------------
def test_the_calibration_is_explained(memferry: Command, cache: Path) -> None:
    outcome = memferry(*SMALL, "--explain")
    assert outcome.status == 0
    assert "device 0, h2d, direct: 10.0 us + bytes / 55.4 GB/s" in outcome.out
    assert "device 1, d2h, via device 0" in outcome.out
    assert IN not in outcome.out, "only the ways are measured"
    assert not cache.exists(), "emulated machines' calibrations are not kept"


class Real(EmulatedDriver):
    """An emulated machine that is taken for a real one."""

    name = "real"


def test_a_calibration_is_kept_used_again_and_renewed(
    memferry: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(job, "open_driver", lambda kind, emulated: Real(emulated))
    command = ("bandwidth", "--size", "64KiB", "--samples", "1", "--copies", "1", "--case", "engine_direct")
    assert "calibrated" not in memferry(*command).out, "nothing asked for it"
    assert "this run only: --size" in memferry(*command, "--recalibrate").out
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(job, "KEPT_FROM", 0)
    assert "this run only: --devices" in memferry(*command, "--recalibrate", "--devices", "1").out
    assert not (tmp_path / "cache").exists()
    assert "and kept in" in memferry(*command, "--recalibrate").out
    (kept,) = (tmp_path / "cache" / "memferry" / "calibration").iterdir()
    content = read(kept)
    assert kept == calibration_path(content["machine"])
    content["date"] = "2001-01-01"
    kept.write_text(json.dumps(content))
    outcome = memferry(*command, "--explain")
    assert "calibrated 2001-01-01" in outcome.out
    assert "measured, 2001-01-01" in outcome.out
    assert memferry(*command, "--recalibrate").status == 0
    assert read(kept)["date"] > "2001-01-01"
    kept.write_text("{}")
    broken = memferry(*command)
    assert broken.status == 2
    assert "is damaged" in broken.err


# -- comparing -----------------------------------------------------------------------------------------------
def kept(memferry: Command, path: Path, *arguments: str) -> dict[str, Any]:
    assert memferry(*SMALL, "--case", IN, *arguments, "--json", str(path)).status == 0
    return read(path)


def test_equal_runs_compare_equal(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    kept(memferry, path)
    outcome = memferry("bandwidth", "--compare", str(path), str(path))
    assert outcome.status == 0
    assert "2 values, 0 worse by more than 5%" in outcome.out


@pytest.mark.parametrize(
    ("factor", "higher_is_better", "tolerance", "status"),
    [
        (0.9, True, "0.05", 1),
        (0.9, True, "0.2", 0),
        (1.1, True, "0.05", 0),
        (1.1, False, "0.05", 1),
        (0.9, False, "0.05", 0),
    ],
)
def test_what_got_worse_decides_the_status(
    memferry: Command, tmp_path: Path, factor: float, higher_is_better: bool, tolerance: str, status: int
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    content = kept(memferry, first)
    content["cases"][0]["higher_is_better"] = higher_is_better
    content["cases"][0]["values"][0][1] *= factor
    second.write_text(json.dumps(content))
    outcome = memferry("bandwidth", "--compare", str(first), str(second), "--tolerance", tolerance)
    assert outcome.status == status
    assert f"{factor if higher_is_better else 1 / factor:.3f}" in outcome.out
    assert outcome.out.count("worse\n") == status


def test_what_was_not_measured_is_not_compared(memferry: Command, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    content = kept(memferry, first, "--case", "device_local_copy")
    content["cases"][0]["values"][0][0] = None
    content["cases"] = content["cases"][:1]
    second.write_text(json.dumps(content))
    assert "1 values, 0 worse" in memferry("bandwidth", "--compare", str(first), str(second)).out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "no JSON"),
        ("[]", "not written by memferry bandwidth"),
        ('{"schema": "memferry.train"}', "not written by memferry bandwidth"),
        ('{"schema": "memferry.bandwidth", "schema_version": 9}', "schema version 9"),
        ('{"schema": "memferry.bandwidth", "schema_version": 1}', "damaged"),
        (
            '{"schema": "memferry.bandwidth", "schema_version": 1, "cases": [], "machine": {}}',
            "no value in common",
        ),
    ],
)
def test_files_that_are_none_are_refused(
    memferry: Command, tmp_path: Path, content: str | None, said: str
) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    kept(memferry, first)
    if content is not None:
        second.write_text(content)
    assert_one_line(memferry("bandwidth", "--compare", str(first), str(second)), "--compare", said)


# -- limits and mistakes -------------------------------------------------------------------------------------
def test_no_case_is_begun_after_the_time_limit(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert memferry(*SMALL, "--time-limit", "1e-9", "--json", str(path)).status == 0
    for case in read(path)["cases"]:
        assert (case["status"], case["values"]) == ("not run", None)
        assert "time limit" in case["reason"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), DeviceLostError("CUDA_ERROR_LAUNCH_FAILED", "copy")])
def test_a_run_that_ends_early_keeps_what_it_has(
    memferry: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException
) -> None:
    names = list(CASES)

    def ended(bench: Bench) -> Matrix:
        if isinstance(stop, DeviceLostError):
            bench.driver.lose(1)  # type: ignore[attr-defined]
        raise stop

    monkeypatch.setitem(CASES, names[1], replace(CASES[names[1]], run=ended))
    path = tmp_path / "out.json"
    cases = [argument for name in names[:3] for argument in ("--case", name)]
    outcome = memferry(*SMALL, *cases, "--json", str(path))
    assert outcome.status == (2 if isinstance(stop, DeviceLostError) else 130)
    assert outcome.err.count("\n") == 1
    assert [case["status"] for case in read(path)["cases"]] == ["passed", "not run", "not run"]


def test_whatever_is_refused_is_a_failure_of_its_case(
    memferry: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(bench: Bench) -> Matrix:
        raise InvalidRequestError("no such thing")

    monkeypatch.setitem(CASES, IN, replace(CASES[IN], run=refused))
    path = tmp_path / "out.json"
    outcome = memferry(*SMALL, "--case", IN, "--case", "device_local_copy", "--json", str(path))
    assert outcome.status == 1
    assert [case["status"] for case in read(path)["cases"]] == ["failed", "passed"]


def test_bytes_that_arrive_wrong_are_exit_status_1(memferry: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(FaultKind.CORRUPT, count=None, edge=Edge(None, 0))
    monkeypatch.setattr(job, "open_driver", lambda kind, emulated: FaultyDriver(EmulatedDriver(emulated), [fault]))
    outcome = memferry(*SMALL, "--case", IN, "--case", "device_to_host_memcpy_ce")
    assert outcome.status == 1
    assert "failed" in outcome.out
    assert "arrived wrong" in outcome.out


def assert_one_line(outcome: Outcome, *parts: str) -> None:
    assert outcome.status == 2
    assert outcome.err.startswith("memferry: error: ")
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--nonsense"], ["--nonsense", "memferry bandwidth --help"]),
        (["--case", "local"], ["--case", "'local'", "device_local_copy", "--list"]),
        (["--device", "gpu"], ["--device", "'gpu'", "auto, cuda or emulated"]),
        (["--devices", "first"], ["--devices", "'first'", "0,1"]),
        (["--device", "emulated", "--devices", "0,2"], ["--devices", "this machine has 2"]),
        (["--device", "emulated", "--devices", "1,1"], ["devices", "twice"]),
        (["--fixture", "h200-x2"], ["--fixture", "--device emulated"]),
        (["--fixture", "dgx", "--device", "emulated"], ["--fixture", "'dgx'", "h200-x2"]),
        (["--size", "512MB"], ["--size", "'512MiB'"]),
        (["--size", "5000"], ["--size", "4096"]),
        (["--samples", "0"], ["--samples: 0"]),
        (["--copies", "0"], ["--copies: 0"]),
        (["--time-limit", "0"], ["--time-limit"]),
        (["--tolerance", "2", "--compare", "a", "b"], ["--tolerance: 2"]),
        (["--json", ""], ["--json", "empty"]),
        (["--csv", "/nowhere/out.csv"], ["--csv", "no folder /nowhere"]),
        (["--plot", "/"], ["--plot", "folder"]),
    ],
    ids=" ".join,
)
def test_mistakes_are_one_line(memferry: Command, arguments: list[str], parts: list[str]) -> None:
    assert_one_line(memferry("bandwidth", *arguments), *parts)


def test_without_matplotlib_nothing_is_measured(
    memferry: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setattr(job, "_open", lambda *_: pytest.fail("a device was opened"))
    outcome = memferry(*SMALL, "--plot", str(tmp_path / "out.png"))
    assert outcome.status == 2
    assert "matplotlib" in outcome.err


def test_what_is_measured_by_default_suits_the_device() -> None:
    assert BandwidthOptions.build().settle(emulated=False) == FULL
    assert BandwidthOptions.build(quick=True).settle(emulated=False) == QUICK
    assert BandwidthOptions.build(quick=True).settle(emulated=True) == EMULATED
    assert BandwidthOptions.build(quick=True).cases == tuple(CASES)
    settled = BandwidthOptions.build(size="1MiB", samples=7, copies=9).settle(emulated=False)
    assert (settled.nbytes, settled.samples, settled.copies) == (1 << 20, 7, 9)
