"""Models that are known by name."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ToolError


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama-like decoder.

    Attributes
    ----------
    hidden, layers, ffn, heads, vocabulary : int
        Width, blocks, width inside the feed-forward part, attention heads, tokens.
    tied : bool
        Whether the output's weight is the embedding's.
    kv_heads : int, optional
        Heads of keys and of values, each for as many heads of queries; by default `heads`.
    """

    hidden: int
    layers: int
    ffn: int
    heads: int
    vocabulary: int
    tied: bool = False
    kv_heads: int | None = None

    @property
    def kv_width(self) -> int:
        """Width of all keys together."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        block = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        tables = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return self.layers * block + tables + self.hidden

    def adapter_parameters(self, rank: int) -> int:
        """How many parameters adapters of a rank have on the attention projections of all blocks."""
        ends = (self.hidden + self.hidden + 2 * self.kv_width) + (self.hidden + self.hidden)  # of qkv, and of out
        return self.layers * rank * ends


@dataclass(frozen=True)
class Preset:
    """A model and the settings that suit it where the user names none.

    Attributes
    ----------
    shape : ModelShape
        Its vocabulary grows where a tokenizer has more tokens.
    micro_batch, seq : int
        Sequences in a micro-batch, and tokens in a sequence.
    lr : float
        Learning rate.
    checkpointing : bool
        Whether blocks recompute their activations in backward.
    """

    shape: ModelShape
    micro_batch: int
    seq: int
    lr: float
    checkpointing: bool


PRESETS = {
    "tiny": Preset(ModelShape(384, 10, 1024, 6, 256), micro_batch=4, seq=256, lr=1e-3, checkpointing=False),
    # a decoder like the others, of the width, depth and vocabulary of BERT base; its feed-forward part has a gate
    "bert-base-size": Preset(ModelShape(768, 12, 3072, 12, 30522), 1, 384, 1e-4, checkpointing=False),
    "llama-1b": Preset(ModelShape(2048, 22, 5632, 16, 32000), 8, 1024, 1e-4, checkpointing=True),
    # llama-1b with a large vocabulary: its two tables are half of its 2.2 B parameters
    "large-vocabulary": Preset(ModelShape(2048, 22, 5632, 16, 256000), 1, 1024, 1e-4, checkpointing=True),
    "llama-3b": Preset(ModelShape(3200, 26, 8640, 25, 32000), 8, 1024, 1e-4, checkpointing=True),
    "llama-7b": Preset(ModelShape(4096, 32, 11008, 32, 32000), 8, 1024, 1e-4, checkpointing=True),
    "llama-13b": Preset(ModelShape(5120, 40, 13824, 40, 32000), 8, 1024, 1e-4, checkpointing=True),
}


def find_preset(name: str) -> Preset:
    """The preset called `name`.

    Raises
    ------
    ToolError
        There is none of that name.
    """
    if name not in PRESETS:
        raise ToolError(f"--preset: there is no {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]
