"""Small models with the habits of large ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LAYERS, SEQUENCE = 61, 32, 6, 12


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Decoder(nn.Module):
    """Embedding, blocks and head; `run` says how the blocks are run."""

    def __init__(
        self,
        run: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor] | None = None,
        *,
        tied: bool = False,
        dropout: float = 0.0,
        layers: int = LAYERS,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(SEQUENCE, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.run = run or plainly

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position
        return self.head(self.norm(self.run(self.blocks, x)))


def plainly(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def checkpointed(reentrant: bool) -> Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]:
    def run(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    return run


def checkpointed_in_groups(reentrant: bool) -> Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]:
    """One checkpoint over several blocks."""

    def run(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        half = len(blocks) // 2
        for part in (blocks[:half], blocks[half:]):
            x = checkpoint(plainly, part, x, use_reentrant=reentrant)
        return x

    return run


def skipping(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Layers skipped at random, as stochastic depth does."""
    for block in blocks:
        if torch.rand(()) > 0.4:
            x = block(x)
    return x


def twice(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Every block used twice."""
    for block in (*blocks, *blocks):
        x = block(x)
    return x


def shuffled(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for index in torch.randperm(len(blocks)).tolist():
        x = blocks[index](x)
    return x


def tokens(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randint(0, VOCABULARY, (3, SEQUENCE + 1), generator=generator)


def next_token_loss(model: nn.Module, number: int) -> torch.Tensor:
    batch = tokens(number)
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
