"""The command as a process of its own: what it imports, and how it ends."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_SMALL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests themselves were started with
from memferry_tools.cli import main
from memferry_tools.train import presets
shape = presets.ModelShape(32, 3, 64, 2, 256)
presets.PRESETS["small"] = presets.Preset(shape, micro_batch=2, seq=16, lr=1e-3, checkpointing=False)
sys.exit(main(["train", "--preset", "small", "--device", "emulated", "--steps", "1000000", *sys.argv[1:]]))
"""


def start(program: str, *arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_without_torch_only_training_is_refused() -> None:
    program = """
import sys
sys.modules["torch"] = None
from memferry_tools.cli import main
assert main(["--version"]) == main(["train", "--help"]) == 0
sys.exit(main(["train"]))
"""
    process = start(program)
    _, err = process.communicate()
    assert process.returncode == 2
    assert err == "memferry: error: training needs torch; install it with: pip install 'memferry-rt[torch]'\n"


def test_the_reference_imports_nothing_of_the_runtime() -> None:
    program = """
import sys
import memferry_tools.train.reference
print(*sorted(name for name in sys.modules if name.partition("_")[0] == "memferry"))
"""
    process = start(program)
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    packages = {name.partition(".")[0] for name in out.split()}
    assert packages == {"memferry_tools"}


def test_ctrl_c_ends_with_one_line_and_status_130(text_file: Path) -> None:
    process = start(_SMALL, "--data", str(text_file))
    assert process.stdout is not None
    while not (line := process.stdout.readline()).lstrip().startswith("step"):
        assert line, "the run ended before its first step"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, err) == (130, "memferry: interrupted\n")
    assert "\x1b" not in out


def test_ctrl_c_while_plain_pytorch_runs(text_file: Path) -> None:
    # The same loop, but of the verification: one step of ours, and very many of the reference.
    program = _SMALL.replace(
        "sys.exit",
        """
import dataclasses
from memferry_tools.train import job
verify = job._verify
job._verify = lambda run, recipe, *rest: verify(run, dataclasses.replace(recipe, steps=1000000), *rest)
sys.exit""",
    )
    process = start(program, "--data", str(text_file), "--steps", "1", "--verify")
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any("plain PyTorch" in line for line in lines)
    assert any(line.lstrip().startswith("step") for line in lines)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (130, "memferry: interrupted\n")


def test_ctrl_c_restores_the_terminal(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    controller, terminal = pty.openpty()
    process = start(_SMALL, "--data", str(text_file), stdout=terminal)
    os.close(terminal)
    shown = b""
    while b"tokens/s" not in shown:
        shown += os.read(controller, 4096)
    process.send_signal(signal.SIGINT)
    shown += _rest_of(controller)
    _, err = process.communicate()
    assert (process.returncode, err) == (130, "memferry: interrupted\n")
    hidden, visible = b"\x1b[?25l", b"\x1b[?25h"
    assert hidden in shown
    assert shown.rindex(visible) > shown.rindex(hidden)


def test_a_reader_that_goes_away_is_no_error(text_file: Path) -> None:
    process = start(_SMALL, "--data", str(text_file))
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), err) == (141, "")


def _rest_of(descriptor: int) -> bytes:
    """Everything until the other side closes it, which Linux reports as an error."""
    parts = []
    try:
        while part := os.read(descriptor, 4096):
            parts.append(part)
    except OSError:
        pass
    os.close(descriptor)
    return b"".join(parts)
