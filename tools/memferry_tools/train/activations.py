"""How much memory torch needs for a step beside the weights, found by running one on tensors without data."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memferry_allocator.sizes import align_up

from .initial import build_model
from .recipe import Recipe
from .storages import StorageLives

GRANULE = 512  # torch's allocator rounds up to this
FRAGMENTATION = 1.15  # reserved over counted, at their peaks; llama-1b, 8 x 1024, checkpointing, on an H200
WORKSPACES = 64 << 20  # cuBLAS takes 32 MiB on Hopper in each of the two threads that launch


class _PeakBytes:
    """Counts the bytes of storages that live at the same time."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def made(self, _: int, nbytes: int) -> None:
        self.now += align_up(nbytes, GRANULE)
        self.peak = max(self.peak, self.now)

    def gone(self, _: int, nbytes: int) -> None:
        self.now -= align_up(nbytes, GRANULE)


def torch_memory(recipe: Recipe) -> int:
    """Bytes that torch reserves at the most in a step whose weights, and finished gradients, lie elsewhere.

    An estimate: which kernels a device takes, and how its allocator fragments, is not known here.
    """
    default = torch.get_default_dtype()
    try:
        with FakeTensorMode():
            torch.set_default_dtype(getattr(torch, recipe.dtype))
            model = build_model(recipe)
            torch.set_default_dtype(torch.float32)
            tokens = torch.zeros(recipe.micro_batch, recipe.seq, dtype=torch.int64)
            for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
                parameter.register_post_accumulate_grad_hook(_leave)
            count = _PeakBytes()
            with StorageLives(count.made, count.gone, known=model.parameters()):
                model(tokens, tokens).backward()
    finally:
        torch.set_default_dtype(default)
    return int(count.peak * FRAGMENTATION) + WORKSPACES


def _leave(parameter: torch.Tensor) -> None:
    parameter.grad = None
