"""Layers whose optimizer state and gradients live in device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memferry_allocator import DevicePool, Direction, Span, Stream
from memferry_transport import TransferEngine

from .layer import LayerState, Residence
from .tensors import TensorFactory


class Residents:
    """Moves the state of layers into the device pool, and home again.

    Its host pages stay the layer's: they are stale while it is resident, and get everything back.

    Parameters
    ----------
    engine : TransferEngine
    factory : TensorFactory
    moved : callable
        Told of a layer whose state has another home now, while the memory of both is there.
    """

    def __init__(
        self, engine: TransferEngine, factory: TensorFactory, moved: Callable[[LayerState], None]
    ) -> None:
        self._engine = engine
        self._factory = factory
        self._moved = moved
        self.layers: list[LayerState] = []

    def move_in(self, layers: Iterable[LayerState], pool: DevicePool, stream: Stream) -> None:
        """Make layers resident; their updates are over.  Blocks until they are."""
        for layer in layers:
            state, gradient = (
                Span(pool.allocate(span.nbytes, stream=stream), span.nbytes)
                for span in (layer.state_span, layer.gradient_span)
            )
            self._engine.copy(state, layer.state_span, Direction.HOST_TO_DEVICE, stream=stream)
            layer.residence = Residence(
                state, gradient, self._factory.device(state), self._factory.device(gradient)
            )
            self.layers.append(layer)
            self._moved(layer)
        stream.synchronize()

    def move_out(self, pool: DevicePool, stream: Stream) -> None:
        """Bring everything home; it is there on return, and the device memory is the pool's again."""
        for layer in self.layers:
            residence, layer.residence = layer.residence, None
            assert residence is not None
            state = residence.state_span
            self._engine.copy(layer.state_span, state, Direction.DEVICE_TO_HOST, stream=stream)
            self._moved(layer)
            for span in (state, residence.gradient_span):
                pool.deallocate(span.ptr, span.nbytes, stream=stream)
        self.layers.clear()
        stream.synchronize()
