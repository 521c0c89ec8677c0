"""What scripts share that train the model and the text of ``memferry train`` with another system."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from memferry_tools.train.data import Batches
from memferry_tools.train.loop import WARM_UP
from memferry_tools.train.options import TrainOptions
from memferry_tools.train.recipe import Recipe
from memferry_tools.train.text import read_text
from memferry_tools.train.tokens import tokenise

NUMBERS = {"micro_batch": int, "seq": int, "accumulate": int, "steps": int, "max_grad_norm": float}


def options_of(arguments: list[str]) -> TrainOptions:
    """Options of ``memferry train``; every one but ``--checkpointing`` has a value."""
    words: dict[str, Any] = {}
    rest = iter(arguments)
    for name in rest:
        key = name.removeprefix("--").replace("-", "_")
        words[key] = True if key == "checkpointing" else next(rest)
    return TrainOptions.build(**{key: NUMBERS.get(key, lambda value: value)(words[key]) for key in words})


class Peer:
    """A run on a CUDA device: its recipe, its text, its times; under ``torchrun`` one of several.

    Parameters
    ----------
    options : TrainOptions
        `json` is where the result goes.
    """

    def __init__(self, options: TrainOptions) -> None:
        tokens = tokenise(read_text(options.data), options.tokenizer)
        ranks, self._rank = (
            int(os.environ.get(key, value)) for key, value in (("WORLD_SIZE", "1"), ("RANK", "0"))
        )
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        alone = options.settle(emulated=False, vocabulary=tokens.vocabulary)
        self.recipe: Recipe = replace(alone, ranks=ranks)
        self._batches = Batches(tokens, self.recipe, self._rank)
        self._out = options.json

    def windows(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their successors, on the device."""
        tokens = torch.from_numpy(self._batches.micro_batch(step, micro_step)).pin_memory()
        windows = tokens.cuda(non_blocking=True)
        return windows[:, :-1], windows[:, 1:]

    def run(self, system: str, step: Callable[[int], torch.Tensor]) -> None:
        """Time every step, and write the result; `step` gives its last loss."""
        torch.cuda.empty_cache()  # what making the model took is not the run's
        torch.cuda.reset_peak_memory_stats()
        seconds, losses = [], []
        for number in range(self.recipe.steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            loss = step(number)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            losses.append(float(loss.detach()))
        result = {
            "system": system,
            "iteration_s": statistics.median(seconds[min(WARM_UP, len(seconds) - 1) :]),
            "device_peak_bytes": torch.cuda.max_memory_reserved(),
            "device_peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "samples": [{"seconds": s, "loss": x} for s, x in zip(seconds, losses, strict=True)],
        }
        if self._rank != 0:
            return
        assert self._out is not None
        self._out.write_text(json.dumps(result))
