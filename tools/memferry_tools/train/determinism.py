"""Kernels that give the same bits every time, so that two runs can be compared by them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Have torch use deterministic algorithms only, backward of attention included; undone afterwards.

    Must be entered before the process first uses CUDA.
    """
    settings: Any = torch.utils.deterministic
    was, filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    chosen = os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # it is for finding bugs, and costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
        settings.fill_uninitialized_memory = filled
        if chosen is None:
            del os.environ[_WORKSPACE]
