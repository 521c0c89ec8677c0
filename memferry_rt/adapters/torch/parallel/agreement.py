"""What ranks tell each other before training, and what they refuse together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....errors import RankError
from ....parallel import host_key


@dataclass(frozen=True)
class Told:
    """What one rank says.

    Attributes
    ----------
    facts : mapping of str to str
        What must be alike, by names that a user understands.
    refusal : str or None
        Why it cannot go on.
    host : str
    processors : set of int
        That it may run on.
    """

    facts: Mapping[str, str]
    refusal: str | None
    host: str
    processors: set[int]

    @classmethod
    def own(cls, facts: Mapping[str, str], refusal: Exception | None) -> Told:
        text = None if refusal is None else f"{type(refusal).__name__}: {refusal}"
        return cls(dict(facts), text, host_key(), os.sched_getaffinity(0))


def require_agreement(found: Sequence[Told]) -> None:
    """Refuse what one rank refuses, or has otherwise than the first.

    Raises
    ------
    RankError
        With one message on all ranks.
    """
    for rank, told in enumerate(found):
        if told.refusal is not None:
            raise RankError(f"rank {rank} refuses, and so do all: {told.refusal}")
    facts = found[0].facts
    for rank, theirs in enumerate(found):
        for name in [*facts, *theirs.facts]:
            mine, other = facts.get(name), theirs.facts.get(name)
            if mine != other:
                raise RankError(
                    f"ranks differ in {name}: rank 0 has {mine or 'none'}, rank {rank} has {other or 'none'}; "
                    "give every rank the same model, optimizer and options"
                )


def cores_of(rank: int, found: Sequence[Told]) -> int:
    """Processors that a rank has for itself, of those that several of its host may run on."""
    own = found[rank]
    sharing = sum(bool(own.processors & other.processors) for other in found if other.host == own.host)
    return max(1, len(own.processors) // sharing)
