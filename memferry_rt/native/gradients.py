"""What else native kernels do with gradients: the norm's fp64 sums of squares, accumulation, change of dtype."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .module import DTYPES, ITEMSIZE, kernels, variant_number
from .pool import NativeCalls

NORM_BLOCK = 4096  # elements; see docs/numerics.md
PIECE = 1 << 20  # elements a call; a multiple of NORM_BLOCK


class GradientKernels:
    """One variant of the kernels.

    Addresses are of host memory; dtypes are ``"float32"``, ``"bfloat16"`` and ``"float16"``.

    Parameters
    ----------
    module : cffi module
    variant : int
        The processor must have it.
    """

    def __init__(self, module: Any, variant: int) -> None:
        self._module = module
        self._variant = variant

    def square_sum(self, values: int, dtype: str, count: int) -> float:
        """The sum of squares in fp64, of the calling thread."""
        calls, sums = self.squares(values, dtype, count)
        for number in range(calls.count):
            self._module.lib.memferry_squares(calls.array + number)
        return self.reduce(sums)

    def squares(self, values: int, dtype: str, count: int) -> tuple[NativeCalls, npt.NDArray[np.float64]]:
        """Calls for a `NativePool`, and the sums of blocks that `reduce` makes one of once they have run."""
        sums = np.empty(-(-count // NORM_BLOCK), dtype=np.float64)
        pointer = self._module.ffi.from_buffer("double[]", sums)
        rows = [
            (
                values + start * ITEMSIZE[dtype],
                DTYPES[dtype],
                min(PIECE, count - start),
                pointer + start // NORM_BLOCK,
                self._variant,
            )
            for start in range(0, count, PIECE)
        ]
        array = self._module.ffi.new("memferry_squares_call[]", rows)
        return NativeCalls("SQUARES", array, len(rows), (sums, pointer)), sums

    def reduce(self, sums: npt.NDArray[np.float64]) -> float:
        """The sum of block sums, which are overwritten."""
        pointer = self._module.ffi.from_buffer("double[]", sums)
        return float(self._module.lib.memferry_reduce(pointer, len(sums)))

    def add(self, target: int, target_dtype: str, source: int, source_dtype: str, count: int) -> None:
        """``target += source``: the sum in fp32, rounded to the target's dtype, as PyTorch adds."""
        call = self._elementwise(target, target_dtype, source, source_dtype, count)
        self._module.lib.memferry_add(call)

    def convert(self, target: int, target_dtype: str, source: int, source_dtype: str, count: int) -> None:
        """``target = source``, rounded to the target's dtype; they do not overlap."""
        call = self._elementwise(target, target_dtype, source, source_dtype, count)
        self._module.lib.memferry_convert(call)

    def conversions(self, rows: Sequence[tuple[int, str, int, str, int]]) -> NativeCalls:
        """Calls for a `NativePool`, each with the arguments of `convert`; they touch disjoint memory."""
        calls = [
            (target, source, DTYPES[to], DTYPES[of], count, self._variant)
            for target, to, source, of, count in rows
        ]
        array = self._module.ffi.new("memferry_convert_call[]", calls)
        return NativeCalls("CONVERT", array, len(calls), ())

    def _elementwise(self, target: int, target_dtype: str, source: int, source_dtype: str, count: int) -> Any:
        row = (target, source, DTYPES[target_dtype], DTYPES[source_dtype], count, self._variant)
        return self._module.ffi.new("memferry_add_call *", row)


@functools.cache
def load_gradient_kernels(variant: str | None = None) -> GradientKernels | None:
    """The kernels in the fastest variant, or the one asked for; None without a compiler or the variant."""
    module = kernels()
    number = None if module is None else variant_number(module, variant)
    return None if number is None else GradientKernels(module, number)
