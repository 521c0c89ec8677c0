"""Predictions beside measurements: both in one row, and counted where they hit."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import plan, records, tables
from memferry_rt.plan import save_profile
from tests.plan.machines import LLAMA_1B, decoder
from tests.plan.test_planner import profile_of

PREDICTED = [job.name for job in plan.JOBS]
SESSION = plan.Session("emulated", "tiny", 4, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-1b-1x1024-8GiB", plan.LARGEST.name, plan.AUTOS[0].name])
def test_a_row_on_the_emulated_device(name: str) -> None:
    row = SESSION.measure(name, 240)
    assert row["status"] == "ok", row
    summary = plan.summarise({name: row})
    (figures,) = [kind[name] for kind in (summary["rows"], summary["auto"], summary["largest"]) if name in kind]
    assert figures.get("measured_s", figures.get("auto_settled_s")) > 0
    if name == plan.LARGEST.name:
        assert figures["steps"] == 3
        assert figures["host_bytes"] <= figures["host_memory"] == 40 << 20


def test_there_are_enough_rows_of_different_sizes_batches_and_budgets() -> None:
    assert len(plan.ROWS) == len(plan.JOBS) + len(plan.AUTOS) + 1
    assert len(plan.JOBS) >= 12
    for what in ("preset", "micro_batch", "seq", "device_memory"):
        assert len({getattr(job, what) for job in plan.JOBS}) >= 2


@pytest.mark.parametrize("job", plan.JOBS, ids=PREDICTED)
def test_every_row_is_predicted(job: plan.Job) -> None:
    assert 0.05 < plan.predict(job, job.preset, job.device_memory)["formula_s"] < 10


def test_a_profile_predicts_its_own_rows(tmp_path: Path) -> None:
    job = plan.Job("llama-1b", 8, 1024, "6GiB")
    save_profile(profile_of(decoder(LLAMA_1B, 8, 1024), "blocks.3"), tmp_path / "llama-1b-8x1024.json")
    found = plan.predict(job, job.preset, job.device_memory, tmp_path)
    assert found["profile_s"] > found["formula_s"] + 1, "its block takes seconds"
    other = plan.Job("llama-1b", 1, 1024, "8GiB")
    assert "profile_s" not in plan.predict(other, other.preset, other.device_memory, tmp_path)


def test_what_does_not_fit_is_kept_with_the_reason() -> None:
    job = plan.Job("llama-7b", 8, 1024, "24GiB")
    assert "is too small" in plan.predict(job, job.preset, "1GiB")["refused"]


def test_hits_are_counted_and_failures_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = iter((0.4, 10.0, None))

    def run(command: Sequence[str], limit_s: float) -> records.Row:
        seconds = next(measured)
        if seconds is None:
            return {"status": "failed", "message": "no"}
        return {"status": "ok", "result": {"summary": {"iteration_s": seconds}}}

    monkeypatch.setattr(records, "measured_apart", run)
    out, rows = tmp_path / "plan.json", "llama-1b-8x1024-6GiB,llama-1b-8x1024-8GiB,llama-1b-8x1024-24GiB"
    for name in rows.split(","):  # in visits of their own
        monkeypatch.setattr(sys, "argv", ["plan", "--rows", name, "--out", str(out)])
        plan.main()
    summary = json.loads(out.read_text())["summary"]
    assert summary["hits"] == {"formula": {"rows": 2, "within": 1}, "profile": {"rows": 0, "within": 0}}
    assert summary["rows"]["llama-1b-8x1024-24GiB"] == {"failed": "no"}
    head, *lines = tables.plan(summary)
    assert [len(line) for line in lines] == [len(head)] * 2


def samples(*seconds: float) -> list[dict[str, float]]:
    return [{"seconds": each} for each in seconds]


def test_auto_and_the_largest_have_their_own_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = []

    def run(command: Sequence[str], limit_s: float) -> records.Row:
        commands.append(list(command))
        report = {"steps": 3, "device_peak": 5, "device_memory": 6, "host_nbytes": 7}
        report |= {"plan_source": "auto, from formulas", "plan_notes": []}
        taken = samples(*[2.0] * 30, *[0.5 if "auto" in command else 1.0] * 10)
        result = {"summary": {"iteration_s": 2.0}, "settings": {"host_memory": 8}, "samples": taken}
        return {"status": "ok", "result": {**result, "report": report}}

    monkeypatch.setattr(records, "measured_apart", run)
    out = tmp_path / "plan.json"
    monkeypatch.setattr(sys, "argv", ["plan", "--rows", "auto-llama-1b*,largest*", "--out", str(out)])
    plan.main()
    assert len(commands) == 3
    summary = json.loads(out.read_text())["summary"]
    auto, largest = summary["auto"][plan.AUTOS[0].name], summary["largest"][plan.LARGEST.name]
    assert (auto["settled_ratio"], auto["default_total_s"]) == (0.5, 70)
    assert largest["parameters"] >= 8e9
    command = commands[-1]
    assert command[command.index("--host-memory") + 1] == "128GiB"
    assert command[command.index("--steps") + 1] == "3"
    for table in (tables.plan_auto, tables.plan_largest):
        head, line = table(summary)
        assert len(head) == len(line)
    assert tables.plan(summary) == []


def test_an_unknown_row_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["plan", "--rows", "none"])
    with pytest.raises(SystemExit):
        plan.main()
    assert "llama-1b-8x1024-6GiB" in capsys.readouterr().err
