"""Kernels that move bytes between device memory and mapped host memory on a few multiprocessors."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memferry_allocator import Driver, Span, Stream

from .emulated import on_the_host, require_emulated

UNIT = 16  # bytes that a thread moves at a time
ROW_BLOCKS = 4  # of `scatter_rows`, whose loads depend on others
MOST_UNITS = 1 << 32  # in one launch
THREADS, WARP = 512, 32  # of a block
INDEX = 8  # bytes of a row's number


@dataclass(frozen=True)
class Spread:
    """How a move is spread over multiprocessors.

    Attributes
    ----------
    blocks : int
        No more than keep the link busy: the others' multiprocessors are somebody else's.
    warps : bool
        Blocks of a single warp with few registers, which are to find room beside those of a product; otherwise
        large ones, each of which has a multiprocessor for itself.
    settle : bool
        No thread goes on before what it has written is in place: less is on its way at a time.
    """

    blocks: int
    warps: bool = False
    settle: bool = False


READS, WRITES = Spread(4), Spread(2)


class DeviceMoves(ABC):
    """Kernels of one device; pointers are of device memory or of mapped host memory, aligned to `UNIT`.

    They do the work of a copy engine where both engines are busy, or where rows are too short for one.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def copy(self, target: int, source: int, nbytes: int, *, stream: Stream, spread: Spread = WRITES) -> None:
        """Enqueue a copy; `nbytes` is a multiple of `UNIT`, as are pointers."""
        self.copy_rows(target, nbytes, source, nbytes, nbytes, 1, stream=stream, spread=spread)

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        *,
        stream: Stream,
        spread: Spread = READS,
    ) -> None:
        """Enqueue copies of `rows` rows of `width` bytes, which begin every so many bytes.

        Raises
        ------
        ValueError
            Something is no multiple of `UNIT`, or rows are 64 GiB or more.
        """
        if any(value % UNIT for value in (target, target_pitch, source, source_pitch, width)):
            raise ValueError(f"rows of {width} bytes, or their places, are not aligned to {UNIT} bytes")
        if rows * max(width, target_pitch, source_pitch) // UNIT >= MOST_UNITS:
            raise ValueError(f"{rows} rows of {width} bytes are more than one kernel moves; move them in parts")
        if not width or not rows:
            return
        with self._driver.launch(
            stream,
            reads=row_spans(source, source_pitch, width, rows),
            writes=row_spans(target, target_pitch, width, rows),
            label="move rows",
        ):
            self._move(stream, target, target_pitch, source, source_pitch, width, rows, spread)

    @abstractmethod
    def scatter_rows(
        self,
        target: int,
        rows: int,
        values: int,
        skip: int,
        width: int,
        count: int,
        *,
        stream: Stream,
        blocks: int = ROW_BLOCKS,
    ) -> None:
        """Enqueue writing rows of a table, each of them once: ``table[rows[r]] = values[r]``.

        The caller declares what is touched with `Driver.launch`; which rows those are only the device knows.

        Parameters
        ----------
        target : int
            The table, of rows of `width` bytes.
        rows : int
            `count` row numbers of 8 bytes, no two of them alike.
        values : int
            `count` rows without gaps; 0 writes zeros.
        skip : int
            `count` bytes; rows whose byte is not 0 are left out.  0 leaves out none.
        width : int
            A multiple of `UNIT`.
        """

    @abstractmethod
    def _move(
        self,
        stream: Stream,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        spread: Spread,
    ) -> None: ...


class CudaMoves(DeviceMoves):
    """The kernels of an NVIDIA device.

    Raises
    ------
    DeviceKernelError
        They cannot be compiled here.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        super().__init__(driver)
        from .module import open_module  # the bindings are only needed where a device is used

        self._module = open_module(driver, device)

    def scatter_rows(
        self,
        target: int,
        rows: int,
        values: int,
        skip: int,
        width: int,
        count: int,
        *,
        stream: Stream,
        blocks: int = ROW_BLOCKS,
    ) -> None:
        units = width // UNIT
        self._module.launch(
            "memferry_scatter_rows",
            stream,
            threads=units * count,
            arguments=self._module.sizes(target, rows, values, skip, units, count),
            blocks=blocks,
        )

    def _move(
        self,
        stream: Stream,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        spread: Spread,
    ) -> None:
        units = width // UNIT * rows
        arguments: list[Any] = [
            ctypes.c_size_t(target),
            ctypes.c_uint(target_pitch // UNIT),
            ctypes.c_size_t(source),
            ctypes.c_uint(source_pitch // UNIT),
            ctypes.c_uint(width // UNIT),
            ctypes.c_uint(units),
            ctypes.c_int(spread.settle),
        ]
        name, block = ("memferry_seep", WARP) if spread.warps else ("memferry_move", THREADS)
        self._module.launch(name, stream, threads=units, arguments=arguments, blocks=spread.blocks, block=block)


class EmulatedMoves(DeviceMoves):
    """The same on the emulated device's memory, in the order of the stream."""

    def scatter_rows(
        self,
        target: int,
        rows: int,
        values: int,
        skip: int,
        width: int,
        count: int,
        *,
        stream: Stream,
        blocks: int = ROW_BLOCKS,
    ) -> None:
        numbers = (ctypes.c_int64 * count).from_address(self._at(rows, count * INDEX))
        skipped = bytes(count) if not skip else ctypes.string_at(self._at(skip, count), count)
        for place, row in enumerate(numbers):
            if skipped[place]:
                continue
            there = self._at(target + row * width, width)
            if values:
                ctypes.memmove(there, self._at(values + place * width, width), width)
            else:
                ctypes.memset(there, 0, width)

    def _move(
        self,
        stream: Stream,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        spread: Spread,
    ) -> None:
        for row in range(rows):
            there, here = (
                self._at(start + row * pitch, width)
                for start, pitch in ((target, target_pitch), (source, source_pitch))
            )
            ctypes.memmove(there, here, width)

    def _at(self, ptr: int, nbytes: int) -> int:
        return on_the_host(self._driver, ptr, nbytes)


def row_spans(start: int, pitch: int, width: int, rows: int) -> Iterator[Span]:
    """What rows touch; one span where they lie without gaps.  Made only as far as somebody looks."""
    if pitch == width:
        yield Span(start, width * rows)
        return
    for row in range(rows):
        yield Span(start + row * pitch, width)


def open_device_moves(driver: Driver, device: int) -> DeviceMoves:
    """The kernels of a device.

    Raises
    ------
    DeviceKernelError
        There are none on this machine; copy engines, or the framework, keep the work.
    """
    if driver.name == "cuda":
        return CudaMoves(driver, device)
    require_emulated(driver)
    return EmulatedMoves(driver)
