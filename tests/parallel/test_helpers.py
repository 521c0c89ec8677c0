"""Ranks with helpers: idle devices are shared out between them, and one that a rank trains on helps nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memferry_rt
from memferry_allocator import MemFerryError
from memferry_rt.helpers import costs
from memferry_transport import CalibrationError, TransferFailedError
from tests.runtime.helped import machine, offloaded, step

from . import world

DEVICES = 4


def _offloaded(group: Any, helpers: Any) -> Any:
    costs.EMULATED_SLICE = 1024  # in this process alone
    rank = dist.get_rank(group)
    return offloaded(
        device=f"emulated:{rank}", process_group=group, emulated=machine(DEVICES), helpers=helpers[rank], share=0.8
    )


def _train(group: Any, helpers: Any) -> tuple[dict[str, torch.Tensor], list[int], int]:
    """Parameters, the helpers of this rank, and what they have carried."""
    model, optimizer, runtime = _offloaded(group, helpers)
    for number in range(3):
        step(model, optimizer, 2 * number + dist.get_rank(group))
    parameters = {name: value.clone() for name, value in runtime.master_parameters().items()}
    report = runtime.report()
    memferry_rt.restore(model)
    return parameters, [helper.device for helper in report.helpers], report.helper_nbytes


def _train_each_way(group: Any, ways: list[Any]) -> list[Any]:
    return [_train(group, helpers) for helpers in ways]


def test_idle_devices_are_shared_out_and_change_no_bit() -> None:
    ways = [((), ()), ("auto", "auto"), ([3, 2], ())]
    first, second = world.succeed(2, _train_each_way, ways)
    for found, expected in ((first, [[], [2], [3, 2]]), (second, [[], [3], []])):
        assert [devices for _, devices, _ in found] == expected
        for parameters, devices, carried in found:
            assert bool(carried) == bool(devices)
            for name, value in first[0][0].items():
                assert torch.equal(parameters[name], value), name


def _lost(group: Any) -> None:
    model, optimizer, runtime = _offloaded(group, ("auto", "auto"))
    step(model, optimizer, 0)
    if dist.get_rank(group) == 1:
        runtime.memory.engine.require_arrived = _not_arrived
    step(model, optimizer, 1)


def _not_arrived() -> None:
    raise TransferFailedError("device 3 was lost")


def test_a_lost_helper_ends_all_ranks_and_each_says_why() -> None:
    first, second = world.run(2, _lost)
    assert (first.kind, second.kind) == ("RankError", "TransferFailedError")
    assert "rank 1" in first.message
    assert "device 3 was lost" in first.message
    assert "start the job again from its last checkpoint" in second.message


def _said(group: Any, helpers: Any) -> str:
    try:
        model, _, _ = _offloaded(group, helpers)
    except MemFerryError as error:
        return f"{type(error).__name__}: {error}"
    memferry_rt.restore(model)
    return "not refused"


def _not_measured(driver: Any, device: int, helpers: Any) -> Any:
    raise CalibrationError("calibration: times make no sense")


def _refused(group: Any) -> list[str]:
    said = [_said(group, helpers) for helpers in (([2], [0]), ([1], ()), ([2], [9]))]
    if dist.get_rank(group) == 1:
        from memferry_rt.helpers import choice

        choice.find_costs = _not_measured  # type: ignore[assignment]
    return [*said, _said(group, ["auto", "auto"]), _said(group, ([], []))]


def test_a_helper_that_a_rank_trains_on_is_refused_alike() -> None:
    first, second = world.succeed(2, _refused)
    for number, text in enumerate(
        ["rank 1 names device 0, and rank 0 trains on it", "rank 0 names device 1, and rank 1"]
    ):
        assert first[number] == second[number]
        assert first[number].startswith(f"RankError: helpers: {text}")
    for number, text in ((2, "InvalidRequestError: helpers: there is no device 9"), (3, "CalibrationError: ")):
        assert second[number].startswith(text)
        assert first[number] == f"RankError: rank 1 refuses, and so do all: {second[number]}"
    assert first[4] == second[4] == "not refused"


@pytest.mark.slow
@pytest.mark.parametrize(("helpers", "expected"), [("auto", [2, 4, 6]), ("2,3", [2])])
def test_processes_share_helpers_out(tmp_path: Path, helpers: str, expected: list[int]) -> None:
    both, text = tmp_path / "both.json", tmp_path / "words.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    tiny = ["train", "--preset", "tiny", "--device", "emulated", "--data", str(text), "--seq", "16"]
    launched = subprocess.run(
        [*launcher, "-m", "memferry_tools", *tiny, "--steps", "1", "--helpers", helpers, "--json", str(both)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert launched.returncode == 0, launched.stderr
    report = json.loads(both.read_text())["report"]
    assert report["device"] == "emulated:0"
    assert [helper["device"] for helper in report["helpers"]] == expected
