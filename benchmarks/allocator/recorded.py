"""The allocations of a training run: llama-1b on sequences of random length, recorded from torch without data.

Every storage that autograd and the operators make and drop, in their order; nothing is computed, so a log of
tens of GiB is made in seconds on any machine.
"""

from __future__ import annotations

import random

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memferry_allocator.device.log import Action, LogEntry
from memferry_tools.train.model import Decoder
from memferry_tools.train.presets import find_preset
from memferry_tools.train.storages import StorageLives


def record(preset: str = "llama-1b", *, steps: int = 12, micro_batch: int = 4, seed: int = 0) -> list[LogEntry]:
    """The log of `steps` steps in bf16, gradients dropped after each, without activation checkpointing."""
    entries: list[LogEntry] = []
    lengths = random.Random(seed)
    lives = StorageLives(
        lambda number, nbytes: entries.append(LogEntry(Action.ALLOCATE, 0.0, 0, number + 1, 0, nbytes, 0)),
        lambda number, nbytes: entries.append(LogEntry(Action.FREE, 0.0, 0, number + 1, 0, nbytes, 0)),
    )
    default = torch.get_default_dtype()
    try:
        with FakeTensorMode(), lives:
            torch.set_default_dtype(torch.bfloat16)
            model = Decoder(find_preset(preset).shape, checkpointing=False)
            for _ in range(steps):
                tokens = torch.zeros(micro_batch, lengths.randint(200, 2000), dtype=torch.int64)
                model(tokens, tokens).backward()
                for parameter in model.parameters():
                    parameter.grad = None
            torch.set_default_dtype(default)
            del model, tokens, parameter
    finally:
        torch.set_default_dtype(default)
    return [entry for entry in entries if entry.nbytes]
