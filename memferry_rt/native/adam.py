"""The native Adam kernel, called with addresses; it takes no interpreter lock and starts no threads."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
VARIANTS = ("generic", "avx2", "avx512")


@dataclass(frozen=True)
class AdamSettings:
    """Settings of Adam or AdamW, captured when a step is made."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool


class AdamKernel:
    """One variant of the kernel.

    Parameters
    ----------
    module : cffi module
    variant : str
        ``"generic"``, ``"avx2"`` or ``"avx512"``; the processor must have it.
    """

    def __init__(self, module: Any, variant: str) -> None:
        self._module = module
        self.variant = variant
        self._number = VARIANTS.index(variant)

    def prepare(self, settings: AdamSettings, step: float, scale: float) -> Any:
        """What a step's calls share: coefficients in fp32, computed in double and then rounded.

        Parameters
        ----------
        step : float
            The number of the step, from 1.
        scale : float
            Multiplied into every gradient.
        """
        mean_weight = np.float32(1.0 - settings.beta1)
        from_gradient = not mean_weight < np.float32(0.5)
        return self._module.ffi.new(
            "memferry_adam *",
            {
                "keep": 1.0 - settings.lr * settings.weight_decay if settings.decoupled else 1.0,
                "l2_decay": 0.0 if settings.decoupled else settings.weight_decay,
                "mean_weight": float(mean_weight - np.float32(1.0) if from_gradient else mean_weight),
                "lerp_from_gradient": from_gradient,
                "square_weight": 1.0 - settings.beta2,
                "square_keep": settings.beta2,
                "square_correction": math.sqrt(1.0 - settings.beta2**step),
                "minus_step": -(settings.lr / (1.0 - settings.beta1**step)),
                "eps": settings.eps,
                "scale": scale,
                "maximize": settings.maximize,
            },
        )

    def update(
        self,
        prepared: Any,
        *,
        parameter: int,
        gradient: int,
        gradient_dtype: str,
        exp_avg: int,
        exp_avg_sq: int,
        weight: int,
        count: int,
        weight_dtype: str = "bfloat16",
        out_parameter: int | None = None,
        out_exp_avg: int | None = None,
        out_exp_avg_sq: int | None = None,
    ) -> None:
        """Update `count` elements, in place or into other memory.

        Parameters
        ----------
        prepared
            Of `prepare`.
        parameter, exp_avg, exp_avg_sq : int
            Addresses of fp32.
        gradient : int
            Address of `gradient_dtype`, ``"float32"``, ``"bfloat16"`` or ``"float16"``; only read.
        weight : int
            Address of `weight_dtype`, ``"bfloat16"`` or ``"float16"``, that gets the new parameter rounded;
            0 for none.
        out_parameter, out_exp_avg, out_exp_avg_sq : int, optional
            Where the new state goes; by default in place of the old.  Each is its input's own address or memory
            that overlaps no other operand.
        """
        ffi = self._module.ffi
        operands = ffi.new("memferry_adam_operands *")
        operands.parameter = ffi.cast("float *", parameter)
        operands.exp_avg = ffi.cast("float *", exp_avg)
        operands.exp_avg_sq = ffi.cast("float *", exp_avg_sq)
        operands.out_parameter = ffi.cast("float *", parameter if out_parameter is None else out_parameter)
        operands.out_exp_avg = ffi.cast("float *", exp_avg if out_exp_avg is None else out_exp_avg)
        operands.out_exp_avg_sq = ffi.cast("float *", exp_avg_sq if out_exp_avg_sq is None else out_exp_avg_sq)
        operands.gradient = ffi.cast("void *", gradient)
        operands.gradient_dtype = DTYPES[gradient_dtype]
        operands.weight = ffi.cast("void *", weight)
        operands.weight_dtype = DTYPES[weight_dtype]
        self._module.lib.memferry_adam_update(self._number, operands, count, prepared)


@functools.cache
def load_adam(variant: str | None = None) -> AdamKernel | None:
    """The kernel in the fastest variant this processor runs, or in the one asked for.

    None where the package was installed without a C compiler, or the processor lacks the variant.
    """
    try:
        module = importlib.import_module("memferry_rt.native._adam")
    except ImportError:
        return None
    best = module.lib.memferry_adam_best_variant()
    if variant is not None and VARIANTS.index(variant) > best:
        return None
    return AdamKernel(module, VARIANTS[best] if variant is None else variant)
