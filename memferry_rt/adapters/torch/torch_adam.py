"""Adam and AdamW by PyTorch's own fused CPU kernel, cache-sized piece by piece.

What serves where there is no native kernel, and for the few elements at a parameter's end that PyTorch computes
outside of its vector loop.  A piece goes through one thread alone: its gradient is widened to fp32 and scaled in
a scratch buffer that stays in that core's cache, and the new weight is written from there.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from ...native import AdamSettings

CHUNK = 1 << 19  # elements: 2 MiB of fp32 scratch, a core's second-level cache; a multiple of any vector


@dataclass
class Batch:
    """Pieces of parameters that one kernel call updates: same group, and together no more than one chunk."""

    group: int
    parameters: list[int] = field(default_factory=list)
    masters: list[torch.Tensor] = field(default_factory=list)
    exp_avgs: list[torch.Tensor] = field(default_factory=list)
    exp_avg_sqs: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor | None] = field(default_factory=list)
    numel: int = 0

    def add(
        self,
        parameter: int,
        *,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        gradient: torch.Tensor,
        weight: torch.Tensor | None,
    ) -> None:
        """Add a piece: flat fp32 state, a gradient and perhaps a weight of the compute dtype."""
        self.parameters.append(parameter)
        self.masters.append(master)
        self.exp_avgs.append(exp_avg)
        self.exp_avg_sqs.append(exp_avg_sq)
        self.gradients.append(gradient)
        self.weights.append(weight)
        self.numel += master.numel()

    def only(self, present: set[int]) -> Batch:
        """The part whose parameters are in `present`."""
        if present.issuperset(self.parameters):
            return self
        part = Batch(self.group)
        for number, parameter in enumerate(self.parameters):
            if parameter in present:
                part.add(
                    parameter,
                    master=self.masters[number],
                    exp_avg=self.exp_avgs[number],
                    exp_avg_sq=self.exp_avg_sqs[number],
                    gradient=self.gradients[number],
                    weight=self.weights[number],
                )
        return part


@torch.no_grad()
def update_batch(batch: Batch, settings: AdamSettings, steps: list[torch.Tensor], scale: float) -> None:
    """Update a batch in place; `steps` has one fp32 scalar for each of its pieces."""
    kernel = torch._fused_adamw_ if settings.decoupled else torch._fused_adam_
    kernel(
        batch.masters,
        _widened(batch, scale),
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


def _widened(batch: Batch, scale: float) -> list[torch.Tensor]:
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
