"""Where the text comes from, how it is cut into tokens, and which of them a step sees."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memferry_tools.errors import ToolError
from memferry_tools.train.data import Batches
from memferry_tools.train.recipe import Recipe
from memferry_tools.train.text import Text, read_text
from memferry_tools.train.tokens import Tokens, tokenise


def test_a_folder_is_read_in_the_order_of_names_and_without_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.txt").write_bytes(b"third ")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "y.txt").write_bytes(b"second ")
    (tmp_path / "z.txt").write_bytes(b"first ")
    (tmp_path / "picture").write_bytes(b"\x89\0\0")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert read_text(tmp_path).content == b"first second third "


def test_a_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"\0")
    with pytest.raises(ToolError, match="no text in the 1 files"):
        read_text(tmp_path)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "picture").write_bytes(b"abc\0")
    with pytest.raises(ToolError, match="byte 0 at 3"):
        read_text(tmp_path / "picture")


def test_neither_file_nor_folder() -> None:
    with pytest.raises(ToolError, match="neither a file nor a folder"):
        read_text(Path("/dev/zero"))


def test_the_default_text_is_the_same_every_time_and_has_python_in_it() -> None:
    first = read_text(None)
    assert first == read_text(None)
    assert b"class OrderedDict" in first.content
    assert b"\0" not in first.content[:1000]


def test_a_python_without_its_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(ToolError, match="name a text file or folder"):
        read_text(None)


def test_every_byte_is_a_token_even_where_it_is_no_utf8() -> None:
    content = bytes(range(1, 256))
    tokens = tokenise(Text(content, "bytes"))
    assert tokens.ids.tobytes() == content
    assert tokens.vocabulary == 256


def _word_tokenizer(path: Path) -> Path:
    library = pytest.importorskip("tokenizers")
    tokenizer = library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1, "?": 300}, unk_token="?"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_given_tokenizer(tmp_path: Path, as_folder: bool) -> None:
    file = _word_tokenizer(tmp_path / "tokenizer.json")
    tokens = tokenise(Text(b"b a b \xff", "words"), tmp_path if as_folder else file)
    assert tokens.ids.tolist() == [1, 0, 1, 300]
    assert tokens.vocabulary == 301


def test_a_tokenizer_whose_library_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _word_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ToolError, match="pip install tokenizers"):
        tokenise(Text(b"a", "words"), file)


def test_batches_depend_on_seed_step_and_micro_step_alone(recipe: Recipe) -> None:
    tokens = Tokens(np.arange(1000, dtype=np.int32), 1000, "numbers")
    batches = Batches(tokens, recipe)
    batch = batches.micro_batch(3, 1)
    np.testing.assert_array_equal(batch, Batches(tokens, recipe).micro_batch(3, 1))
    for other in (
        batches.micro_batch(4, 1),
        batches.micro_batch(3, 0),
        Batches(tokens, replace(recipe, seed=1)).micro_batch(3, 1),
    ):
        assert not np.array_equal(batch, other)


def test_a_batch_has_consecutive_tokens(recipe: Recipe) -> None:
    batch = Batches(Tokens(np.arange(1000, dtype=np.int32), 1000, "numbers"), recipe).micro_batch(0, 0)
    assert batch.shape == (recipe.micro_batch, recipe.seq + 1)
    assert batch.dtype == np.int64
    assert (np.diff(batch, axis=1) == 1).all()


def test_the_shortest_text_has_one_window(recipe: Recipe) -> None:
    tokens = Tokens(np.arange(recipe.seq + 1, dtype=np.uint8), 256, "numbers")
    batch = Batches(tokens, recipe).micro_batch(0, 0)
    assert (batch == np.arange(recipe.seq + 1)).all()
    with pytest.raises(ToolError, match="--seq"):
        Batches(replace(tokens, ids=tokens.ids[:-1]), recipe)
