"""Whole processes: forks, ends with everything open, misuse; the exit code is 0 and the error stream empty."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .process_scripts import SCRIPTS

ROOT = Path(__file__).parents[2]
EXPECTED: dict[str, Any] = {
    "fork": {},
    "fork_while_another_thread_is_in_the_driver": [],
    "fork_then_exit_normally": 0,
    "leave_everything_open": "left",
    "leave_a_cycle_open": "left",
    "close_the_driver_first": {},
    "free_twice": ["DriverError", "InvalidRequestError"],
    "exit_beside_a_thread": "left",
    "capture": "CaptureError",
}


def run(kind: str, script: str) -> Any:
    command = [sys.executable, "-W", "error", "-W", "ignore:.*fork:DeprecationWarning"]
    command += ["-m", "tests.allocator.process_scripts", kind, script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_every_script_has_an_answer() -> None:
    assert SCRIPTS.keys() == EXPECTED.keys() | {"fork_then_open"}


@pytest.mark.parametrize("script", EXPECTED)
def test_emulated(script: str) -> None:
    assert run("emulated", script) == EXPECTED[script]


@pytest.mark.gpu
@pytest.mark.parametrize("script", EXPECTED)
def test_cuda(script: str) -> None:
    assert run("cuda", script) == EXPECTED[script]


def test_a_child_may_emulate() -> None:
    assert run("emulated", "fork_then_open") == ["opened", True]


@pytest.mark.gpu
def test_a_child_has_no_cuda() -> None:
    assert run("cuda", "fork_then_open") == ["ForkedError", True]
