"""The examples run as they are, and do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), "--device", "emulated", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_custom_loop_learns_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    whole = run("custom_loop.py", "--steps", "10", "--folder", str(tmp_path / "whole"))
    losses = [float(line.split()[3].rstrip(",")) for line in whole]
    assert len(losses) == 2
    assert losses[1] < losses[0] < 2.5
    parts = [
        run("custom_loop.py", "--steps", steps, "--folder", str(tmp_path / "parts"), "--device-memory", memory)
        for steps, memory in (("5", "1MiB"), ("10", "60KiB"))
    ]
    assert [line for part in parts for line in part] == whole
