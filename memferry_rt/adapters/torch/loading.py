"""Weights where a module's forward or backward reads them: in device memory, or in host pages."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from memferry_allocator import Stream, View

from ...plan.modes import WeightMode
from .layer import DeviceViews, LayerState, ViewKey
from .saved import in_backward
from .support import Support

if TYPE_CHECKING:
    from .runtime import Runtime


class Loading:
    """Brings layers' weights to where they are read, and takes down what the compute stream waits for.

    Parameters
    ----------
    runtime : Runtime
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last_used: LayerState | None = None

    def end_iteration(self) -> None:
        """The next use of any layer is a new one."""
        self._last_used = None

    def load(self, layer: LayerState, support: Support) -> DeviceViews | None:
        """Bring a layer into device memory and pin it, or None where such a module reads it at home."""
        runtime = self._runtime
        if runtime.plans.failure:
            runtime.require_open()
        training, backward = torch.is_grad_enabled(), in_backward()
        if backward and runtime.autopilot is not None:
            runtime.autopilot.recomputes = True
        if layer.plan.reads_at_home(support, backward=backward):
            self._read_at_home(layer, training=training, backward=backward)
            return None
        views = self._use(layer, training=training, backward=backward)
        runtime.memory.cache.pin(layer.index)
        return views

    def unpin(self, layer: LayerState) -> None:
        """A module's use of a layer that was loaded for it is over."""
        self._runtime.memory.cache.unpin(layer.index)

    def bring_back(self, layer: LayerState, key: ViewKey, at_home: bool) -> torch.Tensor:
        """The view of a layer's weights that backward needs, where its mode reads them."""
        if not at_home or layer.plan.weight is WeightMode.DHA_THEN_LOAD:
            return self._use(layer, training=True, backward=True).saved(key)
        self._read_at_home(layer, training=True, backward=True)
        view = layer.saved_at_home(key)
        layer.traffic.read_in_place += view.numel() * view.element_size()
        return view

    def _use(self, layer: LayerState, *, training: bool, backward: bool) -> DeviceViews:
        runtime = self._runtime
        stream = runtime.stream()
        with self._stalling(layer, stream, training=training):
            ptr = runtime.memory.cache.use(layer.index, stream, training=training, backward=backward)
        views = layer.current = layer.views_at(ptr)
        runtime.saved.watch(views.key, layer)
        return views

    def _read_at_home(self, layer: LayerState, *, training: bool, backward: bool) -> View:
        """Let the current stream read a layer's host pages, which have its newest weights then."""
        runtime = self._runtime
        stream = runtime.stream()
        with self._stalling(layer, stream, training=training):
            view = runtime.memory.cache.read_in_place(layer.index, stream, training=training, backward=backward)
        runtime.saved.watch_home(layer)
        return view

    def read_panels(self, layer: LayerState) -> View:
        """The host pages of a layer whose weights come panel by panel, for the current stream."""
        return self._read_at_home(layer, training=torch.is_grad_enabled() or in_backward(), backward=in_backward())

    def open_ahead(self, layer: LayerState) -> View | None:
        """The host pages of a layer that is not used yet, or None while they are being updated."""
        runtime = self._runtime
        if not runtime.updates.poll(layer.index):
            return None
        return runtime.memory.cache.open_at_home(layer.index, runtime.stream())

    @contextlib.contextmanager
    def _stalling(self, layer: LayerState, stream: Stream, *, training: bool) -> Iterator[None]:
        """Wait until a layer's update is made or enqueued, and measure that and what `stream` waits for then."""
        runtime = self._runtime
        begin = runtime.stalls.mark(stream) if training and layer is not self._last_used else None
        blocked = time.perf_counter()
        self._settle_layer(layer)
        blocked = time.perf_counter() - blocked
        yield
        if begin is not None:
            self._last_used = layer
            runtime.stalls.stalled(begin, stream, math.inf if runtime.step_updates.first_use(layer) else blocked)

    def _settle_layer(self, layer: LayerState) -> None:
        """Block until a layer's update is made or, on the device, enqueued: its weights may then be acquired."""
        self._runtime.gradients.used(layer)
        self._runtime.updates.wait(layer.index)

    def settle_in_place(self, layer: LayerState) -> None:
        """Block until a layer may be read at home by a module that reads it there, whatever its mode."""
        self._runtime.gradients.used(layer)
        self._runtime.settle_home(layer)
