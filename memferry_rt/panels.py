"""Matrices in host memory, panel by panel through a small ring in device memory.

A ring has the footprint of a few panels and the traffic of one copy: while a kernel reads one panel, the copy
engine fills the next.  Nothing but events orders them, and no thread waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from memferry_allocator import DevicePool, Direction, Driver, Event, Span, Stream, registrations
from memferry_transport import TransferEngine

from .cuts import PANEL, SLOTS, Cut, HostMatrix, Panel, borders, panel_step, ring_nbytes
from .device_kernels.moves import READS, UNIT, DeviceMoves, Spread

__all__ = [
    "PANEL", "SLOTS", "Cut", "HostMatrix", "Panel", "PanelRing", "borders", "panel_step", "ring_nbytes",
]  # fmt: skip


class PanelRing:
    """Slots of device memory that panels pass through.

    Parameters
    ----------
    driver : Driver
    engine : TransferEngine
        Its lane into the device fills the slots.
    pool : DevicePool
    stream : Stream
        The stream of its first use.
    nbytes : int
        Size of a slot, a multiple of 512.
    slots : int
        At least 2.
    moves : DeviceMoves, optional
        A kernel that gathers panels of columns, instead of the copy engine.
    spread : Spread
        Of that kernel.

    Notes
    -----
    One thread uses it at a time.  What the CPU does to a matrix must be over, and known to the lane, when
    `prefetch` or `panels` is called.

    Attributes
    ----------
    bytes_in : int
        Bytes of all panels so far.
    strided_bytes_in : int
        Those of panels of columns, which `engine.bytes_moved` does not count.
    """

    def __init__(
        self,
        driver: Driver,
        engine: TransferEngine,
        pool: DevicePool,
        stream: Stream,
        *,
        nbytes: int = PANEL,
        slots: int = SLOTS,
        moves: DeviceMoves | None = None,
        spread: Spread = READS,
    ) -> None:
        if slots < 2:
            raise ValueError(f"a ring of {slots} slots cannot fill one while another is read; give it 2 or more")
        self._driver = driver
        self._engine = engine
        self._lane = engine.lane(Direction.HOST_TO_DEVICE)
        self._pool = pool
        self._moves = moves
        self._spread = spread
        self._pages = registrations(driver)
        self.slot_nbytes = nbytes
        self.nbytes = slots * nbytes
        self.base = pool.allocate(self.nbytes, stream=stream)
        try:
            self._lane.wait(stream.record())  # whoever had this memory before is done
        except BaseException:
            pool.deallocate(self.base, self.nbytes, stream=stream)
            raise
        self._emptied: list[Event | None] = [None] * slots
        self._next = 0
        self._begun: _Passage | None = None
        self.bytes_in = 0
        self.strided_bytes_in = 0

    def cut(self, matrix: HostMatrix, *, by_columns: bool) -> Cut:
        """Panels that fit a slot.

        Raises
        ------
        ValueError
            Not even one row, or column, fits.
        """
        count, other = (matrix.columns, matrix.rows) if by_columns else (matrix.rows, matrix.columns)
        nbytes = other * matrix.itemsize
        if nbytes > self.slot_nbytes:
            raise ValueError(f"a panel of {nbytes} bytes does not fit the ring's slots of {self.slot_nbytes}")
        return Cut(by_columns, panel_step(count, nbytes, self.slot_nbytes))

    def prefetch(self, matrix: HostMatrix, cut: Cut) -> None:
        """Begin to fill slots with a matrix's first panels, before `panels` is called for it.

        Does nothing while panels of another one are in use.
        """
        if self._begun is None:
            self._begun = _Passage(self, matrix, cut)
            self._begun.fill()

    def panels(self, matrix: HostMatrix, cut: Cut, *, stream: Stream) -> Iterator[Panel]:
        """A matrix's panels in order, each in device memory for what is enqueued on `stream` until the next is
        taken.

        What was prefetched of another matrix is dropped.

        Raises
        ------
        RuntimeError
            Panels of another matrix are in use.
        """
        passage = self._begun
        if passage is not None and passage.taken:
            raise RuntimeError("the ring's panels are in use; finish with one matrix before the next begins")
        if passage is None or not passage.is_of(matrix, cut):
            if passage is not None:
                passage.drop()
            passage = self._begun = _Passage(self, matrix, cut)
        passage.taken = True
        try:
            passage.fill()
            while passage.ready:
                slot, panel, filled = passage.ready.popleft()
                stream.wait(filled)
                try:
                    with self._driver.launch(stream, reads=[panel.span], label="panel"):
                        yield panel
                finally:
                    self._emptied[slot] = stream.record()
                passage.fill()
        finally:
            passage.drop()
            self._begun = None

    def forget(self) -> None:
        """Drop what was prefetched: the matrix is about to change."""
        if self._begun is not None and not self._begun.taken:
            self._begun.drop()
            self._begun = None

    def close(self, stream: Stream) -> None:
        """Give the memory back to the pool; `stream` has done whatever reads panels."""
        if self._begun is not None:
            self._begun.drop()
            self._begun = None
        stream.wait(self._lane.record())
        self._pool.deallocate(self.base, self.nbytes, stream=stream)

    # -- filling ----------------------------------------------------------------------------------------
    def claim(self) -> tuple[int, Span]:
        """The next slot, safe to be filled on the lane."""
        slot = self._next
        self._next = (slot + 1) % len(self._emptied)
        emptied = self._emptied[slot]
        if emptied is not None:
            self._lane.wait(emptied)
        return slot, Span(self.base + slot * self.slot_nbytes, self.slot_nbytes)

    @property
    def slots(self) -> int:
        return len(self._emptied)

    def carry(self, matrix: HostMatrix, cut: Cut, start: int, stop: int, into: Span) -> tuple[Panel, Event]:
        """Enqueue a panel's copy into a claimed slot."""
        if cut.by_columns:
            rows, columns = matrix.rows, stop - start
        else:
            rows, columns = stop - start, matrix.columns
        panel = Panel(start, stop, rows, columns, Span(into.ptr, rows * columns * matrix.itemsize))
        if cut.by_columns and columns < matrix.columns:
            self._carry_columns(matrix, panel)
        else:
            first = matrix.span.ptr + (0 if cut.by_columns else start * columns * matrix.itemsize)
            source = Span(first, panel.span.nbytes)
            self._engine.copy(panel.span, source, Direction.HOST_TO_DEVICE, stream=self._lane)
        self.bytes_in += panel.span.nbytes
        return panel, self._lane.record()

    def _carry_columns(self, matrix: HostMatrix, panel: Panel) -> None:
        width, pitch = panel.columns * matrix.itemsize, matrix.columns * matrix.itemsize
        first = matrix.span.ptr + panel.start * matrix.itemsize
        to = panel.span.ptr
        if len(list(self._pages.split(*matrix.span))) > 1:  # no copy may cross the edge of a registration
            regions = [
                (Span(to + row * width, width), Span(first + row * pitch, width)) for row in range(panel.rows)
            ]
            self._engine.copy_regions(regions, Direction.HOST_TO_DEVICE, stream=self._lane)
            return
        self.strided_bytes_in += panel.span.nbytes
        if self._moves is not None and not any(value % UNIT for value in (first, pitch, width)):
            source = self._driver.host_device_pointer(first, self._engine.device)
            self._moves.copy_rows(
                to, width, source, pitch, width, panel.rows, stream=self._lane, spread=self._spread
            )
        else:
            self._driver.copy_rows(to, width, first, pitch, width, panel.rows, stream=self._lane)


class _Passage:
    """A matrix on its way through the ring."""

    def __init__(self, ring: PanelRing, matrix: HostMatrix, cut: Cut) -> None:
        self._ring = ring
        self._matrix = matrix
        self._cut = cut
        self._left = deque(cut.borders(matrix))
        self.ready: deque[tuple[int, Panel, Event]] = deque()
        self.taken = False

    def is_of(self, matrix: HostMatrix, cut: Cut) -> bool:
        return (self._matrix, self._cut) == (matrix, cut)

    def fill(self) -> None:
        """Enqueue copies into every slot that nobody has."""
        while self._left and len(self.ready) < self._ring.slots:
            slot, into = self._ring.claim()
            panel, filled = self._ring.carry(self._matrix, self._cut, *self._left[0], into)
            self._left.popleft()
            self.ready.append((slot, panel, filled))

    def drop(self) -> None:
        """Nobody reads what is left: the lane itself keeps the slots' next copies behind these."""
        self._left.clear()
        self.ready.clear()
