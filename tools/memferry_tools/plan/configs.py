"""Models from the ``config.json`` of a Hugging Face model, read as JSON alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memferry_rt.errors import PlanError
from memferry_rt.plan import Dimensions, Names
from memferry_rt.plan.shapes import TRAIN

from ..errors import ToolError

OURS = "MemFerryDecoder"  # among the architectures of a config that `llama_config` made
LLAMA = Names("model.embed_tokens", "model.layers", "model.norm", "lm_head")
GPT2 = Names("transformer.wte", "transformer.h", "transformer.ln_f", "lm_head", positions="transformer.wpe")
BERT = Names(
    "bert.embeddings.word_embeddings",
    "bert.encoder.layer",
    "(small)",
    "cls.predictions.decoder",
    positions="bert.embeddings.position_embeddings",
    dense="cls.predictions.transform.dense",
)


def read_config(path: Path) -> tuple[Dimensions, Names]:
    """The sizes and the layers' names of a model.

    Raises
    ------
    ToolError
        The file cannot be read, is no such file, or of a family that is not known.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ToolError(f"--config: {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ToolError(f"--config: {path} is not JSON: {error}") from None
    family = document.get("model_type") if isinstance(document, dict) else None
    if not isinstance(family, str) or family not in _FAMILIES:
        raise ToolError(
            f"--config: {path}: model_type {family!r} is not known; known are {', '.join(_FAMILIES)}; for another "
            "model give a --preset of its size"
        )
    try:
        return _FAMILIES[family](_Config(document, path))
    except PlanError as error:
        raise ToolError(f"--config: {path}: {error}") from None


def llama_config(size: Dimensions) -> dict[str, Any]:
    """The ``config.json`` of a decoder as ``memferry train`` makes it."""
    width = size.hidden // size.heads
    return {
        "architectures": [OURS],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.ffn,
        "num_attention_heads": size.heads,
        "num_key_value_heads": (size.kv_width or size.hidden) // width,
        "vocab_size": size.vocabulary,
        "tie_word_embeddings": size.tied,
    }


class _Config:
    """The file's object, whose numbers are checked when they are asked for."""

    def __init__(self, document: dict[str, Any], path: Path) -> None:
        self._document = document
        self._path = path

    def number(self, name: str, default: int | None = None) -> int:
        value = self._document.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ToolError(f"--config: {self._path}: {name}: {value!r} is not a number of 1 or more")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._document.get(name, default)
        if not isinstance(value, bool):
            raise ToolError(f"--config: {self._path}: {name}: {value!r} is neither true nor false")
        return value

    def has_architecture(self, name: str) -> bool:
        value = self._document.get("architectures")
        return isinstance(value, list) and name in value

    def require_even_heads(self, hidden: int, heads: int) -> None:
        """Refuse a model that its heads do not divide."""
        if hidden % heads:
            raise ToolError(
                f"--config: {self._path}: num_attention_heads: "
                f"{heads} heads do not divide a hidden_size of {hidden}"
            )

    def refuse(self, name: str, unless: object) -> None:
        """Refuse a setting that makes other shapes than those that are known."""
        value = self._document.get(name, unless)
        if value not in (unless, None):
            raise ToolError(
                f"--config: {self._path}: {name}: {value!r} makes a model of unknown shape; {unless!r} would work"
            )


def _llama(config: _Config) -> tuple[Dimensions, Names]:
    for name in ("attention_bias", "mlp_bias"):
        config.refuse(name, unless=False)
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    config.require_even_heads(hidden, heads)
    width = config.number("head_dim", hidden // heads)
    if width * heads != hidden:
        config.refuse("head_dim", unless=hidden // heads)
    ours = config.has_architecture(OURS)
    return (
        Dimensions(
            hidden,
            config.number("num_hidden_layers"),
            config.number("intermediate_size"),
            heads,
            config.number("vocab_size"),
            kv_width=width * config.number("num_key_value_heads", heads),
            fused=ours,
            tied=config.flag("tie_word_embeddings", default=False),
        ),
        TRAIN if ours else LLAMA,
    )


def _gpt2(config: _Config) -> tuple[Dimensions, Names]:
    config.refuse("add_cross_attention", unless=False)
    hidden = config.number("n_embd", 768)
    return (
        Dimensions(
            hidden,
            config.number("n_layer", 12),
            config.number("n_inner", 4 * hidden),
            config.number("n_head", 12),
            config.number("vocab_size", 50257),
            positions=config.number("n_positions", 1024),
            gated=False,
            fused=True,
            biases=True,
            tied=config.flag("tie_word_embeddings", default=True),
        ),
        GPT2,
    )


def _bert(config: _Config) -> tuple[Dimensions, Names]:
    config.refuse("add_cross_attention", unless=False)
    config.refuse("is_decoder", unless=False)
    return (
        Dimensions(
            config.number("hidden_size", 768),
            config.number("num_hidden_layers", 12),
            config.number("intermediate_size", 3072),
            config.number("num_attention_heads", 12),
            config.number("vocab_size", 30522),
            positions=config.number("max_position_embeddings", 512),
            types=config.number("type_vocab_size", 2),
            gated=False,
            biases=True,
            tied=config.flag("tie_word_embeddings", default=True),
            causal=False,
        ),
        BERT,
    )


_FAMILIES: dict[str, Callable[[_Config], tuple[Dimensions, Names]]] = {
    "llama": _llama,
    "mistral": _llama,
    "gpt2": _gpt2,
    "bert": _bert,
}
