"""``memferry train --save`` and ``--resume``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import memferry_rt
from memferry_tools.train import reference as reference_module

from .conftest import Command, Outcome
from .test_command_errors import assert_one_line
from .test_command_process import _SMALL, start


def losses(path: Path) -> list[tuple[int, float]]:
    return [(sample["step"], sample["loss"]) for sample in json.loads(path.read_text())["samples"]]


def fails(outcome: Outcome, *parts: str) -> None:
    assert_one_line(outcome, *parts)


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        ([], []),
        (["--device-memory", "60KiB"], ["--device-memory", "1MiB", "--no-async-step"]),
        (
            ["--accumulate", "2", "--tied", "--checkpointing", "--seed", "3"],
            ["--device-memory", "90KiB", "--pool-memory", "80KiB"],
        ),
        (["--dtype", "bf16"], []),
    ],
    ids=lambda arguments: " ".join(arguments) or "defaults",
)
def test_a_resumed_run_is_the_uninterrupted_one(
    train: Command, tmp_path: Path, settings: list[str], others: list[str]
) -> None:
    def path(name: str) -> str:
        return str(tmp_path / name)

    common = [argument for argument in settings if argument not in ("--device-memory", "60KiB")]
    whole = train("--steps", "5", "--json", path("whole.json"), *settings)
    first = train("--steps", "3", "--save", path("saved"), *settings)
    assert first.status == whole.status == 0
    assert f"saved      {path('saved')}, after 3 steps" in first.out
    rest = train("--steps", "5", "--resume", path("saved"), "--json", path("rest.json"), *common, *others)
    assert (rest.status, rest.err) == (0, "")
    assert f"resumed    {path('saved')}, after 3 steps" in rest.out
    assert losses(tmp_path / "rest.json") == losses(tmp_path / "whole.json")[3:]


def test_a_resumed_run_is_verified_against_plain_pytorch_from_the_start(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = str(tmp_path / "saved")
    assert train("--steps", "2", "--save", saved, "--accumulate", "2").status == 0
    arguments = ["--steps", "4", "--resume", saved, "--accumulate", "2", "--verify", "--max-grad-norm", "1"]
    outcome = train(*arguments)
    assert outcome.status == 0
    assert "and those before" in outcome.out
    assert "identical to the bit with plain PyTorch: 4 losses of 2 steps" in outcome.out
    monkeypatch.setattr(reference_module.PlainTraining, "_scale", lambda self, norm: 0.5)
    assert train(*arguments).status == 1


def test_saving_every_so_many_steps_and_going_on_in_the_same_folder(train: Command, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    seen: list[int] = []

    def watch(*arguments: Any, **keywords: Any) -> None:
        seen.append(keywords["extra"]["step"])
        save(*arguments, **keywords)

    save = memferry_rt.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memferry_rt, "save", watch)
        assert train("--steps", "5", "--save", str(saved), "--save-every", "2").status == 0
        assert seen == [2, 4, 5]
        again = ["--save", str(saved), "--save-every", "3", "--resume", str(saved)]
        assert train("--steps", "7", *again).status == 0
        assert seen == [2, 4, 5, 6, 7]
    assert memferry_rt.checkpoint_info(saved).extra["step"] == 7
    assert len(os.listdir(saved)) == 3


def test_a_run_killed_between_saves_goes_on_from_the_last(text_file: Path, train: Command, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    process = start(_SMALL, "--data", str(text_file), "--save", str(saved), "--save-every", "1", "--lr", "1e-2")
    assert process.stdout is not None
    for line in process.stdout:
        if " ".join(line.split()).startswith("step 4/"):
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    step = memferry_rt.checkpoint_info(saved).extra["step"]
    assert step >= 3
    results = tmp_path / "rest.json"
    outcome = train("--steps", str(step + 2), "--resume", str(saved), "--json", str(results))
    assert (outcome.status, outcome.err) == (0, "")
    whole = tmp_path / "whole.json"
    assert train("--steps", str(step + 2), "--json", str(whole)).status == 0
    assert losses(results) == losses(whole)[step:]


@pytest.fixture
def saved(train: Command, tmp_path: Path) -> str:
    """The checkpoint of a run of two steps."""
    path = str(tmp_path / "saved")
    assert train("--steps", "2", "--save", path).status == 0
    return path


def test_another_run_is_refused(train: Command, saved: str) -> None:
    for arguments, parts in (
        (["--preset", "tiny"], ["preset small, and this one tiny"]),
        (["--seed", "1"], ["seed 0, and this one 1"]),
        (["--lr", "0.5"], ["lr 0.01, and this one 0.5"]),
        (["--seq", "8"], ["seq 16, and this one 8"]),
        (["--tied"], ["tied False, and this one True"]),
        (["--dtype", "bf16"], ["dtype float32, and this one bfloat16"]),
        (["--max-grad-norm", "0"], ["max_grad_norm 1.0, and this one None"]),
        (["--steps", "2"], ["has made 2 steps", "--steps 3"]),
    ):
        fails(train("--resume", saved, "--steps", "4", *arguments), "--resume", saved, *parts)


def test_other_data_is_refused(train: Command, saved: str, tmp_path: Path, text_file: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_bytes(text_file.read_bytes().swapcase())
    fails(train("--resume", saved, "--steps", "4", "--data", str(other)), "--resume", "checksum of the data")


def test_what_cannot_be_resumed(train: Command, saved: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    fails(train("--resume", str(missing)), "--resume", f"no checkpoint in {missing}")
    fails(train("--resume", str(tmp_path)), "--resume", f"no checkpoint in {tmp_path}")
    fails(train("--resume", ""), "--resume", "empty")
    (weights,) = Path(saved).glob("model-*")
    with weights.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"?")
    fails(train("--resume", saved, "--steps", "4"), "--resume", "damaged", weights.name)
    weights.unlink()
    fails(train("--resume", saved, "--steps", "4"), "--resume", "damaged", weights.name)


def test_a_checkpoint_of_something_else_is_no_run(train: Command, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    memferry_rt.save(tmp_path, model, torch.optim.AdamW(model.parameters()), extra={"step": 3})
    fails(train("--resume", str(tmp_path)), "--resume", str(tmp_path), "not saved by memferry train")


def test_what_cannot_be_saved_is_refused_before_anything_is_done(
    train: Command, saved: str, text_file: Path
) -> None:
    for arguments, parts in (
        (["--save", str(text_file)], [str(text_file), "File exists"]),
        (["--save", "/proc/nowhere"], ["/proc/nowhere", "cannot be written to"]),
        (["--save", "/proc"], ["/proc", "cannot be written to"]),
        (["--save", ""], ["empty"]),
        (["--save", saved], [saved, "--resume"]),
        (["--save", saved, "--save-every", "0"], ["--save-every: 0"]),
    ):
        outcome = train(*arguments)
        fails(outcome, "--save", *parts)
        assert outcome.out == ""
    fails(train("--save-every", "2"), "--save-every", "--save DIR")
    assert memferry_rt.checkpoint_info(saved).extra["step"] == 2


def test_a_full_disk_ends_the_run_with_one_line_and_the_last_save_is_whole(
    train: Command, saved: str, text_file: Path
) -> None:
    """The limit on the size of files stands for the disk's end."""
    size = max(path.stat().st_size for path in Path(saved).iterdir())
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, resource.RLIM_INFINITY))
{_SMALL}"""
    arguments = ["--data", str(text_file), "--steps", "4", "--lr", "1e-2", "--save", saved, "--resume", saved]
    process = start(program, *arguments)
    out, err = process.communicate()
    assert process.returncode == 2
    assert "step 4/4" in out
    assert err.startswith(
        f"memferry: error: --save: the checkpoint could not be written to {saved}: File too large"
    )
    assert err.count("\n") == 1
    assert memferry_rt.checkpoint_info(saved).extra["step"] == 2
    assert len(os.listdir(saved)) == 3
    assert train("--steps", "3", "--resume", saved).status == 0


@pytest.mark.slow
def test_a_disk_that_is_really_full(saved: str, text_file: Path, tmp_path: Path) -> None:
    """On a file system of its own, where this process may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    try:
        process = start(_SMALL, "--data", str(text_file), "--steps", "4", "--save", str(folder))
        _, err = process.communicate()
        assert process.returncode == 2
        assert "No space left on device" in err
        assert err.count("\n") == 1
        assert os.listdir(folder) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)
