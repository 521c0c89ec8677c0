"""The benchmark of direct host access: its records, its figures, and that it notices what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tables
from benchmarks.dha import __main__ as main
from benchmarks.dha import embedding, operators, training, weight_gradient
from benchmarks.dha.sizes import SMALL
from benchmarks.dha.summary import summarise
from memferry_rt.native import load_adam

pytestmark = pytest.mark.skipif(load_adam() is None, reason="no native kernel")


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    return {name: operators.measure(name, "emulated", SMALL) for name in operators.ROWS}


def test_every_row_is_measured_and_checked(rows: dict[str, Any]) -> None:
    for row in rows.values():
        assert row["status"] == "ok", row.get("trace")
        assert row["emulated"] is True
    json.dumps(rows, allow_nan=False)


def test_figures_are_those_of_the_samples(rows: dict[str, Any]) -> None:
    found = summarise(rows)
    assert list(found) == list(rows)
    assert [case["tokens"] for case in found["embedding"]] == list(SMALL.lookups)
    measured = rows["embedding"]["result"]["cases"][0]
    assert len(measured["in_place"]["samples_s"]) == SMALL.samples
    ratio = measured["copied"]["median_s"] / measured["in_place"]["median_s"]
    assert found["embedding"][0]["times_faster"] == pytest.approx(ratio)
    assert [case["tokens"] for case in found["weight_gradient"]] == [*SMALL.few, *SMALL.many]
    ring = found["ring"][0]
    bound = max(ring["copy_s"], ring["forward_compute_s"])
    assert ring["forward_over_bound"] == pytest.approx(ring["forward_s"] / bound)
    assert found["rows"][0]["rows_and_zeros_over_link"] > 0


def test_a_gradient_that_is_not_written_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradient, "weight_gradient", lambda *_, **__: None)
    row = operators.measure("weight_gradient", "emulated", SMALL)
    assert row["status"] == "failed"
    assert "float64" in row["message"]
    assert summarise({"weight_gradient": row}) == {"weight_gradient": {"failed": row["message"]}}


def test_rows_that_are_not_zeroed_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        embedding, "write_rows", lambda home, rows, values, *_, **__: home.index_copy_(0, rows, values)
    )
    row = operators.measure("rows", "emulated", SMALL)
    assert "other bytes" in row["message"]


def test_an_embedding_that_reads_other_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "embedding_forward", lambda ids, table: table[(ids + 1) % len(table)])
    assert "other bytes" in operators.measure("embedding", "emulated", SMALL)["message"]


RESULT = {
    "summary": {"iteration_s": 2.4, "device_peak_bytes": 5 << 30, "tokens_per_second": 400.0},
    "report": {
        "steps": 4,
        "times": {"busy": 1.0},
        "device_memory": 6 << 30,
        "host_to_device_nbytes": 400 * 10**9,
        "device_to_host_nbytes": 200 * 10**9,
        "dram_nbytes": 1200 * 10**9,
    },
}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, rows: dict[str, Any]) -> list[list[str]]:
    """Commands in place of running them: operators give their small rows, and the larger model fails."""
    seen: list[list[str]] = []

    def run(command: Sequence[str], limit_s: float) -> dict[str, Any]:
        seen.append(list(command))
        if "benchmarks.dha.operators" in command:
            return {"status": "ok", "result": {"torch": torch.__version__, "rows": rows}}
        if "llama-7b" in command:
            return {"status": "failed", "message": "no"}
        return {"status": "ok", "result": RESULT}

    monkeypatch.setattr(main, "measured_apart", run)
    monkeypatch.setattr(training, "measured_apart", run)
    return seen


def test_rows_take_their_places_and_tables_are_made_of_them(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "dha.json"
    every = ",".join([*training.ROWS, *operators.ROWS])
    monkeypatch.setattr(sys, "argv", ["dha", "--rows", every, "--out", str(out)])
    main.main()
    found = json.loads(out.read_text())
    assert found["schema"] == "memferry.dha"
    assert list(found["rows"]) == [*operators.ROWS, *training.ROWS]
    assert all("date" in row["machine"] for row in found["rows"].values())
    summary = found["summary"]
    assert summary["llama-7b-8GiB"] == {"failed": "no"}
    figures = summary["llama-3b-6GiB"]
    rates = summary["link"]
    assert figures["bounds_s"]["to_device"] == pytest.approx(100e9 / rates["to_device"])
    assert figures["bounds_s"]["memory"] == pytest.approx(300e9 / summary["memory"]["bytes_per_second"])
    assert figures["over_bound"] == pytest.approx(2.4 / max(figures["bounds_s"].values()))
    for name, table in tables.TABLES.items():
        if table.result == "dha":
            head, *lines = table.rows(summary)
            assert lines, name
            assert {len(line) for line in lines} == {len(head)}
    assert len(tables.TABLES["dha_models"].rows(summary)) == 2, "the one that failed has no line"
    (train,) = [command for command in commands if "llama-3b" in command]
    assert train[train.index("--device-memory") + 1] == "6GiB"


def test_an_unknown_row_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["dha", "--rows", "none"])
    with pytest.raises(SystemExit):
        main.main()
    assert "weight_gradient" in capsys.readouterr().err


def test_tables_without_results_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "make bench-dha" in tables.render("dha_ring")
