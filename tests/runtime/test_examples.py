"""The examples run as they are, and do what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


_SEVERAL = """
import json, runpy, sys
path, *runs = sys.argv[1:]
for arguments in runs:
    sys.argv = [path, *json.loads(arguments)]
    runpy.run_path(path, run_name="__main__")
"""


def run(name: str, *runs: list[str]) -> list[str]:
    """What an example prints, run by run; all of them by one process, as most of a run is importing torch."""
    several = [json.dumps(["--device", "emulated", *arguments]) for arguments in runs]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _SEVERAL, str(EXAMPLES / name), *several],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_custom_loop_learns_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    lines = run(
        "custom_loop.py",
        ["--steps", "10", "--folder", whole],
        ["--steps", "5", "--folder", parts, "--device-memory", "1MiB"],
        ["--steps", "10", "--folder", parts, "--device-memory", "60KiB"],
    )
    losses = [float(line.split()[3].rstrip(",")) for line in lines[:2]]
    assert losses[1] < losses[0] < 2.5
    assert len(lines) == 4
    assert lines[2:] == lines[:2]
