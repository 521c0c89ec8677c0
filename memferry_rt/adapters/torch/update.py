"""The update of a layer, cut in pieces that run side by side."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...device_update import DeviceUpdate, part_of
from ...errors import UnsupportedError
from ...layout import LayerLayout, Slot
from ...native import AdamKernel, AdamOperands, AdamSettings, NativeCalls, OneStateKernel, OneStateOperands
from ...native.adam import VECTOR
from ...parallel import Part
from ...split import spread
from ...streaming import UNIT
from .arithmetics import Arithmetic
from .budget import LARGEST_STREAM, SMALLEST_STREAM, WORTHWHILE_STREAM, UpdateRoom
from .generic import ParameterUpdate
from .layer import LayerState
from .torch_adam import CHUNK, Batch, update_batch

STATE_TRAFFIC = 8  # bytes an element of fp32 that is read and written
NATIVE_CHUNK = 1 << 20  # elements a call of the native kernel: a millisecond or less, and few calls


class LayerUpdate(abc.ABC):
    """The update of one layer.

    Parameters
    ----------
    layer : LayerState
    groups : mapping of index to int
        The parameter group of each parameter that the optimizer updates, by index in the layer.
    parts : sequence of Part, optional
        The elements to update, where other ranks update the rest; by default all.

    Attributes
    ----------
    numel : int
        Elements it updates.
    traffic : int
        Bytes of host memory that it reads and writes on the CPU: state, gradients, and rounded weights.
    """

    def __init__(
        self, layer: LayerState, groups: Mapping[int, int], *, parts: Sequence[Part] | None = None
    ) -> None:
        self._layer = layer
        self._groups = groups
        numel = {index: layer.layout.slots[index].spec.numel for index in groups}
        whole = [Part(index, 0, count) for index, count in numel.items()]
        self._parts = {part.index: part for part in (whole if parts is None else parts) if part.index in groups}
        self.numel = sum(part.count for part in self._parts.values())
        self.traffic = sum(
            _traffic(layer.layout.slots[index]) * part.count // max(numel[index], 1)
            for index, part in self._parts.items()
        )

    @property
    def indices(self) -> Iterable[int]:
        """The parameters that it updates."""
        return self._groups.keys()

    @abc.abstractmethod
    def on_cpu(
        self, present: set[int], settings: Sequence[Any], counts: Mapping[int, Any], scale: float
    ) -> NativeCalls | list[Callable[[], None]]:
        """The update of the parameters in `present`, in place, as calls that touch disjoint memory.

        Parameters
        ----------
        present : set of int
            Indices of the parameters that have a gradient.
        settings : sequence
            Of `OptimizerPatch.settings`, by group.
        counts : mapping of index to object
            Of `OptimizerPatch.count`, for each parameter.
        scale : float
            Multiplied into every gradient.
        """


class AdamUpdate(LayerUpdate):
    """By Adam or AdamW.

    Parameters
    ----------
    layer, groups, parts
        See `LayerUpdate`.
    kernel : AdamKernel or None
        The native one; None for torch operations of the same arithmetic.
    """

    def __init__(
        self,
        layer: LayerState,
        groups: Mapping[int, int],
        *,
        kernel: AdamKernel | None,
        parts: Sequence[Part] | None = None,
    ) -> None:
        super().__init__(layer, groups, parts=parts)
        self._kernel = kernel
        self._operands: dict[int, AdamOperands] = {}
        self._state_at = 0
        self._batches: list[Batch] = []
        for index in sorted(self._parts, key=lambda index: (groups[index], index)):
            if kernel is None:
                self._cut_batches(index)

    def on_cpu(
        self, present: set[int], settings: Sequence[Any], counts: Mapping[int, Any], scale: float
    ) -> NativeCalls | list[Callable[[], None]]:
        if self._kernel is None:
            return self._batches_of(present, settings, counts, scale)
        return self._kernel.calls(cut_work(self.native(self._kernel, present, settings, counts, scale)))

    def _batches_of(
        self,
        present: set[int],
        settings: Sequence[AdamSettings],
        steps: Mapping[int, torch.Tensor],
        scale: float,
    ) -> list[Callable[[], None]]:
        """The update by torch; `steps` has fp32 scalars: the number of this step, for each parameter."""
        calls = []
        for batch in self._batches:
            part = batch.only(present)
            if part.parameters:
                numbers = [steps[index] for index in part.parameters]
                calls.append(_torch_call(part, settings[part.group], numbers, scale))
        return calls

    def native(
        self,
        kernel: AdamKernel | DeviceUpdate,
        present: set[int],
        settings: Sequence[AdamSettings],
        steps: Mapping[int, torch.Tensor],
        scale: float,
    ) -> list[tuple[Any, AdamOperands]]:
        """The update by a native kernel: for each parameter what its calls share, and where it is at home."""
        if self._state_at != self._layer.state_span.ptr:  # never yet, or it has moved
            self._state_at = self._layer.state_span.ptr
            self._operands = {
                index: part_of(self._at_home(index), part.start, part.count)
                for index, part in self._parts.items()
                if part.count
            }
        return [
            (kernel.prepare(settings[self._groups[index]], float(steps[index]), scale), operands)
            for index, operands in self._operands.items()
            if index in present
        ]

    def _at_home(self, index: int) -> AdamOperands:
        layer = self._layer
        spec, form = layer.layout.slots[index].spec, layer.geometry[index]
        dtype, gradient_dtype = (str(d).removeprefix("torch.") for d in (form.dtype, form.gradient_dtype))
        return AdamOperands(
            parameter=layer.cpu_state(index, "master").data_ptr(),
            gradient=layer.cpu_gradient(index).data_ptr(),
            gradient_dtype=gradient_dtype,
            exp_avg=layer.cpu_state(index, "exp_avg").data_ptr(),
            exp_avg_sq=layer.cpu_state(index, "exp_avg_sq").data_ptr(),
            weight=layer.cpu_weight(index).data_ptr() if spec.master else 0,
            weight_dtype=dtype if spec.master else "bfloat16",
            count=spec.numel,
            tail=spec.numel % VECTOR,
        )

    def _cut_batches(self, index: int) -> None:
        layer, group, own = self._layer, self._groups[index], self._parts[index]
        spec = layer.layout.slots[index].spec
        for start in range(own.start, own.start + own.count, CHUNK):
            part = slice(start, min(start + CHUNK, own.start + own.count))
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


class ClassUpdate(LayerUpdate):
    """By the user's own class, one parameter a call.

    Parameters
    ----------
    layer, groups
        See `LayerUpdate`.
    optimizer : Optimizer
    """

    def __init__(self, layer: LayerState, groups: Mapping[int, int], optimizer: Optimizer) -> None:
        super().__init__(layer, groups)
        self._updates = {
            index: ParameterUpdate(optimizer, layer.in_shape(index, layer.cpu_state(index, "master")))
            for index in groups
        }

    def on_cpu(
        self, present: set[int], settings: Sequence[Any], counts: Mapping[int, Any], scale: float
    ) -> NativeCalls | list[Callable[[], None]]:
        layer = self._layer
        return [
            functools.partial(
                self._updates[index].run,
                layer.in_shape(index, layer.cpu_gradient(index)),
                settings[self._groups[index]],
                scale,
                layer.in_shape(index, layer.cpu_weight(index)) if layer.layout.slots[index].spec.master else None,
                counts[index].entry,
                counts[index].room,
            )
            for index in sorted(present)
        ]


class OneStateUpdate(LayerUpdate):
    """By a native kernel of an optimizer that keeps at most one number beside each parameter.

    Parameters
    ----------
    layer, groups, parts
        See `LayerUpdate`.
    kernel : OneStateKernel
    arithmetic : Arithmetic
    """

    def __init__(
        self,
        layer: LayerState,
        groups: Mapping[int, int],
        kernel: OneStateKernel,
        arithmetic: Arithmetic,
        *,
        parts: Sequence[Part] | None = None,
    ) -> None:
        super().__init__(layer, groups, parts=parts)
        self._shared = parts is not None
        self._kernel = kernel
        self._arithmetic = arithmetic

    def on_cpu(
        self, present: set[int], settings: Sequence[Any], counts: Mapping[int, Any], scale: float
    ) -> NativeCalls | list[Callable[[], None]]:
        work: list[tuple[Any, OneStateOperands]] = []
        states = []
        for index in sorted(present):
            coefficients, state = self._arithmetic.begin(
                settings[self._groups[index]],
                counts[index],
                scale,
                functools.partial(self._room, index),
                functools.partial(self._fill, index),
            )
            states.append(state)
            if self._shared and state is not None:
                self._require_room(index)
            prepared, whole = self._kernel.prepare(coefficients), self._at_home(index, state)
            part = self._parts.get(index, Part(index, 0, 0))
            end = part.start + part.count
            for start in range(part.start, end, NATIVE_CHUNK):
                work.append((prepared, whole.part(start, min(NATIVE_CHUNK, end - start))))
        calls = self._kernel.calls(work)
        return dataclasses.replace(calls, kept=(calls.kept, states))

    def _fill(self, index: int, state: torch.Tensor, value: float) -> None:
        part = self._parts.get(index)
        if part is not None:
            state.as_strided((state.numel(),), (1,))[part.start : part.start + part.count].fill_(value)

    def _require_room(self, index: int) -> None:
        """Refuse state in memory of this rank alone, of which other ranks' parts would be missing."""
        if not self._layer.layout.slots[index].state:
            raise UnsupportedError(
                f"{self._layer.layout.slots[index].spec.name} has optimizer state that offload() has laid out no "
                "place for, as with a momentum that was 0 then; with process_group set it before offload()"
            )

    def _room(self, index: int) -> torch.Tensor:
        form = self._layer.geometry[index]
        return torch.empty_strided(form.shape, form.stride, dtype=torch.float32, device="cpu")

    def _at_home(self, index: int, state: torch.Tensor | None) -> OneStateOperands:
        layer = self._layer
        spec, form = layer.layout.slots[index].spec, layer.geometry[index]
        dtype, gradient_dtype = (str(d).removeprefix("torch.") for d in (form.dtype, form.gradient_dtype))
        return OneStateOperands(
            parameter=layer.cpu_state(index, "master").data_ptr(),
            state=0 if state is None else state.data_ptr(),
            gradient=layer.cpu_gradient(index).data_ptr(),
            gradient_dtype=gradient_dtype,
            weight=layer.cpu_weight(index).data_ptr() if spec.master else 0,
            weight_dtype=dtype if spec.master else "bfloat16",
            count=spec.numel,
        )


def _traffic(slot: Slot) -> int:
    weight = slot.spec.nbytes if slot.spec.master else 0
    return slot.spec.numel * STATE_TRAFFIC * (1 + len(slot.state)) + slot.spec.gradient_nbytes + weight


def cut_work(work: Sequence[tuple[Any, AdamOperands]]) -> list[tuple[Any, AdamOperands]]:
    """Native work in calls short enough to be shared between threads."""
    return [(prepared, part) for prepared, operands in work for part in _chunks(operands)]


@functools.lru_cache(maxsize=1 << 12)
def _chunks(operands: AdamOperands) -> tuple[AdamOperands, ...]:
    """The same in every step while state stays where it is."""
    return tuple(
        part_of(operands, start, min(NATIVE_CHUNK, operands.count - start))
        for start in range(0, operands.count, NATIVE_CHUNK)
    )


def room_for_updates(layouts: Sequence[LayerLayout], share: float | None) -> UpdateRoom:
    """What the device's part of the update could use of its memory.

    Parameters
    ----------
    layouts : sequence of LayerLayout
    share : float or None
        Of the parameters that the device is to update, 0 to 1; no more than that is resident.  None for as many as
        is worth while.
    """
    numel = [sum(slot.spec.numel for slot in layout.slots if slot.spec.updated) for layout in layouts]
    resident = [
        layout.state_nbytes + layout.gradient_nbytes if take else 0
        for layout, take in zip(layouts, spread(numel, 1.0 if share is None else share), strict=True)
    ]
    streaming = min(LARGEST_STREAM, -(-max(numel, default=0) // UNIT) * SMALLEST_STREAM)
    least = min(streaming, WORTHWHILE_STREAM if share is None else SMALLEST_STREAM)
    return UpdateRoom(streaming, least, tuple(resident))


def _torch_call(
    batch: Batch, settings: AdamSettings, numbers: list[torch.Tensor], scale: float
) -> Callable[[], None]:
    return lambda: update_batch(batch, settings, numbers, scale)
