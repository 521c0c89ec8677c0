"""What is trained and how: everything that decides the result, whoever does the training."""

from __future__ import annotations

from dataclasses import dataclass

from .presets import ModelShape


@dataclass(frozen=True)
class Recipe:
    """A training run, without where it runs.

    Attributes
    ----------
    shape : ModelShape
    checkpointing : bool
        Whether blocks recompute their activations in backward.
    dtype : str
        Dtype of weights and gradients in forward and backward, as torch names it.  Master weights and moments
        are fp32.
    micro_batch, seq, accumulate, steps : int
        Sequences in a micro-batch, tokens in a sequence, micro-batches in a step, steps.
    lr, weight_decay : float
        Settings of AdamW.
    max_grad_norm : float or None
        Norm to which gradients are clipped.
    seed : int
        Decides the first weights and the batches.
    accumulate_dtype : str or None
        In what micro-batches' gradients are summed; None for `dtype`.
    ranks : int
        Processes that train together, each on `accumulate` micro-batches of every step.
    adapters : int or None
        The rank of the adapters that alone train; None where all parameters do.
    """

    shape: ModelShape
    checkpointing: bool
    dtype: str
    micro_batch: int
    seq: int
    accumulate: int
    steps: int
    lr: float
    weight_decay: float
    max_grad_norm: float | None
    seed: int
    accumulate_dtype: str | None = None
    ranks: int = 1
    adapters: int | None = None

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch * self.seq * self.accumulate * self.ranks

    @property
    def parameters(self) -> int:
        """How many parameters the model has, adapters among them."""
        return self.shape.parameters + (0 if self.adapters is None else self.trained_parameters)

    @property
    def trained_parameters(self) -> int:
        """How many of them are trained."""
        return self.shape.parameters if self.adapters is None else self.shape.adapter_parameters(self.adapters)

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the weights in the compute dtype."""
        return self.parameters * (4 if self.dtype == "float32" else 2)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the gradients as they are summed."""
        return self.trained_parameters * (4 if "float32" in (self.dtype, self.accumulate_dtype) else 2)
