"""Misuse gets the real driver's answers, from every driver."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from .driver_cases import CASES

ROOT = Path(__file__).parents[2]
ANSWERS = json.loads((Path(__file__).parent / "data" / "driver_answers.json").read_text())["answers"]


@cache
def said(kind: str) -> dict[str, Any]:
    """What a driver says to every case, each in a process of its own."""
    command = [sys.executable, "-m", "tests.allocator.driver_cases", kind]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return {"stderr": run.stderr, **dict(json.loads(line) for line in run.stdout.splitlines())}


def test_every_case_has_an_answer() -> None:
    assert CASES.keys() == ANSWERS.keys()


@pytest.mark.parametrize("name", CASES)
def test_emulated(name: str) -> None:
    assert said("emulated")[name] == ANSWERS[name], said("emulated")["stderr"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_cuda(name: str) -> None:
    answer = said("cuda")[name]
    if name == "peer_twice_and_without" and answer is None:
        pytest.skip("needs two devices that can reach each other")
    assert answer == ANSWERS[name], said("cuda")["stderr"]
