"""Copies by size, and by the kind of host memory."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from memferry_allocator import Direction, Span

from .bench import Bench, Load
from .buffers import Bytes
from .catalogue import case
from .copies import GB, check, clear, host_copy
from .errors import NotRunError
from .pinned import pinned_memory
from .result import Matrix

IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
REGISTERED, PINNED, PAGEABLE = "registered", "pinned by the driver", "pageable"


def _by_size(bench: Bench, direction: Direction) -> Matrix:
    sizes = bench.options.sizes()
    matrix = Matrix.of("device", bench.devices, "bytes", sizes)
    for device in bench.devices:
        clear(bench, device, direction, sizes[-1])
        for nbytes in sizes:
            copy = host_copy(bench, device, direction, nbytes)
            (seconds,) = bench.seconds([copy.load])
            matrix.put(device, nbytes, copy.rates(seconds))
        check(bench, device, direction, sizes[-1])
    return matrix


def _of_memory(bench: Bench, device: int, direction: Direction, home: Bytes, *, hold: bool) -> list[float]:
    """Copies to or from host memory `home`; samples in GB/s."""
    driver, buffers, nbytes = bench.driver, bench.buffers, bench.options.nbytes
    stream, address = buffers.stream(device, direction.value), int(home.ctypes.data)
    with driver.host_access(writes=[Span(address, nbytes)], label="host memory"):
        home[:] = buffers.host_array(device, "source")[:nbytes] if direction is IN else 0
    if direction is IN:
        dst, src = buffers.device(device, "target"), address
        clear(bench, device, direction)
    else:
        dst, src = address, buffers.device(device, "source")
    times = bench.options.copies if hold else min(2, bench.options.copies)  # pageable memory is slow
    load = Load(stream, lambda: driver.copy(dst, src, nbytes, stream=stream), times)
    (seconds,) = bench.seconds([load], hold=hold)
    if direction is IN:
        check(bench, device, direction)
    elif bench.options.verify:
        buffers.check_bytes(home, device, of=device)
    return [nbytes / sample / GB for sample in seconds]


def _by_memory(bench: Bench, direction: Direction) -> Matrix:
    nbytes = bench.options.nbytes
    matrix = Matrix.of("host memory", (REGISTERED, PINNED, PAGEABLE), "device", bench.devices)
    for device in bench.devices:
        registered = bench.buffers.host_array(device, "home")[:nbytes]
        matrix.put(REGISTERED, device, _of_memory(bench, device, direction, registered, hold=True))
        with suppress(NotRunError), pinned_memory(bench.driver, device, nbytes) as pinned:
            matrix.put(PINNED, device, _of_memory(bench, device, direction, pinned, hold=True))
        pageable = np.empty(nbytes, np.uint8)
        matrix.put(PAGEABLE, device, _of_memory(bench, device, direction, pageable, hold=False))
        bench.driver.synchronize(device)
    return matrix


@case("host_to_device_by_size", "one copy from host to device, by size")
def _in_by_size(bench: Bench) -> Matrix:
    return _by_size(bench, IN)


@case("device_to_host_by_size", "one copy from device to host, by size")
def _out_by_size(bench: Bench) -> Matrix:
    return _by_size(bench, OUT)


@case("host_to_device_by_memory", "host to device, by the kind of host memory")
def _in_by_memory(bench: Bench) -> Matrix:
    return _by_memory(bench, IN)


@case("device_to_host_by_memory", "device to host, by the kind of host memory")
def _out_by_memory(bench: Bench) -> Matrix:
    return _by_memory(bench, OUT)
