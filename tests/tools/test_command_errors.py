"""What a user can get wrong: one line on standard error, exit status 2, no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memferry_allocator import DriverError
from memferry_tools.train import device as device_module
from memferry_tools.train import presets
from memferry_tools.train.model import Decoder

from .conftest import Command, Outcome


def assert_one_line(outcome: Outcome, *parts: str) -> None:
    assert outcome.status == 2
    assert outcome.err.startswith("memferry: error: ")
    assert outcome.err.endswith("\n")
    assert outcome.err.count("\n") == 1
    assert "\x1b" not in outcome.err
    for part in parts:
        assert part in outcome.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["nonsense"], ["nonsense", "memferry --help"]),
        (["--nonsense"], ["--nonsense"]),
        (["train", "--nonsense"], ["--nonsense", "memferry train --help"]),
        (["train", "stray"], ["stray"]),
        (["train", "--steps"], ["--steps", "memferry train --help"]),
        (["plan", "--compare", "x"], ["requires 2 arguments", "memferry plan --help"]),
        (["train", "--config", "/nowhere"], ["--config: /nowhere", "cannot be read"]),
        (["train", "--config", ""], ["--config", "empty"]),
        (["train", "--steps", "many"], ["--steps", "integer"]),
        (["train", "--lr", "fast"], ["--lr"]),
        (["train", "--preset", "huge"], ["--preset", "'huge'", *presets.PRESETS]),
        (["train", "--device", "gpu"], ["--device", "'gpu'", "auto, cuda:0 or emulated"]),
        (["train", "--device", "cuda:99"], ["--device cuda:99"]),
        (["train", "--device", "emulated:1"], ["--device emulated:1", "this machine has 1"]),
        (["train", "--dtype", "fp8"], ["--dtype", "'fp8'", "fp32 or bf16"]),
        (["train", "--device-memory", "24GB"], ["--device-memory", "'24GiB'", "24000000000"]),
        (["train", "--device-memory=-5MiB"], ["--device-memory", "'-5MiB'"]),
        (["train", "--device-memory", "0"], ["--device-memory", "'0'"]),
        (["train", "--host-memory", "lots"], ["--host-memory", "'lots'"]),
        (["train", "--pool-memory=-1"], ["--pool-memory", "'-1'"]),
        (["train", "--micro-batch", "0"], ["--micro-batch: 0"]),
        (["train", "--seq", "0"], ["--seq: 0"]),
        (["train", "--accumulate=-1"], ["--accumulate: -1"]),
        (["train", "--steps", "0"], ["--steps: 0"]),
        (["train", "--seed=-1"], ["--seed: -1"]),
        (["train", "--lr", "0"], ["--lr"]),
        (["train", "--lr", "nan"], ["--lr: nan"]),
        (["train", "--weight-decay=-0.1"], ["--weight-decay: -0.1"]),
        (["train", "--max-grad-norm", "inf"], ["--max-grad-norm: inf"]),
        (["train", "--data", ""], ["--data", "empty"]),
    ],
    ids=" ".join,
)
def test_an_option_that_makes_no_sense(memferry: Command, arguments: list[str], parts: list[str]) -> None:
    assert_one_line(memferry(*arguments), *parts)


def test_data_that_is_not_there(train: Command, tmp_path: Path) -> None:
    assert_one_line(train("--data", str(tmp_path / "nowhere")), "--data", "nowhere")


def test_empty_data(train: Command, tmp_path: Path) -> None:
    (tmp_path / "nothing").touch()
    assert_one_line(train("--data", str(tmp_path / "nothing")), "--data", "is empty")


def test_data_shorter_than_a_sequence(train: Command) -> None:
    outcome = train("--seq", "5000")
    assert_one_line(outcome, "--seq: 5000", "1440", "--seq 1439 or less")


def test_a_data_file_that_may_not_be_read(
    train: Command, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert_one_line(train(), "--data", str(text_file), "Permission denied")


def test_a_tokenizer_that_is_not_there(train: Command, tmp_path: Path) -> None:
    assert_one_line(train("--tokenizer", str(tmp_path / "nowhere")), "--tokenizer", "nowhere")


def test_a_tokenizer_that_is_none(train: Command, text_file: Path) -> None:
    pytest.importorskip("tokenizers")
    assert_one_line(train("--tokenizer", str(text_file)), "--tokenizer", str(text_file))


@pytest.mark.parametrize("path", ["no/such/folder.json", "."])
def test_results_that_cannot_be_written_are_refused_before_anything_is_done(train: Command, path: str) -> None:
    outcome = train("--json", path)
    assert_one_line(outcome, "--json", path.split("/")[0])
    assert outcome.out == ""


def test_a_results_folder_without_permission(train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    outcome = train("--json", "results.json")
    assert_one_line(outcome, "--json", "Permission denied")
    assert outcome.out == ""


def test_a_broken_driver(train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str, **options: object) -> None:
        raise DriverError("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "init")

    monkeypatch.setattr(device_module, "open_device", broken)
    assert_one_line(train("--device", "auto"), "--device auto", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot")


@pytest.mark.parametrize(
    ("option", "name"),
    [("--device-memory", "device_memory"), ("--pool-memory", "pool_memory"), ("--host-memory", "host_memory")],
)
def test_a_budget_that_is_too_small_names_the_smallest_that_works(train: Command, option: str, name: str) -> None:
    outcome = train(option, "4KiB", "--steps", "1")
    assert_one_line(outcome, name, "the smallest that works is")
    smallest = outcome.err.rpartition("(")[2].split()[0]
    assert train(option, smallest, "--steps", "1").status == 0


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("nobody=dha", "no layer is called 'nobody'"),
        ("blocks.*=fast", "'fast'"),
        ("blocks.*", "layer=mode"),
        ("embedding=ring", "'embedding' cannot do 'ring'"),
    ],
)
def test_modes_that_cannot_be(train: Command, mode: str, says: str) -> None:
    assert_one_line(train("--mode", mode, "--steps", "1"), says)


def test_a_pool_larger_than_the_budget(train: Command) -> None:
    assert_one_line(train("--pool-memory", "1MiB", "--device-memory", "500KiB"), "pool_memory")


def test_too_little_host_memory_for_python(train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate 745. GiB")

    monkeypatch.setattr(Decoder, "forward", fail)
    assert_one_line(train(), "not enough memory", "745")


def test_too_little_host_memory_for_torch(train: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory:\nyou tried 9 bytes")

    monkeypatch.setattr(Decoder, "forward", fail)
    assert_one_line(train(), "not enough memory", "DefaultCPUAllocator")


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_a_package_of_the_command_is_missing(
    memferry: Command, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert_one_line(memferry("--help"), module, "pip install 'memferry-rt[tools]'")


def test_a_package_that_does_not_load(memferry: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    assert_one_line(memferry("train"), "torch", "does not load", "libtorch.so")
