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


@pytest.mark.slow
def test_a_row_on_the_emulated_device() -> None:
    job = plan.ROWS["llama-1b-1x1024-8GiB"]
    row = plan.measure(job, "emulated", "tiny", 4, None, 240)
    assert row["status"] == "ok", row
    figures = plan.summarise({"row": row})["rows"]["row"]
    assert figures["measured_s"] > 0


def test_there_are_enough_rows_of_different_sizes_batches_and_budgets() -> None:
    assert len(plan.ROWS) == len(plan.JOBS) >= 12
    for what in ("preset", "micro_batch", "seq", "device_memory"):
        assert len({getattr(job, what) for job in plan.JOBS}) >= 2


@pytest.mark.parametrize("name", plan.ROWS)
def test_every_row_is_predicted(name: str) -> None:
    job = plan.ROWS[name]
    assert 0.05 < plan.predict(job, job.preset, job.device_memory)["formula_s"] < 10


def test_a_profile_predicts_its_own_rows(tmp_path: Path) -> None:
    job = plan.ROWS["llama-1b-8x1024-6GiB"]
    save_profile(profile_of(decoder(LLAMA_1B, 8, 1024), "blocks.3"), tmp_path / "llama-1b-8x1024.json")
    found = plan.predict(job, job.preset, job.device_memory, tmp_path)
    assert found["profile_s"] > found["formula_s"] + 1, "its block takes seconds"
    other = plan.ROWS["llama-1b-1x1024-8GiB"]
    assert "profile_s" not in plan.predict(other, other.preset, other.device_memory, tmp_path)


def test_what_does_not_fit_is_kept_with_the_reason() -> None:
    job = plan.ROWS["llama-7b-8x1024-24GiB"]
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
    monkeypatch.setattr(sys, "argv", ["plan", "--rows", rows, "--out", str(out)])
    plan.main()
    summary = json.loads(out.read_text())["summary"]
    assert summary["hits"] == {"formula": {"rows": 2, "within": 1}, "profile": {"rows": 0, "within": 0}}
    assert summary["rows"]["llama-1b-8x1024-24GiB"] == {"failed": "no"}
    head, *lines = tables.plan(summary)
    assert [len(line) for line in lines] == [len(head)] * 2


def test_an_unknown_row_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["plan", "--rows", "none"])
    with pytest.raises(SystemExit):
        plan.main()
    assert "llama-1b-8x1024-6GiB" in capsys.readouterr().err
