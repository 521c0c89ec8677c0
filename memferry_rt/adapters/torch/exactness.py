"""Whether panels give the bits of the whole: tried once for every form of a product, before it is relied on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from memferry_allocator import Driver, HostArena, OutOfMemory
from memferry_allocator.sizes import align_up

from .operators import ExactModes, LinearShape, exact_modes
from .tensors import TensorFactory

_UNKNOWN = ExactModes(False, False, False, False, False, False)


class Exactness:
    """Tries what is not promised, on the device and in host memory as they are.

    Parameters
    ----------
    driver : Driver
    factory : TensorFactory
    relaxed : bool
        Do not ask: results may differ from PyTorch's in the last bits.
    """

    def __init__(self, driver: Driver, factory: TensorFactory, *, relaxed: bool) -> None:
        self._driver = driver
        self._factory = factory
        self._relaxed = relaxed
        self._found: dict[tuple[LinearShape, int, int, bool], ExactModes] = {}

    def ring(self, shape: LinearShape, row_step: int, column_step: int) -> bool:
        """Whether weights may come in panels of so many rows in forward, and of so many columns in backward."""
        return self._ask(shape, row_step, column_step, lambda e: e.forward_ring and e.input_gradient_ring)

    def weight_gradient(self, shape: LinearShape, row_step: int) -> bool:
        """Whether the weight's gradient may be made in panels of so many rows."""
        if row_step >= shape.out_features:
            return True
        return self._ask(shape, row_step, shape.in_features, lambda e: e.weight_gradient_panels)

    def _ask(
        self, shape: LinearShape, row_step: int, column_step: int, right: Callable[[ExactModes], bool]
    ) -> bool:
        if self._relaxed:
            return True
        key = (shape, row_step, column_step, torch.are_deterministic_algorithms_enabled())
        found = self._found.get(key)
        if found is None:
            try:
                found = self._try(shape, row_step, column_step)
            except (torch.OutOfMemoryError, OutOfMemory):  # no room to try it: it is not relied on
                found = _UNKNOWN
            self._found[key] = found
        return right(found)

    def _try(self, shape: LinearShape, row_step: int, column_step: int) -> ExactModes:
        with contextlib.ExitStack() as arenas:

            def host(tensor: torch.Tensor) -> torch.Tensor:
                arenas.close()  # of the last one
                nbytes = tensor.numel() * tensor.element_size()
                arena = HostArena(self._driver, align_up(nbytes, 4096))
                arenas.callback(arena.close)
                copy = self._factory.mapped(arena, arena.cut(nbytes)).view(tensor.dtype).view(tensor.shape)
                return copy.copy_(tensor)

            return exact_modes(
                shape,
                device=self._factory.torch_device,
                host=tensor_clone if self._factory.emulated else host,
                row_step=row_step,
                column_step=column_step,
            )


def tensor_clone(tensor: torch.Tensor) -> torch.Tensor:
    """Where device and host memory are one."""
    return tensor.clone()
