"""What a launch passes to a kernel: the C structures, and how elements fall into aligned groups."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable

from ..native import AdamCoefficients, AdamOperands

GROUP = 4  # elements that a thread loads at once


class Operands(ctypes.Structure):
    """``memferry_adam_operands`` of adam.h."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("parameter", "exp_avg", "exp_avg_sq")),
        *((name, ctypes.c_size_t) for name in ("out_parameter", "out_exp_avg", "out_exp_avg_sq")),
        ("gradient", ctypes.c_size_t),
        ("weight", ctypes.c_size_t),
        ("gradient_dtype", ctypes.c_int),
        ("weight_dtype", ctypes.c_int),
        ("count", ctypes.c_size_t),
        ("tail", ctypes.c_size_t),
    )


class Coefficients(ctypes.Structure):
    """``memferry_adam`` of adam.h."""

    _fields_ = tuple(
        (field.name, ctypes.c_int if field.type == "bool" else ctypes.c_float)
        for field in dataclasses.fields(AdamCoefficients)
    )


def operands_structure(operands: AdamOperands) -> Operands:
    return Operands(*operands.native)


def coefficients_structure(coefficients: AdamCoefficients) -> Coefficients:
    return Coefficients(*dataclasses.astuple(coefficients))


def aligned_groups(arrays: Iterable[tuple[int, int]], count: int) -> tuple[int, int]:
    """How many elements come before the first whole group that is aligned in every array, and how many groups.

    Parameters
    ----------
    arrays : iterable of (pointer, itemsize)
    count : int
        Elements that may be in groups.
    """
    arrays = list(arrays)
    for head in range(min(GROUP, count + 1)):
        if all((pointer + head * itemsize) % (GROUP * itemsize) == 0 for pointer, itemsize in arrays):
            return head, (count - head) // GROUP
    return 0, 0
