"""The update of a layer, cut in pieces that run side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...device_update import FP32, ITEMSIZE, DeviceUpdate
from ...layout import LayerLayout
from ...native import AdamKernel, AdamSettings
from ...split import spread
from ...streaming import UNIT, StatePiece
from .budget import LARGEST_STREAM, SMALLEST_STREAM, UpdateRoom
from .layer import Geometry, LayerState
from .torch_adam import CHUNK, Batch, update_batch

NATIVE_CHUNK = 1 << 20  # elements a call of the native kernel: a millisecond or less, and few calls
NATIVE = (torch.float32, torch.bfloat16)  # what the native kernels compute
VECTOR = 64  # elements; a multiple of every vector width, so that a cut here leaves vector and tail alone


class LayerUpdate:
    """The update of one layer by Adam or AdamW.

    Parameters
    ----------
    layer : LayerState
    groups : mapping of index to int
        The parameter group of each parameter that the optimizer updates, by index in the layer.
    kernel : AdamKernel or None
        The native kernel; without one, torch operations of the same arithmetic.

    Attributes
    ----------
    numel : int
        Elements it updates.
    streamable : bool
        Whether a device kernel can take all but the last elements of every parameter.
    residable : bool
        Whether it can take all of them, so that the state may live on the device.
    """

    def __init__(self, layer: LayerState, groups: Mapping[int, int], kernel: AdamKernel | None) -> None:
        self._layer = layer
        self._kernel = kernel
        self._groups = groups
        self._whole: list[StatePiece] = []
        self._native: list[StatePiece] = []
        self._batches: list[Batch] = []
        for index in sorted(groups, key=lambda index: (groups[index], index)):
            whole = self._vectors(index) if kernel is not None else None
            if whole is not None:
                self._whole.append(whole)
                self._native += _cut(whole, NATIVE_CHUNK)
            self._cut_batches(index, 0 if whole is None else whole.count)
        self.numel = sum(layer.layout.slots[index].spec.numel for index in groups)
        by_kernel = {piece.index for piece in self._whole}
        nonempty = {index for index in groups if layer.layout.slots[index].spec.numel >= VECTOR}
        self.streamable = bool(nonempty) and by_kernel >= nonempty
        self.residable = self.streamable and not self._batches

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
            prepared = self._prepared(self._kernel, present, settings, steps, scale)
            pieces += [
                _native_call(self._kernel, prepared[piece.index], piece)
                for piece in self._native
                if piece.index in present
            ]
        return pieces + self.tails(present, settings, steps, scale)

    def tails(
        self,
        present: set[int],
        settings: Sequence[AdamSettings],
        steps: Mapping[int, torch.Tensor],
        scale: float,
    ) -> list[Callable[[], None]]:
        """The part of `pieces` that no kernel but PyTorch's computes."""
        pieces = []
        for batch in self._batches:
            part = batch.only(present)
            if part.parameters:
                numbers = [steps[index] for index in part.parameters]
                pieces.append(_torch_call(part, settings[part.group], numbers, scale))
        return pieces

    def on_device(
        self,
        update: DeviceUpdate,
        present: set[int],
        settings: Sequence[AdamSettings],
        steps: Mapping[int, torch.Tensor],
        scale: float,
    ) -> list[tuple[StatePiece, Any]]:
        """What a device kernel updates of the parameters in `present`, each with what its calls share."""
        prepared = self._prepared(update, present, settings, steps, scale)
        return [(piece, prepared[piece.index]) for piece in self._whole if piece.index in present]

    def _prepared(
        self,
        kernel: AdamKernel | DeviceUpdate,
        present: set[int],
        settings: Sequence[AdamSettings],
        steps: Mapping[int, torch.Tensor],
        scale: float,
    ) -> dict[int, Any]:
        return {
            index: kernel.prepare(settings[self._groups[index]], float(steps[index]), scale) for index in present
        }

    def _vectors(self, index: int) -> StatePiece | None:
        """What of a parameter the native kernel covers; the last few elements are torch's."""
        layer = self._layer
        spec, dtype = layer.layout.slots[index].spec, layer.geometry[index].dtype
        whole = spec.numel // VECTOR * VECTOR
        if dtype not in NATIVE or not whole:
            return None
        return StatePiece(
            index=index,
            parameter=layer.cpu_state(index, "master").data_ptr(),
            gradient=layer.cpu_gradient(index).data_ptr(),
            gradient_dtype=str(dtype).removeprefix("torch."),
            exp_avg=layer.cpu_state(index, "exp_avg").data_ptr(),
            exp_avg_sq=layer.cpu_state(index, "exp_avg_sq").data_ptr(),
            weight=layer.cpu_weight(index).data_ptr() if spec.master else 0,
            count=whole,
        )

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


def room_for_updates(
    layouts: Sequence[LayerLayout], geometries: Sequence[Sequence[Geometry]], share: float
) -> UpdateRoom:
    """What the device's part of the update could use of its memory.

    Parameters
    ----------
    layouts, geometries : sequence
        Of the layers.
    share : float
        Of the parameters that the device is to update, 0 to 1; no more than that is resident.
    """
    numel = [sum(slot.spec.numel for slot in layout.slots if slot.spec.updated) for layout in layouts]
    can = [
        size > 0
        and all(
            form.dtype in NATIVE and slot.spec.numel % VECTOR == 0
            for slot, form in zip(layout.slots, forms, strict=True)
            if slot.spec.updated
        )
        for size, layout, forms in zip(numel, layouts, geometries, strict=True)
    ]
    chosen = spread(numel, share, can)
    resident = [
        layout.state_nbytes + layout.gradient_nbytes if take else 0
        for layout, take in zip(layouts, chosen, strict=True)
    ]
    elements = max(numel, default=0) if share else 0
    streaming = min(LARGEST_STREAM, -(-elements // UNIT) * SMALLEST_STREAM)
    return UpdateRoom(streaming, tuple(resident))


def _cut(piece: StatePiece, elements: int) -> list[StatePiece]:
    """A piece in pieces of at most `elements`."""
    itemsize = ITEMSIZE[piece.gradient_dtype]
    half = ITEMSIZE["bfloat16"]
    return [
        StatePiece(
            index=piece.index,
            parameter=piece.parameter + start * FP32,
            gradient=piece.gradient + start * itemsize,
            gradient_dtype=piece.gradient_dtype,
            exp_avg=piece.exp_avg + start * FP32,
            exp_avg_sq=piece.exp_avg_sq + start * FP32,
            weight=piece.weight + start * half if piece.weight else 0,
            count=min(elements, piece.count - start),
        )
        for start in range(0, piece.count, elements)
    ]


def _native_call(kernel: AdamKernel, prepared: object, piece: StatePiece) -> Callable[[], None]:
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
