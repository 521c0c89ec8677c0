"""A model small enough that a run takes a fraction of a second, and the command in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from memferry_tools.cli import main
from memferry_tools.train import presets
from memferry_tools.train.data import Batches
from memferry_tools.train.presets import ModelShape, Preset
from memferry_tools.train.recipe import Recipe
from memferry_tools.train.text import Text
from memferry_tools.train.tokens import tokenise

torch.set_num_threads(1)  # the models are too small for more, and the bits do not depend on it

SMALL = ModelShape(hidden=32, layers=3, ffn=64, heads=2, vocabulary=256)
WORDS = "the quick brown fox jumps over the lazy dog, and the dog does not mind. "


@pytest.fixture(autouse=True)
def default_interrupt_handler() -> Iterator[None]:
    """Python's own, also where the tests run in the background of a shell, which ignores Ctrl-C there."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Outcome:
    """What a command gave."""

    status: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def memferry(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run the command with these arguments."""

    def run(*arguments: str) -> Outcome:
        status = main(arguments)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(WORDS * 20)
    return path


@pytest.fixture
def train(memferry: Command, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run ``memferry train`` of a small model on the emulated device, with these arguments added."""
    small = Preset(SMALL, micro_batch=2, seq=16, lr=1e-2, checkpointing=False)
    monkeypatch.setitem(presets.PRESETS, "small", small)
    base: Sequence[str] = ("train", "--preset", "small", "--data", str(text_file), "--device", "emulated")

    def run(*arguments: str) -> Outcome:
        return memferry(*base, *arguments)

    return run


@pytest.fixture
def recipe() -> Recipe:
    """A small model's training, three steps of it."""
    return Recipe(
        shape=SMALL,
        checkpointing=False,
        dtype="float32",
        micro_batch=2,
        seq=16,
        accumulate=1,
        steps=3,
        lr=1e-2,
        weight_decay=0.01,
        max_grad_norm=1.0,
        seed=0,
    )


@pytest.fixture
def batches(recipe: Recipe) -> Batches:
    return Batches(tokenise(Text((WORDS * 20).encode(), "words")), recipe)
