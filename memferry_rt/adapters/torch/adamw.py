"""AdamW and Adam on the CPU, over a layer's slabs: PyTorch's own fused kernel, cache-sized piece by piece.

Every parameter is cut where PyTorch's vector loop would not notice, so the bits are those of
``torch.optim.AdamW(fused=True)`` on whole fp32 tensors.  A piece goes through one thread alone: its gradient
is widened to fp32 and scaled by the clipping factor in a scratch buffer that stays in that core's cache, and
the new weight is written from there, so main memory sees every byte of state once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from .layer import LayerState

CHUNK = 1 << 19  # elements: 2 MiB of fp32 scratch, a core's second-level cache; a multiple of any vector


@dataclass(frozen=True)
class AdamSettings:
    """One parameter group's settings, captured when the step is made."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool


@dataclass
class _Batch:
    """Pieces that one kernel call updates: same group, and together no more than one chunk."""

    group: int
    parameters: list[int] = field(default_factory=list)
    masters: list[torch.Tensor] = field(default_factory=list)
    exp_avgs: list[torch.Tensor] = field(default_factory=list)
    exp_avg_sqs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor | None] = field(default_factory=list)
    numel: int = 0


class LayerUpdate:
    """The update of one layer.

    Parameters
    ----------
    layer : LayerState
    groups : mapping of index to int
        The parameter group of each parameter that the optimizer updates, by index in the layer.
    """

    def __init__(self, layer: LayerState, groups: dict[int, int]) -> None:
        self.layer = layer
        self._batches: list[_Batch] = []
        for index in sorted(groups, key=lambda index: (groups[index], index)):
            self._add(index, groups[index])

    def pieces(
        self,
        present: set[int],
        settings: Sequence[AdamSettings],
        steps: dict[int, torch.Tensor],
        scale: float,
    ) -> list[Callable[[], None]]:
        """The update of the parameters in `present`, in place, as calls that touch disjoint memory.

        Parameters
        ----------
        present : set of int
            Indices of the parameters that have a gradient.
        settings : sequence of AdamSettings
            By group.
        steps : mapping of index to Tensor
            fp32 scalars: the number of this step, for each parameter.
        scale : float
            Multiplied into every gradient.
        """
        pieces: list[Callable[[], None]] = []
        for batch in self._batches:
            if not present.issuperset(batch.parameters):
                batch = _only(batch, present)
            if batch.parameters:
                numbers = [steps[index] for index in batch.parameters]
                pieces.append(functools.partial(_update, batch, settings[batch.group], numbers, scale))
        return pieces

    def _add(self, index: int, group: int) -> None:
        layer = self.layer
        slot = layer.layout.slots[index]
        master = layer.cpu_state(index, "master")
        exp_avg, exp_avg_sq = layer.cpu_state(index, "exp_avg"), layer.cpu_state(index, "exp_avg_sq")
        gradient, weight = layer.cpu_gradient(index), layer.cpu_weight(index)
        for start in range(0, slot.spec.numel, CHUNK):
            end = min(start + CHUNK, slot.spec.numel)
            batch = self._batch(group, end - start)
            batch.numel += end - start
            batch.parameters.append(index)
            batch.masters.append(master[start:end])
            batch.exp_avgs.append(exp_avg[start:end])
            batch.exp_avg_sqs.append(exp_avg_sq[start:end])
            batch.gradients.append(gradient[start:end])
            batch.weights.append(weight[start:end] if slot.spec.master else None)

    def _batch(self, group: int, numel: int) -> _Batch:
        if self._batches:
            last = self._batches[-1]
            if last.group == group and last.numel + numel <= CHUNK:
                return last
        self._batches.append(_Batch(group))
        return self._batches[-1]


def _only(batch: _Batch, present: set[int]) -> _Batch:
    """The part of a batch whose parameters have a gradient."""
    keep = [position for position, index in enumerate(batch.parameters) if index in present]

    def pick(items: list[torch.Tensor]) -> list[torch.Tensor]:
        return [items[position] for position in keep]

    return _Batch(
        batch.group,
        [batch.parameters[position] for position in keep],
        pick(batch.masters),
        pick(batch.exp_avgs),
        pick(batch.exp_avg_sqs),
        pick(batch.gradients),
        [batch.weights[position] for position in keep],
        batch.numel,
    )


@torch.no_grad()
def _update(batch: _Batch, settings: AdamSettings, steps: list[torch.Tensor], scale: float) -> None:
    gradients = _widened(batch, scale)
    kernel = torch._fused_adamw_ if settings.decoupled else torch._fused_adam_
    kernel(
        batch.masters,
        gradients,
        batch.exp_avgs,
        batch.exp_avg_sqs,
        [],
        steps,
        lr=settings.lr,
        beta1=settings.beta1,
        beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=settings.maximize,
        grad_scale=None,
        found_inf=None,
    )
    for weight, master in zip(batch.weights, batch.masters, strict=True):
        if weight is not None:
            weight.copy_(master)


def _widened(batch: _Batch, scale: float) -> list[torch.Tensor]:
    """The gradients in fp32, scaled; the originals stay as they are."""
    scratch: torch.Tensor | None = getattr(_thread, "scratch", None)
    if scratch is None:
        scratch = _thread.scratch = torch.empty(CHUNK, dtype=torch.float32, device="cpu")
    widened, offset = [], 0
    for gradient in batch.gradients:
        part = scratch[offset : offset + gradient.numel()].copy_(gradient)
        widened.append(part if scale == 1.0 else part.mul_(scale))
        offset += gradient.numel()
    return widened


_thread = threading.local()


def single_threaded() -> None:
    """Make torch compute in the calling thread alone: pieces run side by side, not inside each other.

    torch keeps the number per thread, but sets the one for future threads with it; whoever prepares a thread
    so sets its own number again afterwards.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()  # takes the number over for this thread for good
