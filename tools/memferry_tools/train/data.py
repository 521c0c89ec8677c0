"""Batches of a text: which tokens a step sees."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import ToolError
from .recipe import Recipe
from .tokens import Tokens


class Batches:
    """Windows of a text at places that seed, step and micro-batch alone decide.

    Parameters
    ----------
    tokens : Tokens
    recipe : Recipe
    rank : int
        Of the ``recipe.ranks`` processes, between which a step's micro-batches go round.

    Raises
    ------
    ToolError
        The text is shorter than one sequence and the token after it.
    """

    def __init__(self, tokens: Tokens, recipe: Recipe, rank: int = 0) -> None:
        if len(tokens.ids) < recipe.seq + 1:
            raise ToolError(
                f"--seq: {recipe.seq} tokens and the one after them are asked for, and the data has "
                f"{len(tokens.ids)}; "
                + (f"write --seq {len(tokens.ids) - 1} or less" if len(tokens.ids) > 1 else "name more text")
            )
        self._ids = tokens.ids
        self._recipe = recipe
        self._rank = rank

    def micro_batch(self, step: int, micro_step: int) -> npt.NDArray[np.int64]:
        """Token ids, shape (micro_batch, seq + 1): inputs, and shifted by one what is to be predicted."""
        recipe = self._recipe
        number = micro_step * recipe.ranks + self._rank
        random = np.random.default_rng([recipe.seed, step, number])
        starts = random.integers(0, len(self._ids) - recipe.seq, size=(recipe.micro_batch, 1))
        windows: npt.NDArray[np.int64] = self._ids[starts + np.arange(recipe.seq + 1)].astype(np.int64)
        return windows
