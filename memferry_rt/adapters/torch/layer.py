"""A layer's tensors: every view of its slabs that training needs, made once."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from memferry_allocator import Span

from ...layout import LayerLayout, Slot
from ...pages import SlabPages
from ...parallel import Part
from ...traffic import LayerTraffic
from .modes import STREAMED, LayerPlan
from .tensors import TensorFactory, shaped, storage_references

MAX_CACHED_PLACES = 16

ViewKey = tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Geometry:
    """How a parameter lies in its slab, and its gradient alike, in a dtype of its own."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    gradient_dtype: torch.dtype


@dataclass(frozen=True)
class DeviceSlab:
    """Device memory, and a tensor of its bytes."""

    span: Span
    tensor: torch.Tensor


@dataclass(frozen=True)
class Residence:
    """Device memory that is the home of a layer's optimizer state and gradients."""

    state: DeviceSlab
    gradient: DeviceSlab


class DeviceViews:
    """A layer's weights at one place in the device pool."""

    def __init__(self, base: torch.Tensor, layout: LayerLayout, geometry: list[Geometry]) -> None:
        self._base = base
        self.parameters = [
            shaped(base, slot.weight, form.dtype, form.shape, form.stride)
            for slot, form in zip(layout.slots, geometry, strict=True)
        ]
        self.key = base.untyped_storage().data_ptr()
        self._saved: dict[ViewKey, torch.Tensor] = {}
        self._own_references = storage_references(base) or 0

    def saved(self, key: ViewKey) -> torch.Tensor:
        """The view that a saved tensor was: dtype, storage offset in elements, shape and stride."""
        view = self._saved.get(key)
        if view is None:
            dtype, offset, shape, stride = key
            before = storage_references(self._base) or 0
            with torch.inference_mode(False):
                view = self._base.view(dtype).as_strided(shape, stride, offset)
            self._saved[key] = view
            self._own_references += (storage_references(self._base) or 0) - before
        return view

    @property
    def held(self) -> bool:
        """Whether somebody else has a tensor over this memory: autograd in an operation, or a user."""
        count = storage_references(self._base)
        return count is not None and count > self._own_references


class LayerState:
    """One layer: parameters, host slabs and the tensors over them.

    Parameters
    ----------
    host_parts : sequence of Part, optional
        The elements whose master weights and optimizer state this host has; by default all.

    Attributes
    ----------
    plan : LayerPlan
        How its weights are read, and how its gradients leave.
    traffic : LayerTraffic
        What has been submitted for it so far.
    current : DeviceViews or None
        Where in device memory it was used last.
    residence : Residence or None
        Where its optimizer state and gradients are at home in device memory; None while that is host memory.
    sums : DeviceSlab or None
        Where its gradients alone are at home in device memory; its update is made of what is sent to host memory.
    host_weights, gradients : list of Tensor
        In the parameters' shapes, over host pages as the device sees them; `gradients` has None for
        parameters that get none.
    """

    def __init__(
        self,
        index: int,
        layout: LayerLayout,
        parameters: list[nn.Parameter],
        geometry: list[Geometry],
        arena: SlabPages,
        factory: TensorFactory,
        host_parts: Sequence[Part] | None = None,
    ) -> None:
        self.index = index
        self._host_parts = host_parts
        self.layout = layout
        self.parameters = parameters
        self.geometry = geometry
        self._offsets = [slot.weight for slot in layout.slots]
        self.plan: LayerPlan = STREAMED
        self.traffic = LayerTraffic()
        self.current: DeviceViews | None = None
        self.residence: Residence | None = None
        self.sums: DeviceSlab | None = None
        self._factory = factory
        self._arena = arena
        self._places: OrderedDict[int, DeviceViews] = OrderedDict()
        self.weight_span = arena.cut(layout.weight_nbytes)
        self.gradient_span = arena.cut(layout.gradient_nbytes)
        self.state_span = self._state_slab = arena.cut(layout.state_nbytes)
        self.host_weights = [
            self._mapped(arena, Span(self.weight_span.ptr + slot.weight, slot.spec.nbytes), form, form.dtype)
            for slot, form in zip(layout.slots, geometry, strict=True)
        ]
        self.gradients = [
            self._mapped(arena, self.gradient_place(slot), form, form.gradient_dtype)
            if slot.spec.trainable
            else None
            for slot, form in zip(layout.slots, geometry, strict=True)
        ]
        self._cpu = {
            "weight": factory.host(arena, self.weight_span),
            "gradient": factory.host(arena, self.gradient_span) if layout.gradient_nbytes else None,
            "state": factory.host(arena, self.state_span) if layout.state_nbytes else None,
        }
        self.parameter_versions = [parameter._version for parameter in parameters]

    @property
    def name(self) -> str:
        return self.layout.name

    def cpu(self, slab: str, offset: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """A flat CPU view of ``numel`` elements in slab "weight", "gradient" or "state"."""
        base = self._cpu[slab]
        assert base is not None
        return base[offset : offset + numel * dtype.itemsize].view(dtype)

    def cpu_weight(self, index: int) -> torch.Tensor:
        slot = self.layout.slots[index]
        return self.cpu("weight", slot.weight, self.geometry[index].dtype, slot.spec.numel)

    def cpu_gradient(self, index: int) -> torch.Tensor:
        slot = self.layout.slots[index]
        return self.cpu("gradient", slot.gradient, self.geometry[index].gradient_dtype, slot.spec.numel)

    @property
    def gradients_on_device(self) -> DeviceSlab | None:
        """The device memory where its gradients are at home, if they are."""
        return self.sums if self.residence is None else self.residence.gradient

    def gradient_place(self, slot: Slot) -> Span:
        """Where a gradient lies in host memory."""
        return Span(self.gradient_span.ptr + slot.gradient, slot.spec.gradient_nbytes)

    def cpu_state(self, index: int, kind: str) -> torch.Tensor:
        """Flat fp32 state of a parameter: "master", or by the name that it has in ``optimizer.state``.

        The master of a parameter whose compute dtype is fp32 is the weight itself.
        """
        slot = self.layout.slots[index]
        if kind == "master" and not slot.spec.master:
            return self.cpu_weight(index)
        return self.cpu("state", _place_of(slot, kind), torch.float32, slot.spec.numel)

    def state(self, index: int, kind: str) -> torch.Tensor:
        """Flat fp32 state of a parameter where it is at home; kinds as for `cpu_state`."""
        slot = self.layout.slots[index]
        if self.residence is None or (kind == "master" and not slot.spec.master):
            return self.cpu_state(index, kind)
        start = _place_of(slot, kind)
        return self.residence.state.tensor[start : start + slot.spec.numel * 4].view(torch.float32)

    @torch.no_grad()
    def put_state(self, index: int, kind: str, value: torch.Tensor | None) -> None:
        """Write state of a parameter, as far as this host has it; kinds as for `cpu_state`.

        Parameters
        ----------
        value : Tensor or None
            In the parameter's shape; zeros by default.
        """
        flat = self.state(index, kind)
        own_memory = kind != "master" or self.layout.slots[index].spec.master
        if self._host_parts is None or not own_memory:
            view = self.in_shape(index, flat)
            view.zero_() if value is None else view.copy_(value)
            return
        whole = None
        if value is not None:
            form = self.geometry[index]
            alike = torch.empty_strided(form.shape, form.stride, dtype=flat.dtype, device=flat.device)
            whole = alike.copy_(value).as_strided((flat.numel(),), (1,))
        for part in self._host_parts:
            if part.index == index:
                place = slice(part.start, part.start + part.count)
                flat[place].zero_() if whole is None else flat[place].copy_(whole[place])

    def move_state(self, span: Span) -> Span:
        """Host memory that holds the optimizer state from now on; returns what held it before, in full."""
        old, self._state_slab = self._state_slab, span
        self.state_span = Span(span.ptr, self.layout.state_nbytes)
        self._cpu["state"] = self._factory.host(self._arena, self.state_span)
        return old

    def gradient_home(self, index: int) -> torch.Tensor:
        """Where a parameter's gradient belongs, in the parameter's shape."""
        slot, form = self.layout.slots[index], self.geometry[index]
        base = self.gradients_on_device
        if base is not None:
            with torch.inference_mode(False):
                view = shaped(base.tensor, slot.gradient, form.gradient_dtype, form.shape, form.stride)
            return view.data  # with a version of its own
        home = self.gradients[index]
        assert home is not None
        return home

    def in_shape(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """A flat tensor of a parameter's elements, in the parameter's shape."""
        form = self.geometry[index]
        return flat.as_strided(form.shape, form.stride)

    def on_host(self, slab: str, index: int, arena: SlabPages) -> torch.Tensor:
        """A parameter's "weight" or "gradient" as a CPU tensor with a storage of its own, over the host pages."""
        slot, form = self.layout.slots[index], self.geometry[index]
        if slab == "weight":
            span, dtype = Span(self.weight_span.ptr + slot.weight, slot.spec.nbytes), form.dtype
        else:
            span, dtype = self.gradient_place(slot), form.gradient_dtype
        if span.nbytes == 0:
            return torch.empty_strided(form.shape, form.stride, dtype=dtype, device="cpu")
        return shaped(self._factory.host(arena, span), 0, dtype, form.shape, form.stride)

    def views_at(self, ptr: int) -> DeviceViews:
        """The layer's weights as tensors at a place in the device pool."""
        views = self._places.get(ptr)
        if views is None:
            span = Span(ptr, self.layout.weight_nbytes)
            with torch.inference_mode(False):
                views = DeviceViews(self._factory.device(span), self.layout, self.geometry)
            self._places[ptr] = views
            if len(self._places) > MAX_CACHED_PLACES:
                self._places.popitem(last=False)
        return views

    def forget_places(self) -> None:
        """Drop the views of a device pool that is going away."""
        self._places.clear()
        self.current = None

    def saved_at_home(self, key: ViewKey) -> torch.Tensor:
        """The view of the host pages that a saved tensor was: dtype, offset in the slab in elements, form."""
        dtype, offset, shape, stride = key
        index = self._index_at(offset * dtype.itemsize)
        first = offset - self._offsets[index] // dtype.itemsize
        home = self.host_weights[index]
        with torch.inference_mode(False), torch.no_grad():
            flat = home.as_strided((home.numel(),), (1,), 0).view(dtype)
            return flat.as_strided(shape, stride, first)

    def parameter_at(self, offset: int) -> nn.Parameter:
        """The parameter in whose place a byte of the weight slab lies."""
        return self.parameters[self._index_at(offset)]

    def _index_at(self, offset: int) -> int:
        return bisect.bisect_right(self._offsets, offset) - 1

    def touch(self, indices: Iterable[int]) -> None:
        """Weights are about to change: a backward that still needs the present ones must fail, as in PyTorch."""
        for index in indices:
            torch.autograd.graph.increment_version(self.parameters[index])
            self.parameter_versions[index] = self.parameters[index]._version

    def held(self) -> bool:
        """Whether somebody outside has a tensor over the layer's present device memory."""
        return self.current is not None and self.current.held

    def _mapped(self, arena: SlabPages, span: Span, form: Geometry, dtype: torch.dtype) -> torch.Tensor:
        # A storage of its own for every parameter: torch.save of one must not write the whole slab.
        if span.nbytes == 0:
            return torch.empty_strided(form.shape, form.stride, dtype=dtype, device=self._factory.torch_device)
        with torch.inference_mode(False):
            return shaped(self._factory.mapped(arena, span), 0, dtype, form.shape, form.stride)


def _place_of(slot: Slot, kind: str) -> int:
    return slot.master if kind == "master" else slot.state[kind]
