"""What is measured, by size: of a real device, and small ones that only try the benchmark out."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """Shapes of a large model's layers.

    Attributes
    ----------
    table : tuple of int
        Rows and width of an embedding, 1 GB in bf16.
    lookups : tuple of int
        Tokens that look rows up.
    linear : tuple of int
        Output and input features.
    few, many : tuple of int
        Tokens: up to where one kernel writes a gradient home, and where compute takes as long as the transfer.
    panels : tuple of int
        Bytes of a panel.
    chain : int
        Linear layers one after the other, as a model has them.
    """

    table: tuple[int, int] = (128256, 4096)
    lookups: tuple[int, ...] = (1024, 8192, 32768)
    linear: tuple[int, int] = (11008, 4096)
    few: tuple[int, ...] = (128, 256, 512, 1024)
    many: tuple[int, ...] = (4096, 8192, 16384)
    panels: tuple[int, ...] = (8 << 20, 16 << 20)
    chain: int = 4
    beside: int = 8192
    writing: int = 1 << 30
    link: int = 1 << 30
    state: int = 1 << 26  # parameters
    samples: int = 10
    dtype: torch.dtype = torch.bfloat16


SMALL = Sizes(
    table=(512, 64),
    lookups=(16, 64),
    linear=(48, 32),
    few=(4, 8),
    many=(16, 32),
    panels=(4 << 10,),
    chain=1,
    beside=16,
    writing=1 << 18,
    link=1 << 16,
    state=1 << 12,
    samples=2,
    dtype=torch.float32,
)
