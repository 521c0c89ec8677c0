"""Several GPUs: the rows of a machine, what is run for each, and the figures."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from benchmarks.scale import __main__ as scale
from benchmarks.scale import links, predicted
from benchmarks.scale.rows import LINKS, MEMORY, TOPOLOGY, Job, jobs, names
from benchmarks.scale.summary import summarise
from benchmarks.scale.tables import iterations, relays
from memferry_allocator import open_driver
from memferry_transport.measure import MeasureOptions
from memferry_transport.topology import dumps, emulated_options, machine


@pytest.fixture(scope="module")
def measured_links() -> dict[str, Any]:
    driver = open_driver("emulated", emulated=emulated_options(machine("hgx-h200-x8"), eagerness=0.0))
    sizes = (64 << 10, 1 << 20)
    options = MeasureOptions(nbytes=512 << 10, samples=1, copies=2)
    return links.measure(driver, 3, options, sizes, time.monotonic() + 100)


# -- rows -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_a_machine_has_rows_for_every_number_of_its_gpus(gpus: int) -> None:
    found = jobs(gpus)
    assert set(names(gpus)) == {TOPOLOGY, LINKS, MEMORY, *found}
    assert len(set(names(gpus))) == len(names(gpus))
    assert all(job.gpus + job.helpers <= gpus for job in found.values())
    for preset in ("llama-1b", "llama-3b"):
        assert {Job(preset, gpus), Job(preset, 1), Job(preset, gpus, system="deepspeed")} <= set(found.values())
        whole = {job.tokens for job in found.values() if job.preset == preset and job.accumulate > 1}
        assert len(whole) <= 1, "one batch for all"
    if gpus == 8:
        assert Job("llama-7b", 4, helpers=4, adapters=16, micro_batch=1) in found.values()
        assert Job("llama-1b", 4, helpers=4) in found.values()
        assert Job("llama-1b", 2, accumulate=4).name == "llama-1b-global64-2gpu"


def test_gpus_have_their_share_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    session = scale.Session(8, "cuda", None, 7)
    assert session.command(Job("llama-1b", 1))[:3] == ["taskset", "-c", "0,1"]
    all_of_them = session.command(Job("llama-1b", 8))
    assert len(all_of_them[2].split(",")) == 16
    assert all_of_them[all_of_them.index("--nproc-per-node") + 1] == "8"
    shared = session.command(Job("llama-1b", 2, helpers=2, accumulate=4))
    assert shared[shared.index("--helpers") + 1] == "2,3"
    assert shared[shared.index("--accumulate") + 1] == "4"
    frozen = session.command(Job("llama-7b", 4, helpers=4, adapters=16))
    assert frozen[-4:] == ["--helpers", "4,5,6,7", "--adapters", "16"]
    assert "benchmarks.deepspeed_zero2" in session.command(Job("llama-1b", 2, system="deepspeed"))


def test_what_this_train_does_not_know_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "measured_apart", lambda command, limit: pytest.fail("it was run"))
    monkeypatch.setattr(scale, "train", lambda preset: 0)
    row = scale.Session(2, "cuda", None, 7).measure("llama-7b-adapters-1+1gpu", 10, {})
    assert row["status"] == "skipped"
    assert row["message"] == "this memferry train knows no --helpers and no --adapters"


# -- predictions ------------------------------------------------------------------------------------------
def test_rows_are_predicted_or_say_why_not() -> None:
    topology = json.loads(dumps(machine("h200-x2")))
    both = predicted.simulated(Job("llama-1b", 2), topology, "hgx-h200-x8")
    alone = predicted.simulated(Job("llama-1b", 1), None, "hgx-h200-x8")
    assert 0.1 < alone["predicted_s"] < both["predicted_s"] < 2
    assert 0 < both["bounds"]["DRAM"] <= 1
    assert "refused" in predicted.simulated(Job("llama-1b", 8), topology, "")
    assert "refused" in predicted.simulated(Job("llama-1b", 1, accumulate=2), None, "h200-x1")


# -- links ------------------------------------------------------------------------------------------------
def test_links_are_measured_with_every_number_of_helpers(measured_links: dict[str, Any]) -> None:
    json.dumps(measured_links, allow_nan=False)
    assert [row["helpers"] for row in measured_links["relays"]] == [0, 1, 2]
    rates = [row["h2d"][str(1 << 20)] for row in measured_links["relays"]]
    assert rates[0] < rates[1] < rates[2]
    figures = summarise({LINKS: {"status": "ok", "result": measured_links}})[LINKS]
    assert figures["over_direct"][2]["h2d"][str(1 << 20)] == pytest.approx(rates[2] / rates[0])
    assert figures["all_pulling_ratio"] > 0.9
    assert figures["predicted_within_10_percent"] > 0.5
    assert figures["break_even_bytes"]["h2d"] > 0
    head, *lines = relays({LINKS: figures})
    assert [len(line) for line in lines] == [len(head)] * 3


@pytest.mark.gpu
def test_links_of_two_devices() -> None:
    driver = open_driver("cuda")
    if driver.device_count < 2 or not (driver.can_access_peer(0, 1) and driver.can_access_peer(1, 0)):
        pytest.skip("needs two devices that reach each other")
    sizes = (16 << 20, 64 << 20)
    options = MeasureOptions(nbytes=32 << 20, samples=2, copies=4)
    found = links.measure(driver, 2, options, sizes, time.monotonic() + 60)
    figures = summarise({LINKS: {"status": "ok", "result": found}})[LINKS]
    assert figures["over_direct"][1]["h2d"][str(64 << 20)] > 1
    assert 0 < figures["cpu_share"] < 2
    assert figures["all_pulling_ratio"] > 0.8


def test_what_there_is_no_time_for_is_left_out() -> None:
    driver = open_driver("emulated", emulated=emulated_options(machine("h200-x2"), eagerness=0.0))
    options = MeasureOptions(nbytes=1 << 20, samples=1, copies=1)
    found = links.measure(driver, 2, options, (64 << 10,), time.monotonic())
    assert found["relays"] is None
    figures = summarise({LINKS: {"status": "ok", "result": found}})
    assert figures[LINKS]["all_pulling_ratio"] is None
    assert relays(figures) == []


# -- figures ----------------------------------------------------------------------------------------------
def row(job: Job, iteration_s: float) -> records.Row:
    common = {
        "job": {**vars(job), "steps": 7},
        "status": "ok",
        "wall_s": 20.0,
        "processor_s": 40.0,
        "processors": 4,
    }
    if job.system == "deepspeed":
        return {**common, "predicted": {}, "result": {"iteration_s": iteration_s, "device_peak_bytes": 1}}
    times = {"total": 1.0, "busy": 0.5, "update": 0.3, "step": 0.0, "copy": 0.2}
    report = {"dram_nbytes": 70, "steps": 7, "host_nbytes": 1 << 30, "times": times}
    tokens = job.tokens / iteration_s
    summary = {"iteration_s": iteration_s, "tokens_per_second": tokens, "device_peak_bytes": 1}
    return {**common, "predicted": {"predicted_s": 1.1}, "result": {"summary": summary, "report": report}}


def test_figures_are_against_one_gpu_and_against_others() -> None:
    seconds = {
        Job("llama-1b", 4): 1.0,
        Job("llama-1b", 2): 0.8,
        Job("llama-1b", 1): 0.5,
        Job("llama-1b", 1, accumulate=4): 3.0,
        Job("llama-1b", 2, helpers=2): 0.4,
        Job("llama-1b", 4, system="deepspeed"): 2.0,
    }
    rows = {job.name: row(job, each) for job, each in seconds.items()}
    rows[MEMORY] = {"status": "ok", "result": {"bytes_per_second": 50.0}}
    rows["llama-3b-4gpu"] = {**row(Job("llama-3b", 4), 1.0), "status": "failed", "message": "no"}
    found = summarise(rows)
    four = found["llama-1b-4gpu"]
    assert four["efficiency"] == pytest.approx(0.5)
    assert four["efficiency_fixed_batch"] == pytest.approx(0.75)
    assert four["over_deepspeed"] == pytest.approx(2.0)
    assert four["host_traffic_bytes_per_s"] == pytest.approx(40)
    assert four["host_traffic_share"] == pytest.approx(0.8)
    assert four["bound_by"] == "host memory"
    assert found["llama-1b-2gpu"]["bound_by"] == "waiting for updates"
    assert four["predicted_error"] == pytest.approx(0.1)
    assert four["processors_in_use"] == pytest.approx(0.5)
    assert found["llama-1b-2+2gpu"]["over_no_helpers"] == pytest.approx(2.0)
    assert "efficiency" not in found["llama-1b-2+2gpu"].keys() | found["llama-1b-global32-1gpu"].keys()
    assert found["llama-3b-4gpu"]["failed"] == "no"
    head, *lines = iterations(found)
    assert [len(line) for line in lines] == [len(head)] * len(seconds)


def test_results_take_their_places_and_name_no_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(command: Sequence[str], limit_s: float) -> records.Row:
        if "topo" in command:
            devices = [{"name": "some device", "uuid": "GPU-1"}]
            return {"status": "ok", "result": {"name": "some machine", "devices": devices}}
        return {"status": "ok", "result": {"bytes_per_second": 1.0}}

    monkeypatch.setattr(records, "measured_apart", run)
    out = tmp_path / "scale.json"
    for name in (MEMORY, TOPOLOGY):
        scale.main(["--gpus", "2", "--device", "emulated", "--rows", name, "--out", str(out)])
    content = json.loads(out.read_text())
    assert list(content["rows"]) == [TOPOLOGY, MEMORY]
    assert "GPU-1" not in out.read_text()
    assert content["summary"][TOPOLOGY]["devices"] == ["some device"]
    assert scale.default_out(8).name == "scale-8xh200.json"


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2, 8])
def test_ranks_on_the_emulated_device(tmp_path: Path, gpus: int) -> None:
    out = tmp_path / "scale.json"
    rows = f"topology,llama-1b-{gpus}gpu,llama-1b-1gpu,links,memory"
    start = ["--gpus", str(gpus), "--device", "emulated", "--steps", "1", "--limit", "500"]
    start += ["--preset", "tiny", "--shape", "hidden=64,layers=2,ffn=128,heads=1"]
    scale.main([*start, "--rows", rows, "--out", str(out)])
    summary = json.loads(out.read_text())["summary"]
    assert len(summary) == 5
    mine, one = summary[f"llama-1b-{gpus}gpu"], summary["llama-1b-1gpu"]
    assert mine["efficiency"] > 0
    assert 1 <= mine["host_bytes"] / one["host_bytes"] < 1.5, "they share one state"
