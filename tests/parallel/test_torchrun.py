"""``torchrun -m memferry_tools train``, as users start it: two processes, and what they leave to one."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from memferry_tools.cli import main
from memferry_tools.train import presets

SMALL = presets.Preset(presets.ModelShape(32, 3, 64, 2, 256), micro_batch=2, seq=16, lr=1e-3, checkpointing=False)
_PROGRAM = """
import sys
import torch
from memferry_tools.cli import main
from memferry_tools.train import presets
torch.set_num_threads(1)
shape = presets.ModelShape(32, 3, 64, 2, 256)
presets.PRESETS["small"] = presets.Preset(shape, micro_batch=2, seq=16, lr=1e-3, checkpointing=False)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(presets.PRESETS, "small", SMALL)
    text = tmp_path / "words.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    return ["train", "--preset", "small", "--device", "emulated", "--data", str(text)]


def _losses(path: Path) -> list[float]:
    return [sample["loss"] for sample in json.loads(path.read_text())["samples"]]


def test_two_processes_train_as_one_and_one_goes_on(arguments: list[str], tmp_path: Path) -> None:
    program, folder = tmp_path / "small.py", str(tmp_path / "checkpoint")
    program.write_text(_PROGRAM)
    both, alone = tmp_path / "both.json", tmp_path / "alone.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launched = subprocess.run(
        [*launcher, str(program), *arguments, "--steps", "3", "--save", folder, "--json", str(both)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert launched.returncode == 0, launched.stderr
    assert launched.stdout.count("step 3/3") == 1, "one process shows the steps"
    assert "2 ranks x 1 x 2 x 16 tokens" in launched.stdout
    assert main([*arguments, "--steps", "3", "--accumulate", "2", "--json", str(alone)]) == 0
    assert _losses(both) == pytest.approx(_losses(alone), rel=1e-5)
    assert main([*arguments, "--steps", "4", "--accumulate", "2", "--resume", folder]) == 0


def test_one_device_for_all_is_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main([*arguments, "--device", "cuda:0"]) == 2
    assert capsys.readouterr().err.startswith(
        "memferry: rank 1: error: --device: cuda:0 would be the device of every"
    )


def _launch_hosts(program: Path, arguments: list[str], each: int) -> list[str]:
    """Two launchers, as on two machines with an address of this one; what each of them has shown."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(each)]
    address = ["--master-addr", "127.0.0.1", "--master-port", port]
    started = [
        subprocess.Popen(
            [*launcher, "--node-rank", str(number), *address, str(program), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "MEMFERRY_HOST": f"machine-{number}",
            },
        )
        for number in range(2)
    ]
    try:
        shown = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, shown, strict=True):
        assert process.returncode == 0, errors
    return [text for text, _ in shown]


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 2])
def test_two_launchers_train_as_one_host(arguments: list[str], tmp_path: Path, each: int) -> None:
    program, alone = tmp_path / "small.py", tmp_path / "alone.json"
    program.write_text(_PROGRAM)
    runs = []
    for number in range(2):
        folder, written = tmp_path / f"checkpoint-{number}", tmp_path / f"{number}.json"
        options = ["--steps", "3", "--save", str(folder), "--json", str(written)]
        first, second = _launch_hosts(program, [*arguments, *options], each)
        assert first.count("step 3/3") == 1
        assert f"{2 * each} ranks x 1 x 2 x 16 tokens" in first
        assert "step" not in second, "global rank 0 alone shows the steps"
        runs.append(_losses(written))
    assert runs[0] == runs[1]
    checksums = _checksums(tmp_path / "checkpoint-0")
    assert len(checksums) == 2
    assert _checksums(tmp_path / "checkpoint-1") == checksums
    whole = ["--accumulate", str(2 * each)]
    assert main([*arguments, "--steps", "3", *whole, "--json", str(alone)]) == 0
    assert runs[0] == pytest.approx(_losses(alone), rel=1e-5)
    assert main([*arguments, "--steps", "4", *whole, "--resume", str(tmp_path / "checkpoint-0")]) == 0


def _checksums(folder: Path) -> dict[str, str]:
    """Of every file of tensors in a checkpoint."""
    files = folder.rglob("*.safetensors")
    return {path.name.split("-")[0]: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
