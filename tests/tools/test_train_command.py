"""``memferry train`` from end to end, on a small model."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from memferry_tools.train import model as model_module
from memferry_tools.train import reference as reference_module
from memferry_tools.train.model import Decoder

from .conftest import SMALL, Command


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--checkpointing"],
        ["--accumulate", "3"],
        ["--tied"],
        ["--max-grad-norm", "0"],
        ["--max-grad-norm", "1e-3"],
        ["--no-async-step"],
        ["--weight-decay", "0.5", "--lr", "0.1"],
        ["--device-memory", "1MiB"],
        ["--dtype", "bf16"],
        ["--dtype", "bf16", "--accumulate", "2", "--tied", "--checkpointing"],
        ["--dtype", "bf16", "--accumulate", "3", "--accumulate-dtype", "fp32", "--tied"],
        ["--mode", "embedding=dha+inplace,blocks.*=ring+inplace"],
        ["--mode", "embedding=dha,blocks.*=dha_then_load", "--dtype", "bf16", "--checkpointing"],
        ["--mode", "*=dha+inplace", "--accumulate", "2", "--tied"],
    ],
    ids=lambda arguments: " ".join(arguments) or "defaults",
)
def test_a_run_has_the_bits_of_plain_pytorch(train: Command, arguments: list[str]) -> None:
    outcome = train("--steps", "4", "--verify", *arguments)
    assert (outcome.status, outcome.err) == (0, "")
    assert "identical to the bit with plain PyTorch" in outcome.out
    tensors = len(list(Decoder(SMALL).parameters())) - ("--tied" in arguments)
    losses = 4 * (int(arguments[arguments.index("--accumulate") + 1]) if "--accumulate" in arguments else 1)
    assert f"{losses} losses of 4 steps and {tensors} parameters" in outcome.out


def test_a_loss_computed_in_pieces_has_the_bits_of_plain_pytorch(
    train: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", 5 * SMALL.vocabulary)
    assert train("--steps", "3", "--verify").status == 0


def test_a_difference_is_found_shown_and_gives_status_1(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scale_a_little_differently(self: object, norm: float) -> float:
        return 1 / (norm + 2e-6)

    monkeypatch.setattr(reference_module.PlainTraining, "_scale", scale_a_little_differently)
    results = tmp_path / "results.json"
    outcome = train("--steps", "3", "--verify", "--max-grad-norm", "1e-3", "--json", str(results))
    assert (outcome.status, outcome.err) == (1, "")
    assert "NOT identical with plain PyTorch: first in loss of step 2" in outcome.out
    verify = json.loads(results.read_text())["summary"]["verify"]
    assert verify["identical"] is False
    assert verify["max_abs_difference"] > 0


def test_the_loss_falls(train: Command, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    assert train("--steps", "20", "--json", str(results)).status == 0
    losses = [sample["loss"] for sample in json.loads(results.read_text())["samples"]]
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert losses[-1] < losses[0] - 1.5


def test_two_runs_of_one_seed_are_the_same_and_of_two_seeds_are_not(train: Command, tmp_path: Path) -> None:
    def losses(seed: int) -> list[float]:
        assert train("--steps", "2", "--seed", str(seed), "--json", str(tmp_path / "results.json")).status == 0
        samples = json.loads((tmp_path / "results.json").read_text())["samples"]
        return [sample["loss"] for sample in samples]

    assert losses(1) == losses(1) != losses(2)


def test_what_is_shown_is_plain_lines_where_there_is_no_terminal(
    train: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    outcome = train("--steps", "3", "--verify")
    assert outcome.status == 0
    assert not re.search(r"[^\n -~]", outcome.out)
    assert f"small: {SMALL.parameters:,} parameters; 3 blocks" in outcome.out
    assert "EMULATED" in outcome.out
    assert "bytes a parameter" in outcome.out
    assert len(re.findall(r"^ +step \d/3 +loss \d", outcome.out, re.MULTILINE)) == 6  # ours, and plain PyTorch's
    assert re.search(r"busy [\d.]+ \(\d+%\), exposed optimizer [\d.]+ .*, exposed copies [\d.]+", outcome.out)
    assert len(re.findall(r"^  host .* bytes a parameter", outcome.out, re.MULTILINE)) == 2
    for label in ("budget", "host", "loss", "iteration", "device", "moved", "verify"):
        assert re.search(rf"^  {label} ", outcome.out, re.MULTILINE)


def test_a_budget_of_less_than_the_weights_is_kept(train: Command, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    assert train("--steps", "3", "--device-memory", "120KiB", "--json", str(results)).status == 0
    report = json.loads(results.read_text())["report"]
    assert report["weight_nbytes"] > 180 * 1024
    assert 0 < report["device_peak"] <= 120 * 1024
    assert report["host_to_device_nbytes"] > 3 * report["weight_nbytes"]


def test_results_have_everything_and_numbers_are_numbers(train: Command, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    outcome = train("--steps", "5", "--accumulate", "2", "--verify", "--json", str(results))
    assert outcome.status == 0
    content = json.loads(results.read_text())
    assert (content["schema"], content["schema_version"]) == ("memferry.train", 1)
    settings = content["settings"]
    assert settings["preset"] == "small"
    assert settings["device"] == "emulated:0"
    assert settings["dtype"] == "float32"
    assert settings["shape"]["hidden"] == SMALL.hidden
    assert (settings["micro_batch"], settings["seq"], settings["accumulate"], settings["steps"]) == (2, 16, 2, 5)
    machine = content["machine"]
    assert machine["emulated"] is True
    assert machine["torch"] == torch.__version__
    assert machine["memory_bytes"] > 1 << 28
    assert machine["cores"] >= 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", machine["date"])
    _check_samples(content["samples"])
    _check_summary(content)
    assert [path.name for path in tmp_path.iterdir() if path.name != "words.txt"] == ["results.json"]


def _check_samples(samples: list[dict[str, Any]]) -> None:
    assert [sample["step"] for sample in samples] == [1, 2, 3, 4, 5]
    for sample in samples:
        for key in ("loss", "grad_norm", "seconds", "tokens_per_second", "device_peak_bytes"):
            assert isinstance(sample[key], (int, float))
        assert sample["tokens_per_second"] == pytest.approx(64 / sample["seconds"])


def _check_summary(content: dict[str, Any]) -> None:
    samples, summary, report = content["samples"], content["summary"], content["report"]
    timed = [sample["seconds"] for sample in samples[3:]]
    assert summary["iteration_s"] == pytest.approx(sum(timed) / 2)
    assert summary["tokens_per_second"] == pytest.approx(64 / summary["iteration_s"])
    assert summary["device_peak_bytes"] == report["device_peak"] == samples[-1]["device_peak_bytes"]
    assert 16 <= summary["host_bytes_per_parameter"] < 17
    assert summary["dram_bytes_per_step"] >= 28 * report["parameters"]
    times = summary["device_iteration"]
    parts = times["busy_s"] + times["exposed_optimizer_s"] + times["exposed_copy_s"]
    assert parts == pytest.approx(times["total_s"])
    assert times["total_s"] > 0
    assert times["busy_share"] == pytest.approx(times["busy_s"] / times["total_s"])
    assert (summary["loss_first"], summary["loss_last"]) == (samples[0]["loss"], samples[-1]["loss"])
    assert summary["verify"]["identical"] is True
    assert summary["verify"]["losses"] == 10
    assert report["steps"] == 5
    assert report["parameters"] == content["settings"]["parameters"] == SMALL.parameters


def test_a_loss_that_is_not_a_number_is_null_and_its_step_is_skipped(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Decoder.forward

    def not_a_number(self: Decoder, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return forward(self, tokens, targets) * math.nan

    monkeypatch.setattr(Decoder, "forward", not_a_number)
    results = tmp_path / "results.json"
    outcome = train("--steps", "2", "--verify", "--json", str(results))
    assert outcome.status == 0  # plain PyTorch skips it too
    assert "skipped" in outcome.out
    content = json.loads(results.read_text())
    assert content["report"]["skipped_steps"] == 2
    assert [sample["loss"] for sample in content["samples"]] == [None, None]


def test_results_that_fail_to_be_written_leave_the_old_ones(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results.json"
    results.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    outcome = train("--steps", "1", "--json", str(results))
    assert outcome.status == 2
    assert "No space left on device" in outcome.err
    assert results.read_text() == "old"
    assert not list(tmp_path.glob(".*"))


def test_the_vocabulary_grows_with_the_tokenizer(train: Command, tmp_path: Path, text_file: Path) -> None:
    library = pytest.importorskip("tokenizers")
    words = sorted(set(re.findall(r"\w+|[^\w\s]+", text_file.read_text())))
    vocabulary = {word: 300 + number for number, word in enumerate(words)}
    tokenizer = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    results = tmp_path / "results.json"
    outcome = train(
        "--tokenizer", str(tmp_path / "tokenizer.json"), "--steps", "2", "--json", str(results), "--verify"
    )
    assert outcome.status == 0
    assert json.loads(results.read_text())["settings"]["shape"]["vocabulary"] == 300 + len(words)


@pytest.mark.slow
def test_the_demo(memferry: Command, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    arguments = ["train", "--preset", "tiny", "--steps", "12", "--verify", "--json", str(results)]
    outcome = memferry(*arguments, "--device", "emulated")
    assert outcome.status == 0
    assert "identical to the bit" in outcome.out
    content = json.loads(results.read_text())
    assert content["summary"]["loss_last"] < content["summary"]["loss_first"] - 1
    assert content["summary"]["device_peak_bytes"] <= content["report"]["weight_nbytes"] / 3
