"""A transfer engine that counts for which layer it copies, and how the shadow space uses it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from memferry_allocator import Direction, Driver, Span, Stream
from memferry_transport import Transfer, TransferEngine

from ...helpers import NO_HELP, Help, begin_training
from ...traffic import LayerTraffic
from .layer import LayerState


class CountedEngine(TransferEngine):
    """Copies as `TransferEngine` does; what is submitted counts for the layer whose host memory it touches.

    Until it is closed, its device is known as one on which a model trains.

    Parameters
    ----------
    driver, device
        See `TransferEngine`.
    layers : sequence of LayerState
    help : Help
        Devices whose links carry a share of long transfers.
    """

    def __init__(self, driver: Driver, device: int, layers: Sequence[LayerState], help: Help = NO_HELP) -> None:
        super().__init__(driver, device, options=help.options, calibration=help.calibration)
        self._training = begin_training(driver, device, help.helpers if help.named else ())
        self._layers = layers
        fixed = [(span.ptr, span.nbytes, layer) for layer in layers for span in _fixed_slabs(layer)]
        self._slabs = sorted(fixed, key=lambda slab: slab[0])
        self._starts = [start for start, _, _ in self._slabs]

    def close(self) -> None:
        self._training.end()
        super().close()

    def start(
        self,
        regions: Sequence[tuple[Span, Span]],
        direction: Direction | None = None,
        *,
        stream: Stream,
        direct: bool = False,
    ) -> Transfer:
        transfer = super().start(regions, direction, stream=stream, direct=direct)
        for dst, src in regions:
            self._count(dst, src, direction)
        return transfer

    def _copy_plainly(self, dst: Span, src: Span, direction: Direction | None, stream: Stream) -> Transfer | None:
        transfer = super()._copy_plainly(dst, src, direction, stream)
        if transfer is not None:
            self._count(dst, src, direction)
        return transfer

    def _count(self, dst: Span, src: Span, direction: Direction | None) -> None:
        if direction is Direction.HOST_TO_DEVICE:
            self.traffic_at(src).copied_in += src.nbytes
        elif direction is Direction.DEVICE_TO_HOST:
            self.traffic_at(dst).copied_out += dst.nbytes

    def traffic_at(self, host: Span) -> LayerTraffic:
        """Of the layer that host memory is a part of."""
        found = bisect.bisect_right(self._starts, host.ptr) - 1
        if found >= 0:
            start, nbytes, layer = self._slabs[found]
            if host.ptr < start + nbytes:
                return layer.traffic
        for layer in self._layers:  # slabs of state change hands
            if layer.state_span.ptr <= host.ptr < layer.state_span.ptr + layer.state_span.nbytes:
                return layer.traffic
        return LayerTraffic()


class SafeCopier:
    """An engine's copies, some of them over the device's own link alone.

    Should a helper be lost, what it has not brought is copied once more from where it was; of what moves for good
    there is no other copy then.  A `memferry_allocator.Copier`.

    Parameters
    ----------
    engine : TransferEngine
    direct : direction, one or several
        Of which helpers carry nothing.
    """

    def __init__(self, engine: TransferEngine, *direct: Direction) -> None:
        self._engine = engine
        self._direct = direct

    def lane(self, direction: Direction) -> Stream:
        return self._engine.lane(direction)

    def copy(self, dst: Span, src: Span, direction: Direction, *, stream: Stream) -> Transfer:
        return self._engine.copy(dst, src, direction, stream=stream, direct=direction in self._direct)


def _fixed_slabs(layer: LayerState) -> list[Span]:
    return [span for span in (layer.weight_span, layer.gradient_span) if span.nbytes]
