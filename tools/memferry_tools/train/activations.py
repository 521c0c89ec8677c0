"""How much memory torch needs for a step beside the weights, found by running one on tensors without data."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .model import Decoder
from .recipe import Recipe

GRANULE = 512  # torch's allocator rounds up to this
FRAGMENTATION = 1.15  # reserved over counted, at their peaks; llama-1b, 8 x 1024, checkpointing, on an H200
WORKSPACES = 64 << 20  # cuBLAS takes 32 MiB on Hopper in each of the two threads that launch


class _PeakBytes(TorchDispatchMode):
    """Counts the bytes of storages that live at the same time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return out

    def leave_out(self, storage: torch.UntypedStorage) -> None:
        """Do not count this storage when a view of it is seen."""
        self._known.add(storage)

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            nbytes = -(-storage.nbytes() // GRANULE) * GRANULE
            self._known.add(storage)
            self.now += nbytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, nbytes)

    def _drop(self, nbytes: int) -> None:
        self.now -= nbytes


def torch_memory(recipe: Recipe) -> int:
    """Bytes that torch reserves at the most in a step whose weights, and finished gradients, lie elsewhere.

    An estimate: which kernels a device takes, and how its allocator fragments, is not known here.
    """
    default = torch.get_default_dtype()
    try:
        with FakeTensorMode():
            torch.set_default_dtype(getattr(torch, recipe.dtype))
            model = Decoder(recipe.shape, checkpointing=recipe.checkpointing)
            torch.set_default_dtype(torch.float32)
            tokens = torch.zeros(recipe.micro_batch, recipe.seq, dtype=torch.int64)
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(_leave)
            count = _PeakBytes()
            for parameter in model.parameters():
                count.leave_out(parameter.untyped_storage())
            with count:
                model(tokens, tokens).backward()
    finally:
        torch.set_default_dtype(default)
    return int(count.peak * FRAGMENTATION) + WORKSPACES


def _leave(parameter: torch.Tensor) -> None:
    parameter.grad = None
