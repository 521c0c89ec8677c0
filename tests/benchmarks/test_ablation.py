"""The ablation: every arm is planned, measured once, and beside its prediction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records, tables
from benchmarks.ablation import __main__ as command
from benchmarks.ablation import arms as ablation
from benchmarks.ablation.summary import summarise
from memferry_rt.plan import GradientMode, StateMode, WeightMode, load_plan

MODEL = "bert-base-size"


@pytest.fixture(scope="module")
def bench() -> ablation.Bench:
    """Of the model that is planned fastest."""
    return ablation.Bench(ablation.MODELS[MODEL], "cuda:0", None, None)


def test_every_arm_is_planned_and_none_without_its_idea(bench: ablation.Bench) -> None:
    arms = {name: arm for name, arm in bench.arms.items() if isinstance(arm, ablation.Arm)}
    assert list(arms) == list(ablation.ARMS), "none is refused"
    for name, arm in arms.items():
        assert arm.seconds > 0
        assert arm.overlap == (name not in ablation.NOT_OVERLAPPED)
        states = set() if arm.plan is None else {layer.state for layer in arm.plan.layers if layer.state_nbytes}
        assert name in ("split", ablation.PLANNER) or states <= {StateMode.CPU}
        assert arm.plan is None or bool(arm.plan.spare_slabs) == (name in ("early", "split", ablation.PLANNER))
    plain, embedding = arms["pipelined"].plan, arms["embedding"].plan
    assert plain is not None
    assert embedding is not None
    assert plain.layer("embedding").weight is not WeightMode.DHA
    assert embedding.layer("embedding").weight is WeightMode.DHA
    assert arms[ablation.BY_HAND].modes == ablation.EMBEDDING


def test_gradients_stay_as_far_as_the_arm_says(bench: ablation.Bench) -> None:
    for name, share in ablation.GRADIENTS.items():
        arm = bench.arms[name]
        assert isinstance(arm, ablation.Arm)
        assert arm.plan is not None
        made = [layer.gradient_nbytes for layer in arm.plan.layers if layer.gradient is GradientMode.BUFFER]
        total = sum(layer.gradient_nbytes for layer in arm.plan.layers)
        assert sum(made) <= share * total + (1 << 20), name


def test_the_small_model_has_a_third_of_its_weights(bench: ablation.Bench) -> None:
    command = bench.command(7, overlap=False)
    pool = int(command[command.index("--pool-memory") + 1])
    weights = 2 * sum(layer.parameters for layer in bench.workload.layers)
    assert pool / weights == pytest.approx(1 / 3)
    assert "--no-async-step" in command
    assert "--no-checkpointing" in command


def result(seconds: float, loss: float = 1.0) -> dict[str, Any]:
    summary = {"iteration_s": seconds, "device_peak_bytes": 5}
    about = {"settings": {"deterministic": True}, "machine": {"emulated": False}}
    return {
        **about,
        "summary": summary,
        "samples": [{"loss": loss}],
        "report": {"per_layer": [1], "plan_notes": []},
    }


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands in place of running them, each a tenth faster than the one before; plans are read."""
    seen: list[list[str]] = []

    def run(command: Sequence[str], limit_s: float) -> records.Row:
        seen.append(list(command))
        if "--plan" in command:
            load_plan(command[command.index("--plan") + 1])
        if "--mode" in command:
            return {"status": "failed", "message": "no"}
        return {"status": "ok", "result": result(0.9 ** len(seen))}

    monkeypatch.setattr(records, "measured_apart", run)
    return seen


def test_rows_are_measured_once_and_the_planner_is_beside_the_best(
    bench: ablation.Bench, commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "ablation.json"
    monkeypatch.setattr(command, "Bench", lambda *_: bench)
    command.main(["--rows", f"{MODEL}/*", "--out", str(out)])
    summary = json.loads(out.read_text())["summary"]
    rows = summary["rows"]
    assert set(rows) == {f"{MODEL}/{arm}" for arm in ablation.ARMS}
    twins = [name for name, row in rows.items() if "same_as" in row]
    assert twins, "some arms are planned alike"
    assert len(commands) == len(rows) - len(twins) - 1, "all but the serial one"
    assert "loads ahead" in rows[f"{MODEL}/serial"]["skipped"]
    assert rows[f"{MODEL}/by-hand"]["failed"] == "no"
    early = next(each for each in commands if "--host-memory" in each)
    assert float(early[early.index("--host-memory") + 1]) > 24 * 160e6
    planner = summary["planner"][MODEL]
    assert planner["over_best"] == pytest.approx(0.9 / min(0.9 ** len(commands), 1))
    assert summary["planner"]["llama-1b"] is None
    for table in (tables.ablation, tables.planner):
        head, *lines = table(summary)
        assert lines
        assert {len(line) for line in lines} == {len(head)}


def test_other_losses_are_seen() -> None:
    common = {"status": "ok", "source": "formulas", "predicted_s": 1.0}
    rows = {
        "llama-1b/pipelined": {**common, "result": result(1.0)},
        "llama-1b/embedding": {**common, "result": result(0.8, loss=1.0 + 1e-9)},
        "llama-1b/planner": {**common, "result": result(0.8)},
        "llama-1b/split": {**common, "result": {**result(0.8), "settings": {"deterministic": False}}},
    }
    found = summarise(rows)["rows"]
    assert [row.get("same_losses") for row in found.values()] == [True, False, True, None]
    assert found["llama-1b/embedding"]["over_arm_before"] == pytest.approx(0.8)
    assert found["llama-1b/embedding"]["error"] == pytest.approx(0.25)


def test_tables_without_rows_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    for name in ("ablation", "planner"):
        assert "make bench-ablation" in tables.render(name)
    assert "make bench-scale-8" in tables.render("iterations_8")


@pytest.mark.parametrize(
    "device",
    [pytest.param("emulated", marks=pytest.mark.slow), pytest.param("cuda:0", marks=pytest.mark.gpu)],
)
def test_arms_on_a_device(device: str) -> None:
    bench = ablation.Bench(ablation.MODELS["bert-base-size"], device, "tiny", None)
    rows = {}
    for name in ("pipelined", "embedding", "early", ablation.PLANNER):
        row = rows[f"bert-base-size/{name}"] = bench.measure(name, 3, 240, deterministic=True)
        assert row["status"] in ("ok", "same"), row
    assert all(row["same_losses"] for row in summarise(rows)["rows"].values() if "measured_s" in row)
