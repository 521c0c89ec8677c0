"""Text as numbers: bytes, or what a given tokenizer makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ToolError
from ..optional import require
from .text import Text


@dataclass(frozen=True)
class Tokens:
    """A text's tokens.

    Attributes
    ----------
    ids : array of uint8 or int32, shape (tokens,)
    vocabulary : int
        Every id is less.
    source : str
        For people: which text, and how it was cut.
    """

    ids: npt.NDArray[Any]
    vocabulary: int
    source: str


def tokenise(text: Text, tokenizer: Path | None = None) -> Tokens:
    """A text's tokens.

    Parameters
    ----------
    text : Text
    tokenizer : Path, optional
        A Hugging Face tokenizer: a ``tokenizer.json``, or a folder with one or with an older form of it.
        Nothing is ever downloaded.  By default every byte is a token.

    Raises
    ------
    ToolError
        There is no such tokenizer, it is not one, or what reads it is not installed.
    """
    if tokenizer is None:
        return Tokens(np.frombuffer(text.content, np.uint8), 256, f"{text.source}, as bytes")
    readable = text.content.decode("utf-8", errors="replace")
    if not tokenizer.exists():
        raise ToolError(f"--tokenizer: there is no file or folder {tokenizer}")
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    encode = _encode_fast if file.is_file() else _encode_old
    try:
        ids, vocabulary = encode(file if file.is_file() else tokenizer, readable)
    except ToolError:
        raise
    except Exception as error:  # the libraries raise whatever their parsers do
        raise ToolError(f"--tokenizer: {tokenizer} cannot be used: {error}") from error
    return Tokens(np.asarray(ids, np.int32), vocabulary, f"{text.source}, by {tokenizer}")


def _encode_fast(file: Path, text: str) -> tuple[list[int], int]:
    library = require("tokenizers", what="--tokenizer", install="tokenizers")
    tokenizer = library.Tokenizer.from_file(str(file))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return ids, max([tokenizer.get_vocab_size() - 1, *ids]) + 1


def _encode_old(folder: Path, text: str) -> tuple[list[int], int]:
    library = require("transformers", what=f"--tokenizer {folder}", install="transformers")
    tokenizer = library.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids, max([len(tokenizer) - 1, *ids]) + 1
