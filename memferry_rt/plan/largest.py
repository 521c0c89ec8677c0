"""The largest model that trains in two memories."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import BudgetError, PlanError
from .choice import Choice, host_nbytes
from .machine import H200, Machine
from .options import PlanOptions
from .planner import Planned, make_plan
from .shapes import TRAIN, Batch, Dimensions, Names, transformer

MOST_LAYERS = 400
HEAD_WIDTH = 128
WIDTHS = (64, 128, 256, 384, 512, 768, *range(1024, 16384 + 1, 256))  # hidden sizes that are tried


@dataclass(frozen=True)
class Largest:
    """A model, and the plan that trains it."""

    size: Dimensions
    planned: Planned

    @property
    def parameters(self) -> int:
        return self.planned.setting.workload.parameters


def largest_model(
    options: PlanOptions,
    batch: Batch,
    machine: Machine = H200,
    *,
    vocabulary: int = 32000,
    fused: bool = True,
    names: Names = TRAIN,
) -> Largest:
    """The largest decoder of Llama's proportions for which a plan fits in both memories.

    Of each width so many blocks are taken as host memory holds, if that is near the depth that Llama has at that
    width; of those that fit, the one with most parameters.

    Parameters
    ----------
    options : PlanOptions
        Both budgets must be given.
    batch : Batch
    machine : Machine
    vocabulary : int
    fused : bool
        Whether one matrix makes queries, keys and values.
    names : Names

    Raises
    ------
    BudgetError
        Not even the smallest fits.
    PlanError
        A budget is missing.
    """
    if options.host_memory is None:
        raise PlanError("host_memory: the largest model depends on it; give it")
    sizes = []
    for hidden in WIDTHS:
        size = _deepest(_llama(hidden, 1, vocabulary, fused), batch, options.host_memory)
        if size is not None:
            sizes.append(size)
    quick = replace(options, evaluations=min(options.evaluations, 12))
    refusal: BudgetError | None = None
    for size in sorted(sizes, key=lambda each: -each.parameters):
        workload = transformer(_name(size), size, batch, names)
        try:
            make_plan(workload, quick, machine)
        except BudgetError as error:
            refusal = error
            continue
        return Largest(size, make_plan(workload, options, machine))
    if refusal is not None:
        raise refusal
    smallest = transformer("llama", _llama(WIDTHS[0], 1, vocabulary, fused), batch, names)
    needed = host_nbytes(smallest, Choice((), 0))
    raise BudgetError("host_memory", options.host_memory, needed, "the smallest model of this kind takes more")


def _name(size: Dimensions) -> str:
    parameters = size.parameters
    return f"llama-{parameters / 1e9:.2f}b" if parameters >= 5e7 else f"llama-{parameters / 1e6:.2f}m"


def _llama(hidden: int, layers: int, vocabulary: int, fused: bool) -> Dimensions:
    """A block of Llama's proportions: heads of 128, and an FFN of 8/3 of the width in multiples of 256."""
    ffn = -(-hidden * 8 // 3 // 256) * 256
    return Dimensions(hidden, layers, ffn, max(1, hidden // HEAD_WIDTH), vocabulary, fused=fused)


def _deepest(size: Dimensions, batch: Batch, host_memory: int) -> Dimensions | None:
    """With as many blocks as host memory holds; None if that is too few or too many for such a width."""
    one = host_nbytes(transformer("", size, batch), Choice((), 0))
    two = host_nbytes(transformer("", replace(size, layers=2), batch), Choice((), 0))
    layers = 1 + (host_memory - one) // (two - one)
    usual = size.hidden / 128  # 32 blocks at 4096, 40 at 5120, 80 at 8192 are 128, 128 and 102
    if not usual / 2 <= layers <= min(2 * usual, MOST_LAYERS):
        return None
    return replace(size, layers=layers)
