"""Layers whose optimizer state and gradients, or whose gradients alone, live in device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memferry_allocator import Copier, DevicePool, Direction, Span, Stream

from .layer import DeviceSlab, LayerState, Residence
from .tensors import TensorFactory


class Residents:
    """Moves the state of layers into the device pool, and home again.

    Its host pages stay the layer's: they are stale while it is resident, and get everything back.

    Parameters
    ----------
    engine : Copier
        Of state that moves there is no other copy: over ways on which none is lost.
    factory : TensorFactory
    moved : callable
        Told of a layer whose state has another home now, while the memory of both is there.
    """

    def __init__(self, engine: Copier, factory: TensorFactory, moved: Callable[[LayerState], None]) -> None:
        self._engine = engine
        self._factory = factory
        self._moved = moved
        self.layers: list[LayerState] = []
        self.summed: list[LayerState] = []  # whose gradients alone live in the pool

    def move_in(self, layers: Iterable[LayerState], pool: DevicePool, stream: Stream) -> None:
        """Make layers resident; their updates are over.  Blocks until they are."""
        for layer in layers:
            state = self._slab(layer.state_span.nbytes, pool, stream)
            gradient = self._slab(layer.gradient_span.nbytes, pool, stream)
            self._engine.copy(state.span, layer.state_span, Direction.HOST_TO_DEVICE, stream=stream)
            layer.residence = Residence(state, gradient)
            self.layers.append(layer)
            self._moved(layer)
        stream.synchronize()

    def sum_here(self, layers: Iterable[LayerState], pool: DevicePool, stream: Stream) -> None:
        """Let gradients of layers be summed on the device; nothing reads their old home."""
        for layer in layers:
            layer.sums = self._slab(layer.gradient_span.nbytes, pool, stream)
            self.summed.append(layer)
            self._moved(layer)

    def move_out(self, pool: DevicePool, stream: Stream) -> None:
        """Bring everything home; it is there on return, and the device memory is the pool's again."""
        for layer in self.layers:
            residence, layer.residence = layer.residence, None
            assert residence is not None
            self._engine.copy(layer.state_span, residence.state.span, Direction.DEVICE_TO_HOST, stream=stream)
            self._left(layer, [residence.state, residence.gradient], pool, stream)
        for layer in self.summed:
            sums, layer.sums = layer.sums, None
            assert sums is not None
            self._left(layer, [sums], pool, stream)
        self.layers.clear()
        self.summed.clear()
        stream.synchronize()

    def _slab(self, nbytes: int, pool: DevicePool, stream: Stream) -> DeviceSlab:
        span = Span(pool.allocate(nbytes, stream=stream), nbytes)
        return DeviceSlab(span, self._factory.device(span))

    def _left(self, layer: LayerState, slabs: Iterable[DeviceSlab], pool: DevicePool, stream: Stream) -> None:
        self._moved(layer)
        for slab in slabs:
            pool.deallocate(slab.span.ptr, slab.span.nbytes, stream=stream)
