"""Measuring what the transfer engine decides by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from memferry_allocator import Direction, Driver

from ..calibration import Calibration, Measured
from ..engine import TransferEngine
from ..errors import CalibrationError
from ..options import TransferOptions
from ..paths import Path
from ..topology import Topology, discover
from .bench import Bench, Load
from .copies import check, clear, host_copy
from .errors import CorruptedError
from .fit import fit_cost
from .hold import has_virtual_clock
from .options import MeasureOptions
from .ways import ends, few_copies, slice_bytes_of, way_load, ways_of

OPTIONS = MeasureOptions(nbytes=128 << 20, samples=5, copies=8)
NEVER = 1 << 62  # a break-even that no transfer reaches
_LEAST = 64 << 10
_LEAST_OF_KERNELS = 512 << 10
_MOST = 256 << 20


def calibrate(
    driver: Driver,
    topology: Topology | None = None,
    *,
    devices: Sequence[int] | None = None,
    options: MeasureOptions | None = None,
    slice_bytes: int | None = None,
) -> Calibration:
    """Measure every way of a machine's devices in both directions, and from what size on several ways pay.

    Takes seconds for each pair of devices, and the machine for itself.

    Parameters
    ----------
    driver : Driver
    topology : Topology, optional
        What the calibration counts for; by default what `discover` finds.
    devices : sequence of int, optional
        By default all.
    options : MeasureOptions, optional
        Ways are measured up to 256 MiB, or twice the size given here if that is less.
    slice_bytes : int, optional
        Of relays; by default what the engine takes by itself.

    Raises
    ------
    CalibrationError, CorruptedError
        As for `calibrate_on`.
    """
    machine = (topology or discover(driver)).machine
    chosen = range(driver.device_count) if devices is None else devices
    with Bench(driver, chosen, options or OPTIONS, machine=machine) as bench:
        return calibrate_on(bench, slice_bytes=slice_bytes)


def calibrate_on(
    bench: Bench, *, devices: Sequence[int] | None = None, slice_bytes: int | None = None
) -> Calibration:
    """The same on a bench, for what it says its machine is.

    The bytes of every way are compared.  A relay over which they arrive wrong is left out, so that no engine with
    this calibration takes it.

    Parameters
    ----------
    bench : Bench
    devices : sequence of int, optional
        Those whose ways are measured; by default all of the bench, which relay for one another in any case.
    slice_bytes : int, optional
        Of relays; by default what the engine takes by itself.

    Raises
    ------
    CalibrationError
        The times make no sense.
    CorruptedError
        Bytes arrive wrong over a device's own link.
    """
    chosen = bench.devices if devices is None else tuple(devices)
    size = slice_bytes or slice_bytes_of(bench)
    ways: dict[tuple[Path, Direction], Measured] = {}
    for device in chosen:
        for path in ways_of(bench, device):
            for direction in Direction:
                try:
                    ways[path, direction] = measure_way(bench, path, direction, size)
                except CorruptedError:
                    if path.direct:
                        raise
    known = Calibration(
        machine=bench.machine,
        source="emulated" if has_virtual_clock(bench.driver) else "measured",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        ways=ways,
        slice_bytes=size,
        duplex={device: _duplex(bench, device) for device in chosen},
    )
    several = {
        (device, direction): _several_ways(bench, known, device, direction)
        for device in chosen
        if len(ways_of(bench, device)) > 1
        for direction in Direction
    }
    return replace(
        known,
        break_even_bytes={key: found.break_even_bytes for key, found in several.items()},
        join_s={key: found.join_s for key, found in several.items()},
    )


def measure_way(bench: Bench, path: Path, direction: Direction, slice_bytes: int) -> Measured:
    """One way in one direction, by size.

    Raises
    ------
    CalibrationError, CorruptedError
        As for `calibrate`.
    """
    samples: dict[int, tuple[float, ...]] = {}
    least = _LEAST if path.direct else _LEAST_OF_KERNELS if path.by_kernel else 2 * slice_bytes
    sizes = _sizes(bench, least)
    clear(bench, path.device, direction, sizes[-1])
    for nbytes in sizes:
        with way_load(bench, path, direction, nbytes, slice_bytes) as load:
            samples[nbytes] = tuple(bench.seconds([load])[0])
    check(bench, path.device, direction, sizes[-1])
    try:
        return Measured(fit_cost(samples), samples)
    except ValueError as error:
        raise CalibrationError(f"calibration: device {path.device}, {direction.value}, {path}: {error}") from None


def _sizes(bench: Bench, least: int) -> list[int]:
    """Powers of two, every other one but for the last few."""
    most = min(_MOST, bench.options.largest)
    sizes = [1 << power for power in range(12, 63) if min(least, most) <= 1 << power <= most]
    return sorted({*sizes[::2], *sizes[-3:]})


def _duplex(bench: Bench, device: int) -> float:
    """Both directions at once, as a share of the sum of each alone."""
    nbytes = min(_MOST, bench.options.nbytes)
    loads = [host_copy(bench, device, direction, nbytes).load for direction in Direction]
    alone = [min(bench.seconds([load])[0]) for load in loads]
    together = [min(samples) for samples in bench.seconds(loads)]
    return min(1.0, sum(1 / seconds for seconds in together) / sum(1 / seconds for seconds in alone))


# -- from what size on several ways pay ------------------------------------------------------------------------
class _Several(NamedTuple):
    """From what size on they pay, and how long they take to end together."""

    break_even_bytes: int
    join_s: float


def _several_ways(bench: Bench, known: Calibration, device: int, direction: Direction) -> _Several:
    """The smallest size from which on the engine with all its ways is never behind a plain copy.

    What it takes beyond its prediction is taken where a plain copy is beaten: there it counts.
    """
    found, beyond = NEVER, []
    with open_engine(bench, device, TransferOptions(break_even_bytes=0, adaptive=False), known) as engine:
        for nbytes in reversed(_grid(bench, known.slice_bytes)):
            with way_load(bench, Path(device), direction, nbytes, known.slice_bytes) as plain:
                (alone,) = bench.seconds([plain])
            predicted = predicted_s(bench, engine, direction, nbytes)
            (together,) = bench.seconds([engine_load(bench, engine, direction, nbytes)])
            if median(together) >= median(alone):
                break
            found = nbytes
            if predicted is not None:
                beyond.append(median(together) - predicted)
    return _Several(found, max(0.0, median(beyond)) if beyond else 0.0)


def _grid(bench: Bench, slice_bytes: int) -> list[int]:
    """Sizes from half a slice to eight slices: powers of two, and halfway between them.

    Of less, the host takes longer to submit several ways than they gain; that is not in the device's times.
    """
    most = min(8 * slice_bytes, bench.options.largest)
    powers = [slice_bytes // 2 << power for power in range(5)]
    between = [(low + high) // 2 for low, high in pairwise(powers)]
    return sorted(size for size in (*powers, *between) if size <= most)


# -- engines ---------------------------------------------------------------------------------------------------
@contextmanager
def open_engine(
    bench: Bench, device: int, options: TransferOptions, calibration: Calibration | None
) -> Iterator[TransferEngine]:
    """A transfer engine for as long as the block lasts."""
    engine = TransferEngine(bench.driver, device, options=options, calibration=calibration)
    try:
        yield engine
    finally:
        engine.close()


def predicted_s(bench: Bench, engine: TransferEngine, direction: Direction, nbytes: int) -> float | None:
    """Seconds that an engine counts on for a transfer over several ways; None if it makes a plain copy."""
    dst, src = ends(bench, engine.device, direction, nbytes)
    transfer = engine.copy(dst, src, direction, stream=bench.buffers.stream(engine.device, "engine"))
    transfer.synchronize()
    return transfer.predicted_s


def engine_load(bench: Bench, engine: TransferEngine, direction: Direction, nbytes: int) -> Load:
    """Transfers of `nbytes` through an engine; one comes first, for which it gets its ways ready."""
    stream = bench.buffers.stream(engine.device, "engine")
    dst, src = ends(bench, engine.device, direction, nbytes)
    engine.copy(dst, src, direction, stream=stream).synchronize()
    return Load(stream, lambda: engine.copy(dst, src, direction, stream=stream), few_copies(bench, nbytes))
