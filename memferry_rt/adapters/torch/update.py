"""The update of a layer, cut in pieces that run side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...native import AdamKernel, AdamSettings
from .layer import LayerState
from .torch_adam import CHUNK, Batch, update_batch

NATIVE_CHUNK = 1 << 20  # elements a call of the native kernel: a millisecond or less, and few calls
VECTOR = 64  # elements; a multiple of every vector width, so that a cut here leaves vector and tail alone


@dataclass(frozen=True)
class _NativePiece:
    """Addresses of one call of the native kernel."""

    index: int
    parameter: int
    gradient: int
    gradient_dtype: str
    exp_avg: int
    exp_avg_sq: int
    weight: int
    count: int


class LayerUpdate:
    """The update of one layer by Adam or AdamW.

    Parameters
    ----------
    layer : LayerState
    groups : mapping of index to int
        The parameter group of each parameter that the optimizer updates, by index in the layer.
    kernel : AdamKernel or None
        The native kernel; without one, torch operations of the same arithmetic.
    """

    def __init__(self, layer: LayerState, groups: Mapping[int, int], kernel: AdamKernel | None) -> None:
        self._layer = layer
        self._kernel = kernel
        self._groups = groups
        self._native: list[_NativePiece] = []
        self._batches: list[Batch] = []
        for index in sorted(groups, key=lambda index: (groups[index], index)):
            done = self._cut_native(index) if kernel is not None else 0
            self._cut_batches(index, done)

    def pieces(
        self,
        present: set[int],
        settings: Sequence[AdamSettings],
        steps: Mapping[int, torch.Tensor],
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
        if self._kernel is not None:
            prepared = {
                index: self._kernel.prepare(settings[self._groups[index]], float(steps[index]), scale)
                for index in present
            }
            pieces += [
                _native_call(self._kernel, prepared[piece.index], piece)
                for piece in self._native
                if piece.index in present
            ]
        for batch in self._batches:
            part = batch.only(present)
            if part.parameters:
                numbers = [steps[index] for index in part.parameters]
                pieces.append(_torch_call(part, settings[part.group], numbers, scale))
        return pieces

    def _cut_native(self, index: int) -> int:
        """Native pieces of a parameter, and how many of its elements they cover; the last few are torch's."""
        layer = self._layer
        spec, dtype = layer.layout.slots[index].spec, layer.geometry[index].dtype
        if dtype not in (torch.float32, torch.bfloat16):
            return 0
        whole = spec.numel // VECTOR * VECTOR
        parameter, gradient = layer.cpu_state(index, "master"), layer.cpu_gradient(index)
        exp_avg, exp_avg_sq = layer.cpu_state(index, "exp_avg"), layer.cpu_state(index, "exp_avg_sq")
        weight = layer.cpu_weight(index) if spec.master else None
        for start in range(0, whole, NATIVE_CHUNK):
            self._native.append(
                _NativePiece(
                    index=index,
                    parameter=parameter[start:].data_ptr(),
                    gradient=gradient[start:].data_ptr(),
                    gradient_dtype=str(dtype).removeprefix("torch."),
                    exp_avg=exp_avg[start:].data_ptr(),
                    exp_avg_sq=exp_avg_sq[start:].data_ptr(),
                    weight=0 if weight is None else weight[start:].data_ptr(),
                    count=min(NATIVE_CHUNK, whole - start),
                )
            )
        return whole

    def _cut_batches(self, index: int, done: int) -> None:
        layer, group = self._layer, self._groups[index]
        spec = layer.layout.slots[index].spec
        for start in range(done, spec.numel, CHUNK):
            part = slice(start, min(start + CHUNK, spec.numel))
            self._batch(group, part.stop - part.start).add(
                index,
                master=layer.cpu_state(index, "master")[part],
                exp_avg=layer.cpu_state(index, "exp_avg")[part],
                exp_avg_sq=layer.cpu_state(index, "exp_avg_sq")[part],
                gradient=layer.cpu_gradient(index)[part],
                weight=layer.cpu_weight(index)[part] if spec.master else None,
            )

    def _batch(self, group: int, numel: int) -> Batch:
        if self._batches:
            last = self._batches[-1]
            if last.group == group and last.numel + numel <= CHUNK:
                return last
        self._batches.append(Batch(group))
        return self._batches[-1]


def _native_call(kernel: AdamKernel, prepared: object, piece: _NativePiece) -> Callable[[], None]:
    return lambda: kernel.update(
        prepared,
        parameter=piece.parameter,
        gradient=piece.gradient,
        gradient_dtype=piece.gradient_dtype,
        exp_avg=piece.exp_avg,
        exp_avg_sq=piece.exp_avg_sq,
        weight=piece.weight,
        count=piece.count,
    )


def _torch_call(
    batch: Batch, settings: AdamSettings, numbers: list[torch.Tensor], scale: float
) -> Callable[[], None]:
    return lambda: update_batch(batch, settings, numbers, scale)
