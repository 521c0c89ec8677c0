"""Weights panel by panel: the ring of a model, whose layers' host pages it reads, and what it read for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from memferry_allocator import DevicePool, Direction, Driver, Event, Span, Stream, View

from ...cuts import SLOTS, Cut, HostMatrix, Panel
from ...panels import PanelRing
from ...plan.modes import WeightMode
from .counted import CountedEngine
from .layer import LayerState
from .operators.linear import WeightPanel
from .tensors import TensorFactory


@dataclass(frozen=True)
class _Pass:
    """A matrix that goes through the ring, by rows for a forward or by columns for an input gradient."""

    layer: LayerState
    index: int
    by_columns: bool

    @property
    def matrix(self) -> HostMatrix:
        rows, columns = self.layer.geometry[self.index].shape
        slot = self.layer.layout.slots[self.index]
        span = Span(self.layer.weight_span.ptr + slot.weight, slot.spec.nbytes)
        return HostMatrix(span, rows, columns, slot.spec.itemsize)


class _CountedRing(PanelRing):
    """Counts strided copies, which the engine does not see, for the layer that they are of."""

    def carry(self, matrix: HostMatrix, cut: Cut, start: int, stop: int, into: Span) -> tuple[Panel, Event]:
        before = self.strided_bytes_in
        result = super().carry(matrix, cut, start, stop, into)
        assert isinstance(self._engine, CountedEngine)
        self._engine.traffic_at(matrix.span).copied_in += self.strided_bytes_in - before
        return result


class WeightPanels:
    """Brings matrices of layers through a ring in the device pool.

    Parameters
    ----------
    driver : Driver
    engine : CountedEngine
    factory : TensorFactory
    stream : callable
        The stream on which the calling thread's kernels run.
    read : callable
        Lets the current stream read a layer's host pages, in forward or in backward.
    ahead : callable
        Opens them before that, or gives None where the layer's weights are not final yet.

    Attributes
    ----------
    strided_bytes_in : int
        What rings so far have copied without the engine.
    """

    def __init__(
        self,
        driver: Driver,
        engine: CountedEngine,
        factory: TensorFactory,
        *,
        stream: Callable[[], Stream],
        read: Callable[[LayerState], View],
        ahead: Callable[[LayerState], View | None],
    ) -> None:
        self._driver = driver
        self._engine = engine
        self._factory = factory
        self._stream = stream
        self._read = read
        self._ahead = ahead
        self._lane = engine.lane(Direction.HOST_TO_DEVICE)
        self._ring: _CountedRing | None = None
        self._tensors: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
        self._closed_bytes = 0
        self._after: dict[_Pass, _Pass] = {}
        self._last: _Pass | None = None

    @property
    def strided_bytes_in(self) -> int:
        return self._closed_bytes + (0 if self._ring is None else self._ring.strided_bytes_in)

    def open(self, pool: DevicePool, nbytes: int, stream: Stream) -> None:
        """Take a ring of `nbytes` from the pool; none for 0."""
        if nbytes:
            self._ring = _CountedRing(self._driver, self._engine, pool, stream, nbytes=nbytes // SLOTS)

    def close(self, stream: Stream) -> None:
        """Give the ring back; whatever reads panels is enqueued on `stream`."""
        self._after.clear()
        self._last = None
        self._tensors.clear()
        if self._ring is not None:
            self._ring.close(stream)
            self._closed_bytes += self._ring.strided_bytes_in
            self._ring = None

    def holds(self, layer: LayerState, index: int) -> bool:
        """Whether a matrix lies row by row, and its rows and columns fit the ring."""
        form = layer.geometry[index]
        rows, columns = form.shape
        if self._ring is None or form.stride != (columns, 1):
            return False
        return max(rows, columns) * form.dtype.itemsize <= self._ring.slot_nbytes

    def steps(self, layer: LayerState, index: int) -> tuple[int, int]:
        """Rows, and columns, of a panel of a matrix."""
        assert self._ring is not None
        matrix = _Pass(layer, index, False).matrix
        return self._ring.cut(matrix, by_columns=False).step, self._ring.cut(matrix, by_columns=True).step

    def pieces(self, layer: LayerState, index: int, *, by_columns: bool) -> Iterator[WeightPanel]:
        """A matrix's panels in order, each valid on the current stream until the next is taken."""
        ring, stream = self._ring, self._stream()
        assert ring is not None
        this = _Pass(layer, index, by_columns)
        self._open_for_lane(self._read(layer))
        cut = ring.cut(this.matrix, by_columns=by_columns)
        dtype = layer.geometry[index].dtype
        for panel in ring.panels(this.matrix, cut, stream=stream):
            yield panel.start, panel.stop, self._tensor(panel, dtype)
        if self._last is not None:
            self._after[self._last] = this
        self._last = this
        self._begin_next(ring, this)

    def forget(self) -> None:
        """What was read ahead may not be the newest for long."""
        if self._ring is not None:
            self._ring.forget()

    def end_iteration(self) -> None:
        """An update has been made: nothing is read ahead from one iteration into the next."""
        self._last = None

    def _begin_next(self, ring: PanelRing, this: _Pass) -> None:
        """The first panels of what came after this one the last time."""
        following = self._after.get(this)
        if following is None or following.layer.plan.weight is not WeightMode.RING:
            return
        view = self._ahead(following.layer)
        if view is not None:
            self._open_for_lane(view)
            matrix = following.matrix
            ring.prefetch(matrix, ring.cut(matrix, by_columns=following.by_columns))

    def _open_for_lane(self, view: View) -> None:
        """The lane's copies are readers of the pages, too: who writes waits for them."""
        if self._lane not in view.streams:
            view.record_stream(self._lane)

    def _tensor(self, panel: Panel, dtype: torch.dtype) -> torch.Tensor:
        key = (*panel.span, dtype)
        flat = self._tensors.get(key)
        if flat is None:
            flat = self._tensors[key] = self._factory.device(panel.span).view(dtype)
        return flat.view(panel.rows, panel.columns)
