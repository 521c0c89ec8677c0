"""``memferry train`` by a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Command

SIZES = ("--micro-batch", "2", "--sequence", "16", "--dtype", "fp32", "--checkpointing", "off")


@pytest.fixture
def plan(memferry: Command, train: Command, tmp_path: Path) -> Path:
    """A plan of the small model."""
    file = tmp_path / "plan.json"
    options = ("--preset", "small", "--device-memory", "73MiB", "--save", str(file))
    planned = memferry("plan", *options, *SIZES)
    assert planned.status == 0, planned.err
    return file


def test_a_saved_plan_is_trained_by(train: Command, plan: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = train(
        "--plan", str(plan), "--steps", "3", "--verify", "--json", str(results), "--device-memory", "2MiB"
    )
    assert done.status == 0, done.err
    assert "given plan" in done.out
    assert json.loads(results.read_text())["settings"]["plan"] == str(plan)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tied",), "layer 'head' is in the plan alone"),
        (("--dtype", "bf16"), "the plan's dtype is float32, and this is bfloat16"),
        (("--seq", "8"), "for micro-batches of 2 x 16 tokens, and these have 2 x 8"),
        (("--mode", "head=dha"), "leave --mode out, or plan with --modes"),
    ],
)
def test_a_plan_for_something_else_is_refused(
    train: Command, plan: Path, arguments: tuple[str, ...], words: str
) -> None:
    refused = train("--plan", str(plan), "--steps", "1", *arguments)
    assert refused.status == 2
    assert "--plan: " in refused.err
    assert words in " ".join(refused.err.split())


def test_a_file_that_is_no_plan_is_refused(train: Command, text_file: Path) -> None:
    refused = train("--plan", str(text_file), "--steps", "1")
    assert refused.status == 2
    assert "--plan: plan " in refused.err


def test_a_plan_is_looked_at_before_anything_else(
    train: Command, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memferry_tools.train.job.run", lambda options: pytest.fail("the run began"))
    assert "--plan: plan " in train("--plan", str(text_file)).err


def test_auto_plans_after_the_first_step(train: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = train("--plan", "auto", "--steps", "4", "--verify")
    assert done.status == 0, done.err
    assert "auto, from formulas" in done.out or "default; " in done.out
