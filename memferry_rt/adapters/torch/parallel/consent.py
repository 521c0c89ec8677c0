"""What ranks agree on during training."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ....errors import RankError
from ....parallel import Gather
from ..optimizer import AmpScaling


def agree_on_step(gather: Gather, scaling: AmpScaling | None, settings: Sequence[Any]) -> AmpScaling | None:
    """What the scalers of all ranks say together: finite where it is for all.

    Raises
    ------
    RankError
        They scale differently, or their optimizers have other settings.
    """
    inverse = 0.0 if scaling is None or scaling.inverse is None else scaling.inverse
    finite = scaling is None or scaling.finite
    own = [scaling is not None, finite, int(np.float64(inverse).view(np.int64)), digest(repr(settings))]
    found = [message.tolist() for message in gather(own, "their step")]
    for rank, other in enumerate(found):
        if (other[0], other[2]) != (found[0][0], found[0][2]):
            raise RankError(f"ranks differ in their GradScaler: rank {rank} has another scale than rank 0")
        if other[3] != found[0][3]:
            raise RankError(
                f"ranks differ in the optimizer's settings: rank {rank} has others than rank 0, perhaps a "
                "learning rate; schedule them alike on all ranks"
            )
    return None if scaling is None else replace(scaling, finite=all(other[1] for other in found))


@contextlib.contextmanager
def refused_by_all(gather: Gather, what: str) -> Iterator[None]:
    """What one rank refuses in here, all refuse, before anything is changed.

    Raises
    ------
    RankError
        Another rank has refused.
    """
    refusal: Exception | None = None
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        refusal = error
    found = gather([refusal is not None], f"{what}, which is checked")
    if refusal is not None:
        raise refusal
    for rank, other in enumerate(found):
        if other[0]:
            raise RankError(f"rank {rank} has refused {what}, and so do all; it says why, and nothing was changed")


def digest(text: str) -> int:
    """63 bits that differ where texts do."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
