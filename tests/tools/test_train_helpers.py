"""``memferry train --helpers``: which devices, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memferry_rt.helpers import costs
from memferry_tools.errors import ToolError
from memferry_tools.train import device
from memferry_tools.train.options import TrainOptions
from memferry_tools.train.workers import device_of, helpers_of
from tests.runtime.helped import machine

from .conftest import Command


@pytest.mark.parametrize("helpers", ["1,2", "auto"])
def test_a_run_with_helpers_has_the_bits_of_plain_pytorch_and_counts_them(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helpers: str
) -> None:
    monkeypatch.setattr(costs, "EMULATED_SLICE", 1024)
    monkeypatch.setattr(device, "HELPED", machine(8))
    results = tmp_path / "results.json"
    outcome = train("--steps", "3", "--verify", "--helpers", helpers, "--json", str(results))
    assert (outcome.status, outcome.err) == (0, "")
    assert "identical to the bit with plain PyTorch" in outcome.out
    content = json.loads(results.read_text())
    expected = [1, 2] if helpers == "1,2" else list(range(1, 7))
    assert [helper["device"] for helper in content["report"]["helpers"]] == expected
    carried = sum(helper["carried_in"] + helper["carried_out"] for helper in content["report"]["helpers"])
    assert carried == sum(sample["helper_bytes"] for sample in content["samples"])
    assert carried > 0
    assert "  helpers " in outcome.out.partition("step 1/3")[2].splitlines()[0]
    assert "device 1 carried " in outcome.out


@pytest.mark.parametrize(
    ("helpers", "text"),
    [
        ("one", "--helpers: 'one' is neither auto nor a list of devices"),
        ("1,1", "--helpers: 1,1 names a device twice"),
        ("0", "helpers: device 0 is the one that trains"),
        ("9", "helpers: there is no device 9; this process sees 8"),
    ],
)
def test_what_cannot_help_is_refused(train: Command, helpers: str, text: str) -> None:
    outcome = train("--helpers", helpers)
    assert outcome.status == 2
    assert text in outcome.err


def _as_process(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(rank))
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(size))


def test_processes_share_named_helpers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    four: Any = TrainOptions.build(helpers="4,5,6,7").helpers
    for rank in range(4):
        _as_process(monkeypatch, rank, 4)
        assert helpers_of(four) == (4 + rank,)
        assert helpers_of("auto") == "auto"
        assert device_of("emulated", helped=True) == f"emulated:{rank}"
        assert device_of("emulated") == "emulated"
    with pytest.raises(ToolError, match="process 2 trains on device 2; name devices from 4 on"):
        helpers_of((2, 5, 6, 7))
    with pytest.raises(ToolError, match="3 devices cannot be shared out evenly between 4 processes"):
        helpers_of((4, 5, 6))
