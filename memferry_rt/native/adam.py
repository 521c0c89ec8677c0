"""The native Adam kernel, called with addresses; it takes no interpreter lock and starts no threads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .coefficients import AdamSettings, adam_coefficients
from .module import DTYPES, VARIANTS, kernels, variant_number
from .pool import NativeCalls

VECTOR = 8  # elements: PyTorch computes the last ``numel % VECTOR`` of a tensor outside of its vector loop


@dataclass(frozen=True)
class AdamTuning:
    """How the kernel goes through memory; no result depends on it.

    Attributes
    ----------
    block : int
        Elements widened and updated at a time, at most 4096; they should stay in the first-level cache.
    stream_out : bool
        Non-temporal stores into state that lies elsewhere than the old: its lines are not read first.
    stream_weight : bool
        The same for the rounded weights, which then lie in memory and not in cache.
    """

    block: int = 1024
    stream_out: bool = True
    stream_weight: bool = False


@dataclass(frozen=True)
class AdamOperands:
    """Addresses of one call.

    Attributes
    ----------
    parameter, exp_avg, exp_avg_sq : int
        Of fp32.
    gradient : int
        Of `gradient_dtype`, ``"float32"``, ``"bfloat16"`` or ``"float16"``; only read.
    weight : int
        Of `weight_dtype`, that gets the new parameter rounded; 0 for none.
    count : int
        Elements.
    tail : int
        How many of the last of them end their tensor behind its last whole `VECTOR`; those PyTorch rounds
        differently.
    out_parameter, out_exp_avg, out_exp_avg_sq : int, optional
        Where the new state goes; by default in place of the old.  Each is its input's own address or memory
        that overlaps no other operand.
    """

    parameter: int
    gradient: int
    gradient_dtype: str
    exp_avg: int
    exp_avg_sq: int
    weight: int
    count: int
    weight_dtype: str = "bfloat16"
    tail: int = 0
    out_parameter: int | None = None
    out_exp_avg: int | None = None
    out_exp_avg_sq: int | None = None

    @functools.cached_property
    def native(self) -> tuple[int, ...]:
        """In the order of the C structure; the same operands serve in every step."""
        return (
            self.parameter,
            self.exp_avg,
            self.exp_avg_sq,
            self.parameter if self.out_parameter is None else self.out_parameter,
            self.exp_avg if self.out_exp_avg is None else self.out_exp_avg,
            self.exp_avg_sq if self.out_exp_avg_sq is None else self.out_exp_avg_sq,
            self.gradient,
            self.weight,
            DTYPES[self.gradient_dtype],
            DTYPES[self.weight_dtype],
            self.count,
            self.tail,
        )


class AdamKernel:
    """One variant of the kernel.

    Parameters
    ----------
    module : cffi module
    variant : str
        ``"generic"``, ``"avx2"`` or ``"avx512"``; the processor must have it.
    tuning : AdamTuning, optional
    """

    def __init__(self, module: Any, variant: str, tuning: AdamTuning | None = None) -> None:
        self._module = module
        self.variant = variant
        self.tuning = tuning or AdamTuning()
        self._number = VARIANTS.index(variant)
        self._tuning = module.ffi.new("memferry_tuning *", dataclasses.asdict(self.tuning))
        self._prepared = functools.lru_cache(maxsize=64)(self._prepare)

    def prepare(self, settings: AdamSettings, step: float, scale: float) -> Any:
        """What a step's calls share, not to be changed; see `adam_coefficients`."""
        return self._prepared(settings, step, scale)

    def _prepare(self, settings: AdamSettings, step: float, scale: float) -> Any:
        coefficients = adam_coefficients(settings, step, scale)
        return self._module.ffi.new("memferry_adam *", dataclasses.asdict(coefficients))

    def update(self, prepared: Any, **operands: Any) -> None:
        """Update elements in the calling thread; `prepared` is of `prepare`, the rest of `AdamOperands`."""
        self.run(prepared, AdamOperands(**operands))

    def run(self, prepared: Any, operands: AdamOperands) -> None:
        """The same, with the operands made before."""
        row = (operands.native, prepared, self._tuning, self._number)
        self._module.lib.memferry_adam_update(self._module.ffi.new("memferry_adam_call *", row))

    def calls(self, work: Sequence[tuple[Any, AdamOperands]]) -> NativeCalls:
        """Calls for a `NativePool`, each with what `prepare` gave for it; they must touch disjoint memory."""
        return self._calls(work, "ADAM")

    def traffic(self, work: Sequence[AdamOperands]) -> NativeCalls:
        """The same loads and stores without the arithmetic, for comparison: the results mean nothing."""
        return self._calls([(self._module.ffi.NULL, operands) for operands in work], "TRAFFIC")

    def _calls(self, work: Sequence[tuple[Any, AdamOperands]], kind: str) -> NativeCalls:
        rows = [(operands.native, prepared, self._tuning, self._number) for prepared, operands in work]
        array = self._module.ffi.new("memferry_adam_call[]", rows)
        return NativeCalls(kind, array, len(rows), (self._tuning, [prepared for prepared, _ in work]))


@functools.cache
def load_adam(variant: str | None = None, tuning: AdamTuning | None = None) -> AdamKernel | None:
    """The kernel in the fastest variant this processor runs, or in the one asked for.

    None where the package was installed without a C compiler, or the processor lacks the variant.
    """
    module = kernels()
    number = None if module is None else variant_number(module, variant)
    return None if number is None else AdamKernel(module, VARIANTS[number], tuning)
