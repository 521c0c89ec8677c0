"""What ranks tell each other where a backward begins and ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import RankError

Gather = Callable[[Sequence[int] | npt.NDArray[np.int64], str], list[npt.NDArray[np.int64]]]  # as `Board.gather`

_BACKWARD, _STEP = 0, 1


@dataclass(frozen=True)
class Outcome:
    """What a backward has given all ranks together.

    Attributes
    ----------
    late : list of bool
        Of layers, in their order: some rank has more to send of it.
    arrived : list of bool
        Of parameters: some rank has a gradient.
    norms : list of float
        Of parameters: the 2-norm of the mean, of the fp64 norms of its parts, in the order of the ranks.
    """

    late: list[bool]
    arrived: list[bool]
    norms: list[float]


class Meetings:
    """Holds a rank's meetings with the others.

    Parameters
    ----------
    gather : callable
        Every rank's message, by rank, as `Board.gather` gives those of one host.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather

    def begin(self, kept: int, order: Sequence[int], *, step: bool) -> list[int] | None:
        """Meet at a backward or a step.

        Parameters
        ----------
        kept : int
            A digest of the parameters that have kept a gradient.
        order : sequence of int
            All layers with gradients, as this rank expects its backward to complete them.
        step : bool
            This rank is in a step, and makes none.

        Returns
        -------
        list of int or None
            The `order` of the lowest rank that is in a backward; None where all are in a step.

        Raises
        ------
        RankError
            They have kept different gradients.
        """
        own = [_STEP if step else _BACKWARD, kept, *order]
        found = self._gather(own, "their next backward or step")
        for rank, message in enumerate(found):
            if message[1] != found[0][1]:
                raise RankError(
                    f"ranks differ in which parameters have a gradient before a backward or a step: rank {rank} "
                    "has others than rank 0; call zero_grad() alike on all ranks"
                )
        backwards = [message for message in found if message[0] == _BACKWARD]
        return backwards[0][2:].tolist() if backwards else None

    def end(self, late: Sequence[bool], arrived: Sequence[bool], norms: Sequence[float]) -> Outcome:
        """Meet at the end of a backward; as in `Outcome`, of this rank alone."""
        bits = np.array(norms, np.float64).view(np.int64)
        own = np.concatenate([np.array(late, np.int64), np.array(arrived, np.int64), bits])
        found = np.stack(self._gather(own, "the end of a backward"))
        layers, slots = len(late), len(arrived)
        parts = np.ascontiguousarray(found[:, layers + slots :]).view(np.float64)
        return Outcome(
            found[:, :layers].max(axis=0).astype(bool).tolist(),
            found[:, layers : layers + slots].max(axis=0).astype(bool).tolist(),
            [math.sqrt(sum(value * value for value in values)) for values in parts.T.tolist()],
        )
