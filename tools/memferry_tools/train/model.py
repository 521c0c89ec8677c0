"""A small Llama-like decoder in plain torch: RoPE, RMSNorm, SwiGLU, causal attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.utils.checkpoint import checkpoint

from .presets import ModelShape

ROPE_BASE = 10000.0
NORM_EPS = 1e-5
LOGITS_AT_ONCE = 1 << 25  # more tokens than fit are scored in pieces, and their logits computed twice

Rotation = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.kv_heads = shape.kv_heads or shape.heads
        self.qkv = nn.Linear(shape.hidden, shape.hidden + 2 * shape.kv_width, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        batch, seq, hidden = x.shape
        q, k, v = self._heads(self.qkv(x))
        mixed = F.scaled_dot_product_attention(_rotate(q, rotation), _rotate(k, rotation), v, is_causal=True)
        joined: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden))
        return joined

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, each of shape (batch, heads, seq, size)."""
        batch, seq, _ = qkv.shape
        if self.kv_heads == self.heads:
            return qkv.view(batch, seq, 3, self.heads, -1).transpose(1, 3).unbind(2)
        parts = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = qkv.view(batch, seq, sum(parts), -1).transpose(1, 2).split(parts, dim=1)
        times = self.heads // self.kv_heads
        return q, k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.ffn = FeedForward(shape)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        y: torch.Tensor = x + self.ffn(self.ffn_norm(x))
        return y


class Decoder(nn.Module):
    """A language model that computes its own loss.

    Parameters
    ----------
    shape : ModelShape
    checkpointing : bool
        Recompute every block's activations in backward.
    """

    def __init__(self, shape: ModelShape, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        self.tie()

    def tie(self) -> None:
        """Make the output's weight the embedding's, if the shape says so."""
        if self.shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy, an fp32 scalar.

        Parameters
        ----------
        tokens, targets : Tensor of int64, shape (batch, seq)
            What is read, and what follows each token.
        """
        x = self.embedding(tokens)
        rotation = _rotation(tokens.shape[1], self.shape.hidden // self.shape.heads, x)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, rotation, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rotation)
        return self._loss(x.flatten(0, 1), targets.flatten())

    def _loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = max(1, LOGITS_AT_ONCE // self.shape.vocabulary)
        if len(targets) <= rows:
            return self._score(x, targets) / len(targets)
        parts = [
            checkpoint(self._score, some, wanted, use_reentrant=False, preserve_rng_state=False)
            for some, wanted in zip(x.split(rows), targets.split(rows), strict=True)
        ]
        return torch.stack(parts).sum() / len(targets)

    def _score(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The sum of the cross entropies, in fp32."""
        return F.cross_entropy(self.head(self.norm(x)).float(), targets, reduction="sum")


def _rotation(seq: int, size: int, like: torch.Tensor) -> Rotation:
    """Cosines and sines of every position's angles, shape (seq, size)."""
    exponents = torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size
    positions = torch.arange(seq, device=like.device, dtype=torch.float32)
    angles = torch.outer(positions, ROPE_BASE**-exponents).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
