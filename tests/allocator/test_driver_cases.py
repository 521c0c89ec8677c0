"""Misuse gets the real driver's answers, from every driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memferry_allocator import EmulatedDriver, EmulatedOptions

from .driver_cases import CASES

ROOT = Path(__file__).parents[2]
ANSWERS = json.loads((Path(__file__).parent / "data" / "driver_answers.json").read_text())["answers"]


def test_every_case_has_an_answer() -> None:
    assert CASES.keys() == ANSWERS.keys()


@pytest.mark.parametrize("name", CASES)
def test_emulated(name: str) -> None:
    assert CASES[name](EmulatedDriver(EmulatedOptions(device_count=2, device_memory=1 << 30))) == ANSWERS[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_cuda(name: str) -> None:
    """In a process of its own: an error that sticks must not colour the next case."""
    command = [sys.executable, "-m", "tests.allocator.driver_cases", "cuda", name]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    if said is None:
        pytest.skip("needs two devices that can reach each other")
    assert said == ANSWERS[name]
