"""The transfer engine: over several ways, against plain copies of the same run, and what it costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from memferry_allocator import Direction, format_size
from memferry_allocator.driver import COPY_BLOCKS

from ..engine import TransferEngine
from ..options import TransferOptions
from ..paths import Path
from .bench import Bench, Load
from .calibrate import engine_load, open_engine, predicted_s
from .catalogue import case
from .copies import GB, check, clear, host_copy
from .errors import NotRunError
from .hold import has_virtual_clock
from .result import Matrix
from .ways import few_copies, helpers_of, runs_kernels, slice_bytes_of

IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
DIRECT, ENGINE = "direct", "engine"
PLAIN, SEVERAL = "driver.copy", "engine.copy"
SMALL = 4096
_MOST_HELPERS = 6
_CALLS = 200
_PULLED = 64 << 20


def _plain_load(bench: Bench, device: int, direction: Direction, nbytes: int) -> Load:
    return replace(host_copy(bench, device, direction, nbytes).load, times=few_copies(bench, nbytes))


def _rates(bench: Bench, load: Load, nbytes: int) -> list[float]:
    (seconds,) = bench.seconds([load])
    return [nbytes / sample / GB for sample in seconds]


def _helpers(bench: Bench, device: int) -> list[int]:
    found = helpers_of(bench, device)[:_MOST_HELPERS]
    if not found:
        raise NotRunError("no other device can relay: it takes a second one that reaches the first's memory")
    return found


# -- over several ways -----------------------------------------------------------------------------------------
def _multi_path(bench: Bench, direction: Direction) -> Matrix:
    """By set of ways, kind of relay, size of slice or number of blocks, and size; of the bench's first device."""
    device, unit = bench.devices[0], slice_bytes_of(bench)
    helpers = _helpers(bench, device)
    sizes = bench.options.sizes(least=unit, coarse=True)
    variants = _variants(helpers, unit, kernels=all(runs_kernels(bench, helper) for helper in helpers))
    matrix = Matrix.of("ways", [DIRECT, *variants], "bytes", sizes)
    for nbytes in sizes:
        matrix.put(DIRECT, nbytes, _rates(bench, _plain_load(bench, device, direction, nbytes), nbytes))
    for label, options in variants.items():
        with open_engine(bench, device, options, bench.calibration()) as engine:
            _fill_row(bench, matrix, label, engine, direction)
    return matrix


def _variants(helpers: list[int], unit: int, *, kernels: bool) -> dict[str, TransferOptions]:
    """Options of engines by what they are called: each number of helpers staging, and by their kernels."""
    variants: dict[str, TransferOptions] = {}
    for count in range(1, len(helpers) + 1):
        used, most = tuple(helpers[:count]), count == len(helpers)
        name = f"direct + {', '.join(map(str, used))}"
        for slice_bytes in (unit // 2, unit, 2 * unit) if most else (unit,):
            size = format_size(slice_bytes).replace(".00", "")
            variants[f"{name}, slices of {size}"] = TransferOptions(
                helpers=used, relay="staging", slice_bytes=slice_bytes, break_even_bytes=0
            )
        for blocks in (COPY_BLOCKS // 2, COPY_BLOCKS, 2 * COPY_BLOCKS) if most else (COPY_BLOCKS,):
            if kernels:
                variants[f"{name}, kernels of {blocks} blocks"] = TransferOptions(
                    helpers=used, relay="kernel", relay_blocks=blocks, break_even_bytes=0
                )
    return variants


def _fill_row(bench: Bench, matrix: Matrix, label: str, engine: TransferEngine, direction: Direction) -> None:
    """An engine by size, with its bytes compared."""
    sizes = [int(column) for column in matrix.columns]
    clear(bench, engine.device, direction, sizes[-1])
    for nbytes in sizes:
        matrix.put(label, nbytes, _rates(bench, engine_load(bench, engine, direction, nbytes), nbytes))
    check(bench, engine.device, direction, sizes[-1])


@case("multipath_h2d", "host to the first device over several ways, by ways, slices and size")
def _multi_in(bench: Bench) -> Matrix:
    return _multi_path(bench, IN)


@case("multipath_d2h", "first device to host over several ways, by ways, slices and size")
def _multi_out(bench: Bench) -> Matrix:
    return _multi_path(bench, OUT)


def _as_it_comes(bench: Bench, direction: Direction) -> Matrix:
    """An engine with nothing but the calibration, beside plain copies of the same run."""
    device = bench.devices[0]
    matrix = Matrix.of("ways", [DIRECT, ENGINE], "bytes", bench.options.sizes(least=64 << 10, coarse=True))
    for column in matrix.columns:
        nbytes = int(column)
        matrix.put(DIRECT, nbytes, _rates(bench, _plain_load(bench, device, direction, nbytes), nbytes))
    with open_engine(bench, device, TransferOptions(), bench.calibration()) as engine:
        _fill_row(bench, matrix, ENGINE, engine, direction)
    return matrix


@case("engine_h2d", "host to the first device through the engine as it decides by itself, by size")
def _engine_in(bench: Bench) -> Matrix:
    return _as_it_comes(bench, IN)


@case("engine_d2h", "first device to host through the engine as it decides by itself, by size")
def _engine_out(bench: Bench) -> Matrix:
    return _as_it_comes(bench, OUT)


@case("engine_direct", "through the engine without helpers, beside the driver's own copy")
def _direct(bench: Bench) -> Matrix:
    device, nbytes = bench.devices[0], bench.options.nbytes
    matrix = Matrix.of("copy", [PLAIN, SEVERAL], "direction", [direction.value for direction in Direction])
    with open_engine(bench, device, TransferOptions(helpers=()), None) as engine:
        for direction in Direction:
            plain = _plain_load(bench, device, direction, nbytes)
            matrix.put(PLAIN, direction.value, _rates(bench, plain, nbytes))
            clear(bench, device, direction)
            load = engine_load(bench, engine, direction, nbytes)
            matrix.put(SEVERAL, direction.value, _rates(bench, load, nbytes))
            check(bench, device, direction)
    return matrix


@case("both_pulling", "host to all devices at once, through engines that may help one another; the sum")
def _both_pulling(bench: Bench) -> Matrix:
    if len(bench.devices) < 2:
        raise NotRunError("it takes two devices")
    # Many at a time: the first of an engine cannot know that others are about to load, too.
    nbytes, times = min(bench.options.nbytes, _PULLED), max(8, bench.options.copies)
    matrix = Matrix.of("ways", [DIRECT, ENGINE], "bytes", [nbytes])
    loads = [replace(_plain_load(bench, device, IN, nbytes), times=times) for device in bench.devices]
    matrix.put(DIRECT, nbytes, _together(bench, loads, nbytes))
    with ExitStack() as stack:
        engines = [
            stack.enter_context(open_engine(bench, device, TransferOptions(), bench.calibration()))
            for device in bench.devices
        ]
        for engine in engines:
            clear(bench, engine.device, IN, nbytes)
        loads = [replace(engine_load(bench, engine, IN, nbytes), times=times) for engine in engines]
        matrix.put(ENGINE, nbytes, _together(bench, loads, nbytes))
        for engine in engines:
            check(bench, engine.device, IN, nbytes)
    return matrix


def _together(bench: Bench, loads: list[Load], nbytes: int) -> list[float]:
    """GB/s of all loads, until the last has ended."""
    samples = bench.seconds(loads)
    return [len(loads) * nbytes / max(at_once) / GB for at_once in zip(*samples, strict=True)]


# -- what was predicted ----------------------------------------------------------------------------------------
@case("predicted_over_measured", "seconds that the engine counted on, over seconds that it took", unit="ratio")
def _predicted(bench: Bench) -> Matrix:
    device, known = bench.devices[0], bench.calibration()
    sizes = bench.options.sizes(least=64 << 10)
    matrix = Matrix.of("direction", [direction.value for direction in Direction], "bytes", sizes)
    with open_engine(bench, device, TransferOptions(adaptive=False), known) as engine:
        for direction in Direction:
            for nbytes in sizes:
                predicted = _prediction(bench, engine, direction, nbytes)
                (seconds,) = bench.seconds([engine_load(bench, engine, direction, nbytes)])
                matrix.put(direction.value, nbytes, [predicted / sample for sample in seconds])
    return matrix


def _prediction(bench: Bench, engine: TransferEngine, direction: Direction, nbytes: int) -> float:
    """Seconds that the engine counts on for a transfer, or for a plain copy."""
    several = predicted_s(bench, engine, direction, nbytes)
    plain = bench.calibration().cost(Path(engine.device), direction)
    assert plain is not None
    return plain.seconds(nbytes) if several is None else several


# -- what it costs the host --------------------------------------------------------------------------------------
@case(
    "submission",
    "host time to submit a copy of 4 KiB, by this process's clock on any device",
    unit="us",
    higher_is_better=False,
)
def _submission(bench: Bench) -> Matrix:
    matrix = Matrix.of("copy", [PLAIN, SEVERAL], "device", bench.devices)
    for device in bench.devices:
        with open_engine(bench, device, TransferOptions(), None) as engine:
            plain = _plain_load(bench, device, IN, SMALL).enqueue
            several = engine_load(bench, engine, IN, SMALL).enqueue
            # In turns, so that whatever else the machine does falls on both; the first pair warms up.
            pairs = [
                (_submitting(bench, plain, device), _submitting(bench, several, device))
                for _ in range(1 + bench.options.samples)
            ]
        for row, samples in zip(matrix.rows, zip(*pairs[1:], strict=True), strict=True):
            matrix.put(row, device, samples)
    return matrix


def _submitting(bench: Bench, enqueue: Callable[[], object], device: int) -> float:
    """Microseconds of a call, of many in a row, with the device's queue empty at first."""
    began = time.perf_counter()
    for _ in range(_CALLS):
        enqueue()
    seconds = time.perf_counter() - began
    bench.driver.synchronize(device)
    return seconds / _CALLS * 1e6


@case(
    "cpu_share",
    "processor time of this process over wall time, while transfers over several ways run one after the other",
    unit="ratio",
    higher_is_better=False,
)
def _cpu_share(bench: Bench) -> Matrix:
    if has_virtual_clock(bench.driver):
        raise NotRunError("the emulated device copies with this process's own processor time")
    device, nbytes = bench.devices[0], bench.options.nbytes
    _helpers(bench, device)
    matrix = Matrix.of("ways", [ENGINE], "direction", [direction.value for direction in Direction])
    with open_engine(bench, device, TransferOptions(), bench.calibration()) as engine:
        for direction in Direction:
            load = engine_load(bench, engine, direction, nbytes)
            samples = [_share_of_processor(load) for _ in range(bench.options.samples)]
            matrix.put(ENGINE, direction.value, samples)
    return matrix


def _share_of_processor(load: Load) -> float:
    """Of transfers submitted one at a time, the thread asleep while one runs."""
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(max(8, load.times)):
        load.enqueue()
        while not load.stream.query():
            time.sleep(0.0005)
    return (time.process_time() - processor) / (time.perf_counter() - wall)
