"""Native kernels of optimizers that keep at most one number beside each parameter: SGD, Adagrad and Lion."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .adam import AdamTuning
from .module import DTYPES, ITEMSIZE, VARIANTS, kernels, variant_number
from .pool import NativeCalls

FP32 = 4


@dataclass(frozen=True)
class OneStateOperands:
    """Addresses of one call.

    Attributes
    ----------
    parameter : int
        Of fp32.
    state : int
        Of fp32; 0 where the optimizer keeps none.
    gradient : int
        Of `gradient_dtype`, ``"float32"``, ``"bfloat16"`` or ``"float16"``; only read.
    weight : int
        Of `weight_dtype`, that gets the new parameter rounded; 0 for none.
    count : int
        Elements.
    out_parameter, out_state : int, optional
        Where the new ones go; by default in place of the old.  Each is its input's own address or memory that
        overlaps no other operand.
    """

    parameter: int
    state: int
    gradient: int
    gradient_dtype: str
    weight: int
    count: int
    weight_dtype: str = "bfloat16"
    out_parameter: int | None = None
    out_state: int | None = None

    def native(self) -> tuple[int, ...]:
        """In the order of the C structure."""
        return (
            self.parameter,
            self.state,
            self.parameter if self.out_parameter is None else self.out_parameter,
            self.state if self.out_state is None else self.out_state,
            self.gradient,
            self.weight,
            DTYPES[self.gradient_dtype],
            DTYPES[self.weight_dtype],
            self.count,
        )

    def part(self, start: int, count: int) -> OneStateOperands:
        """Elements `start` … ``start + count``."""

        def at(address: int, itemsize: int) -> int:
            return address + start * itemsize if address else 0

        def out(address: int | None) -> int | None:
            return None if address is None else at(address, FP32)

        return dataclasses.replace(
            self,
            parameter=at(self.parameter, FP32),
            state=at(self.state, FP32),
            gradient=self.gradient + start * ITEMSIZE[self.gradient_dtype],
            weight=at(self.weight, ITEMSIZE[self.weight_dtype]),
            out_parameter=out(self.out_parameter),
            out_state=out(self.out_state),
            count=count,
        )


class OneStateKernel:
    """One variant of a kernel.

    Parameters
    ----------
    module : cffi module
    name : str
        ``"sgd"``, ``"adagrad"`` or ``"lion"``.
    variant : str
        ``"generic"``, ``"avx2"`` or ``"avx512"``; the processor must have it.
    tuning : AdamTuning, optional
    """

    def __init__(self, module: Any, name: str, variant: str, tuning: AdamTuning | None = None) -> None:
        self._module = module
        self.name = name
        self.variant = variant
        self.tuning = tuning or AdamTuning()
        self._number = VARIANTS.index(variant)
        self._tuning = module.ffi.new("memferry_tuning *", dataclasses.asdict(self.tuning))
        self._update = getattr(module.lib, f"memferry_{name}_update")

    def prepare(self, coefficients: Any) -> Any:
        """What a step's calls share: `SgdCoefficients`, `AdagradCoefficients` or `LionCoefficients`."""
        return self._module.ffi.new(f"memferry_{self.name} *", dataclasses.asdict(coefficients))

    def run(self, prepared: Any, operands: OneStateOperands) -> None:
        """Update elements in the calling thread."""
        row = (operands.native(), prepared, self._tuning, self._number)
        self._update(self._module.ffi.new("memferry_one_state_call *", row))

    def calls(self, work: Sequence[tuple[Any, OneStateOperands]]) -> NativeCalls:
        """Calls for a `NativePool`, each with what `prepare` gave for it; they must touch disjoint memory."""
        rows = [(operands.native(), prepared, self._tuning, self._number) for prepared, operands in work]
        array = self._module.ffi.new("memferry_one_state_call[]", rows)
        kept = (self._tuning, [prepared for prepared, _ in work])
        return NativeCalls(self.name.upper(), array, len(rows), kept)


@functools.cache
def load_one_state(
    name: str, variant: str | None = None, tuning: AdamTuning | None = None
) -> OneStateKernel | None:
    """A kernel in the fastest variant this processor runs, or in the one asked for.

    None where the package was installed without a C compiler, or the processor lacks the variant.
    """
    module = kernels()
    number = None if module is None else variant_number(module, variant)
    return None if number is None else OneStateKernel(module, name, VARIANTS[number], tuning)
