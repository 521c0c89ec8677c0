"""The compiled kernels, where the package was installed with a C compiler."""

from __future__ import annotations

import functools
import importlib
from typing import Any

VARIANTS = ("generic", "avx2", "avx512")
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@functools.cache
def kernels() -> Any | None:
    """The cffi module; None where there was no compiler."""
    try:
        return importlib.import_module("memferry_rt.native._kernels")
    except ModuleNotFoundError:  # one that is there and does not load is an error
        return None


def variant_number(module: Any, variant: str | None) -> int | None:
    """The number of a variant, by default the fastest; None where this processor lacks it."""
    best: int = module.lib.memferry_best_variant()
    if variant is None:
        return best
    number = VARIANTS.index(variant)
    return number if number <= best else None
