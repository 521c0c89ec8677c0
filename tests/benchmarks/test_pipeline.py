from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pipeline, records, tables

RESULT: dict[str, Any] = {
    "summary": {"iteration_s": 0.5, "tokens_per_second": 16384.0, "device_peak_bytes": 3 << 30},
    "report": {
        "parameters": 100,
        "host_nbytes": 1600,
        "dram_nbytes": 6400,
        "steps": 2,
        "device_memory": 4 << 30,
        "resident_parameters": 10,
        "streamed_parameters": 40,
        "early_parameters": 20,
        "times": {"total": 0.5, "busy": 0.4, "update": 0.06, "copy": 0.01, "step": 0.03},
    },
}
PEER = {"system": "another", "iteration_s": 1.0, "device_peak_bytes": 1 << 30}


@pytest.mark.slow  # the next one is quick enough, and runs the same command
def test_a_row_on_the_emulated_device() -> None:
    session = pipeline.Session("emulated", "tiny", 1, peers=False, limit_s=240)
    row = session.measure(pipeline.ROWS["llama-3b-11.5GiB"])
    assert row["status"] == "ok", row
    figures = pipeline.summarise({"row": row})["row"]
    assert figures["iteration_s"] > 0
    assert figures["device_peak_bytes"] <= figures["device_memory"]
    assert 16 <= figures["host_bytes_per_parameter"] < 17
    assert figures["early_share"] == 0


def test_a_row_that_does_not_clip_is_updated_during_backward() -> None:
    session = pipeline.Session("emulated", "tiny", 2, peers=False, limit_s=240)
    row = session.measure(pipeline.ROWS["llama-1b-6GiB-unclipped"])
    assert row["status"] == "ok", row
    figures = pipeline.summarise({"row": row})["row"]
    assert 20 < figures["host_bytes_per_parameter"] <= 24.1
    assert figures["early_share"] > 0.3


@pytest.mark.gpu
def test_everything_on_the_gpu() -> None:
    settings = ["--preset", "tiny", "--steps", "4", "--max-grad-norm", "1.0"]
    row = records.measured_apart([sys.executable, "-m", "benchmarks.torch_gpu", *settings], 240)
    assert row["status"] == "ok", row
    losses = [sample["loss"] for sample in row["result"]["samples"]]
    assert losses[-1] < losses[0]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that were run, in place of running them; those of rows without clipping fail."""
    commands: list[list[str]] = []

    def run(command: Sequence[str], limit_s: float) -> records.Row:
        commands.append(list(command))
        if command[command.index("--max-grad-norm") + 1] == "0.0":
            return {"status": "failed", "message": "no"}
        return {"status": "ok", "result": RESULT if "train" in command else PEER}

    monkeypatch.setattr(records, "measured_apart", run)
    monkeypatch.setattr(pipeline.importlib.util, "find_spec", lambda name: None)
    return commands


def test_a_failed_row_is_written_and_the_next_begins(
    ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "pipeline.json"
    rows = "llama-1b-6GiB-unclipped,llama-1b-24GiB,llama-1b-6GiB"
    monkeypatch.setattr(sys, "argv", ["pipeline", "--rows", rows, "--out", str(out)])
    pipeline.main()
    found = json.loads(out.read_text())
    assert list(found["rows"]) == ["llama-1b-6GiB", "llama-1b-6GiB-unclipped", "llama-1b-24GiB"]
    summary = found["summary"]
    assert summary["llama-1b-6GiB-unclipped"] == {"failed": "no"}
    figures = summary["llama-1b-6GiB"]
    assert figures["host_bytes_per_parameter"] == 16
    assert figures["dram_bytes_per_parameter"] == 32
    assert figures["busy_share"] == 0.8
    assert figures["exposed_optimizer_s"] == pytest.approx(0.09)
    assert figures["peers"]["torch-gpu"]["ratio"] == 2
    assert figures["peers"]["deepspeed-zero2"] == {"skipped": "DeepSpeed is not installed"}
    head, *lines = tables.pipeline(summary)
    assert [len(line) for line in lines] == [len(head)] * 3
    assert len(tables.peers(summary)) == 3
    alike = [command for command in ran if "benchmarks.torch_gpu" in command and "1.0" in command]
    assert len(alike) == 1, "rows share a peer that is the same"


def test_an_unknown_row_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline", "--rows", "none"])
    with pytest.raises(SystemExit):
        pipeline.main()
    assert "llama-1b-6GiB" in capsys.readouterr().err
