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
        self._taken: dict[LayerState, list[Span]] = {}  # of the pool, until it is given back

    @property
    def layers(self) -> list[LayerState]:
        """Those whose state lives in the pool."""
        return [layer for layer in self._taken if layer.residence is not None]

    @property
    def summed(self) -> list[LayerState]:
        """Those whose gradients alone do."""
        return [layer for layer in self._taken if layer.sums is not None]

    def move_in(self, layers: Iterable[LayerState], pool: DevicePool, stream: Stream) -> None:
        """Make layers resident; their updates are over.  Blocks until they are."""
        for layer in layers:
            state = self._take(layer, layer.state_span.nbytes, pool, stream)
            gradient = self._take(layer, layer.gradient_span.nbytes, pool, stream)
            self._engine.copy(state.span, layer.state_span, Direction.HOST_TO_DEVICE, stream=stream)
            layer.residence = Residence(state, gradient)
            self._moved(layer)
        stream.synchronize()

    def sum_here(self, layers: Iterable[LayerState], pool: DevicePool, stream: Stream) -> None:
        """Let gradients of layers be summed on the device; nothing reads their old home."""
        for layer in layers:
            layer.sums = self._take(layer, layer.gradient_span.nbytes, pool, stream)
            self._moved(layer)

    def move_out(self, pool: DevicePool, stream: Stream) -> None:
        """Bring everything home; it is there on return, and the device memory is the pool's again.

        It begins where an earlier call, of this or of those above, has failed.
        """
        for layer, spans in list(self._taken.items()):
            if layer.residence is not None:
                source = layer.residence.state.span
                self._engine.copy(layer.state_span, source, Direction.DEVICE_TO_HOST, stream=stream)
            layer.residence = layer.sums = None
            self._moved(layer)
            while spans:
                pool.deallocate(*spans[-1], stream=stream)
                spans.pop()
            del self._taken[layer]
        stream.synchronize()

    def _take(self, layer: LayerState, nbytes: int, pool: DevicePool, stream: Stream) -> DeviceSlab:
        span = Span(pool.allocate(nbytes, stream=stream), nbytes)
        self._taken.setdefault(layer, []).append(span)
        return DeviceSlab(span, self._factory.device(span))
