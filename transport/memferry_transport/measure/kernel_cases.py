"""Copies by the multiprocessors, and latencies: nvbandwidth's cases, and ours of few thread blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from memferry_allocator import Direction, Span

from .bench import Bench, Load
from .catalogue import case
from .copies import GB, Side, check, clear
from .errors import CorruptedError
from .kernels import Kernels, open_kernels
from .peer_cases import peers
from .result import Matrix

IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
BLOCKS = (1, 2, 4, 8, 16, 32)
CHAIN_BYTES = 2 << 20
_LINE = 128  # bytes from one pointer to the next that is in memory
HOPS = 20_000


def _host_rates(bench: Bench, device: int, direction: Direction, blocks: int | None) -> list[float]:
    """A kernel of `device` copies from, or to, host memory that it reaches in place; samples in GB/s."""
    kernels = open_kernels(bench.driver, device)
    buffers, nbytes = bench.buffers, bench.options.nbytes
    stream = buffers.stream(device, "kernel")
    if direction is IN:
        home = buffers.host(device, "source").ptr
        src, dst = bench.driver.host_device_pointer(home, device), buffers.device(device, "target")
    else:
        home = buffers.host(device, "home").ptr
        src, dst = buffers.device(device, "source"), bench.driver.host_device_pointer(home, device)
    clear(bench, device, direction)
    times = max(1, bench.options.copies // 4) if blocks else bench.options.copies  # few blocks are slow
    load = Load(stream, lambda: kernels.copy(dst, src, nbytes, stream=stream, blocks=blocks), times)
    (seconds,) = bench.seconds([load])
    check(bench, device, direction)
    return [nbytes / sample / GB for sample in seconds]


def _host_matrix(bench: Bench, direction: Direction) -> Matrix:
    matrix = Matrix.of("host", ["host"], "device", bench.devices)
    for device in bench.devices:
        matrix.put("host", device, _host_rates(bench, device, direction, None))
    return matrix


def _by_blocks(bench: Bench, direction: Direction) -> Matrix:
    matrix = Matrix.of("device", bench.devices, "blocks", BLOCKS)
    for device in bench.devices:
        for blocks in BLOCKS:
            matrix.put(device, blocks, _host_rates(bench, device, direction, blocks))
    return matrix


def _peer_rates(bench: Bench, side: Side) -> Matrix:
    matrix = Matrix.of("device", bench.devices, "peer", bench.devices)
    buffers, nbytes = bench.buffers, bench.options.nbytes
    for device, peer in peers(bench):
        kernels, stream = open_kernels(bench.driver, device), buffers.stream(device, "kernel")
        source, target = (peer, device) if side is Side.READ else (device, peer)
        src, dst = buffers.device(source, "source"), buffers.device(target, "target")
        buffers.clear_device(target, dst, nbytes)
        load = Load(stream, _copying(kernels, dst, src, nbytes, stream), bench.options.copies)
        (seconds,) = bench.seconds([load])
        if bench.options.verify:
            buffers.check_device(target, dst, nbytes, of=source)
        matrix.put(device, peer, [nbytes / sample / GB for sample in seconds])
    return matrix


def _copying(kernels: Kernels, dst: int, src: int, nbytes: int, stream: object) -> Callable[[], None]:
    return lambda: kernels.copy(dst, src, nbytes, stream=stream)  # type: ignore[arg-type]


def _order() -> npt.NDArray[np.uint64]:
    """The lines of a chain in the order in which it leads through all of them: at random, from the first on."""
    order = np.random.default_rng(0).permutation(CHAIN_BYTES // _LINE).astype(np.uint64)
    return np.roll(order, -int(np.argmin(order)))


def chain(base: int) -> npt.NDArray[np.uint64]:
    """What memory at `base` holds: in every line a pointer to another line, through all of them and round."""
    order, words = _order(), np.zeros(CHAIN_BYTES // 8, dtype=np.uint64)
    words[order * np.uint64(_LINE // 8)] = np.uint64(base) + np.roll(order, -1) * np.uint64(_LINE)
    return words


def chain_end(base: int, hops: int) -> int:
    """Where so many pointers lead from `base`."""
    order = _order()
    return base + int(order[hops % len(order)]) * _LINE


def _latency(bench: Bench, device: int, base: int) -> list[float]:
    """Nanoseconds from one pointer to the next.

    Raises
    ------
    CorruptedError
        The chase has not ended where the chain leads.
    """
    kernels, stream = open_kernels(bench.driver, device), bench.buffers.stream(device, "kernel")
    result, home = bench.buffers.device(device, "chased", 256), bench.buffers.host(device, "chased", 4096)
    span = Span(base, CHAIN_BYTES)
    (seconds,) = bench.seconds([Load(stream, lambda: kernels.chase(span, HOPS, result, stream=stream), 1)])
    bench.driver.copy(home.ptr, result, 8, stream=stream)
    stream.synchronize()
    found = int(bench.buffers.host_array(device, "chased")[:8].view(np.uint64)[0])
    if found != chain_end(base, HOPS):
        raise CorruptedError(f"verification: {HOPS} pointers from {base:#x} led device {device} to {found:#x}")
    return [sample / HOPS * 1e9 for sample in seconds]


def _write_chain(bench: Bench, owner: int, base: int) -> None:
    """Write a chain of the pointers that begin at `base` to host memory."""
    with bench.driver.host_access(writes=[bench.buffers.host(owner, "chain", CHAIN_BYTES)], label="chain"):
        bench.buffers.host_array(owner, "chain")[:] = chain(base).view(np.uint8)


@case(
    "host_to_device_memcpy_sm",
    "a kernel copies from host memory",
    form="memcpy SM CPU(row) -> GPU(column) bandwidth (GB/s)",
)
def _in(bench: Bench) -> Matrix:
    return _host_matrix(bench, IN)


@case(
    "device_to_host_memcpy_sm",
    "a kernel copies to host memory",
    form="memcpy SM CPU(row) <- GPU(column) bandwidth (GB/s)",
)
def _out(bench: Bench) -> Matrix:
    return _host_matrix(bench, OUT)


@case(
    "device_to_device_memcpy_read_sm",
    "a kernel (row) copies from its peer (column)",
    form="memcpy SM GPU(row) -> GPU(column) bandwidth (GB/s)",
)
def _read(bench: Bench) -> Matrix:
    return _peer_rates(bench, Side.READ)


@case(
    "device_to_device_memcpy_write_sm",
    "a kernel (row) copies to its peer (column)",
    form="memcpy SM GPU(row) <- GPU(column) bandwidth (GB/s)",
)
def _write(bench: Bench) -> Matrix:
    return _peer_rates(bench, Side.WRITE)


@case(
    "host_device_latency_sm",
    "a kernel reads a pointer from host memory",
    unit="ns",
    higher_is_better=False,
    form="memory latency SM CPU(row) <-> GPU(column) (ns)",
)
def _host_latency(bench: Bench) -> Matrix:
    matrix = Matrix.of("host", ["host"], "device", bench.devices)
    for device in bench.devices:
        open_kernels(bench.driver, device)
        home = bench.buffers.host(device, "chain", CHAIN_BYTES).ptr
        base = bench.driver.host_device_pointer(home, device)
        _write_chain(bench, device, base)
        matrix.put("host", device, _latency(bench, device, base))
    return matrix


@case(
    "device_to_device_latency_sm",
    "a kernel (row) reads a pointer from its peer's memory (column)",
    unit="ns",
    higher_is_better=False,
    form="Device to Device Latency SM GPU(row) <-> GPU(column) (ns)",
)
def _peer_latency(bench: Bench) -> Matrix:
    matrix = Matrix.of("device", bench.devices, "peer", bench.devices)
    for device, peer in peers(bench):
        open_kernels(bench.driver, device)
        base = bench.buffers.device(peer, "chain", CHAIN_BYTES)
        _write_chain(bench, peer, base)
        stream = bench.buffers.stream(peer, "check")
        bench.driver.copy(base, bench.buffers.host(peer, "chain").ptr, CHAIN_BYTES, stream=stream)
        stream.synchronize()
        matrix.put(device, peer, _latency(bench, device, base))
    return matrix


@case("dha_read_by_blocks", "a kernel of few thread blocks copies from host memory in place")
def _read_by_blocks(bench: Bench) -> Matrix:
    return _by_blocks(bench, IN)


@case("dha_write_by_blocks", "a kernel of few thread blocks copies to host memory in place")
def _write_by_blocks(bench: Bench) -> Matrix:
    return _by_blocks(bench, OUT)
