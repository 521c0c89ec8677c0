"""``torchrun -m memferry_tools train``, as users start it: two processes, and what they leave to one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SMALL = """
import sys
import torch
from memferry_tools.cli import main
from memferry_tools.train import presets
torch.set_num_threads(1)
shape = presets.ModelShape(32, 3, 64, 2, 256)
presets.PRESETS["small"] = presets.Preset(shape, micro_batch=2, seq=16, lr=1e-3, checkpointing=False)
sys.exit(main(["train", "--preset", "small", "--device", "emulated", *sys.argv[1:]]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(_SMALL)
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return path


def _run(program: Path, ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    data = ("--data", str(program.parent / "words.txt"))
    return subprocess.run(
        [sys.executable, *launcher, str(program), *data, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _losses(path: Path) -> list[float]:
    content: dict[str, Any] = json.loads(path.read_text())
    return [sample["loss"] for sample in content["samples"]]


def test_two_processes_train_as_one_and_one_goes_on(program: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    both = _run(program, 2, "--steps", "3", "--save", folder, "--json", str(tmp_path / "both.json"))
    assert both.returncode == 0, both.stderr
    assert both.stdout.count("step 3/3") == 1, "one process shows the steps"
    assert "2 ranks x 1 x 2 x 16 tokens" in both.stdout
    alone = _run(program, 1, "--steps", "3", "--accumulate", "2", "--json", str(tmp_path / "alone.json"))
    assert alone.returncode == 0, alone.stderr
    assert _losses(tmp_path / "both.json") == pytest.approx(_losses(tmp_path / "alone.json"), rel=1e-5)
    resumed = _run(program, 1, "--steps", "4", "--accumulate", "2", "--resume", folder)
    assert resumed.returncode == 0, resumed.stderr
    assert "after 3 steps" in resumed.stdout


def test_what_the_user_can_put_right_is_one_line_of_each_process(program: Path) -> None:
    both = _run(program, 2, "--device-memory", "1KiB")
    assert both.returncode != 0
    for rank in (0, 1):
        assert f"memferry: rank {rank}: error: device_memory: 1.00 KiB is too small" in both.stderr
