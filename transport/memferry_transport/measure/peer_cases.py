"""Between devices, and within one, by the copy engines: nvbandwidth's cases under its names."""

from __future__ import annotations

from collections.abc import Iterator

from .bench import Bench
from .catalogue import case
from .copies import GB, Side, peer_copy
from .errors import NotRunError
from .result import Matrix


def peers(bench: Bench) -> Iterator[tuple[int, int]]:
    """Pairs of devices of which the first reads and writes the second's memory.

    Raises
    ------
    NotRunError
        There is only one device.
    """
    if len(bench.devices) < 2:
        raise NotRunError("it takes two devices")
    for device in bench.devices:
        for peer in bench.devices:
            if device != peer and bench.buffers.can_reach(device, peer) and bench.buffers.can_reach(peer, device):
                yield device, peer


def _ends(device: int, peer: int, side: Side) -> tuple[int, int]:
    """From where to where the device of the row moves bytes: it reads the peer's, or writes its own to it."""
    return (peer, device) if side is Side.READ else (device, peer)


def _rates(bench: Bench, side: Side, *, both_ways: bool) -> Matrix:
    """One pair at a time; both ways, the sum of the two."""
    matrix = Matrix.of("device", bench.devices, "peer", bench.devices)
    buffers = bench.buffers
    for device, peer in peers(bench):
        source, target = _ends(device, peer, side)
        copies = [peer_copy(bench, source, target, side)]
        if both_ways:
            copies.append(peer_copy(bench, target, source, side))
        if bench.options.verify:
            buffers.clear_device(target, buffers.device(target, "target"), bench.options.nbytes)
        samples = bench.seconds([copy.load for copy in copies])
        if bench.options.verify:
            buffers.check_device(target, buffers.device(target, "target"), bench.options.nbytes, of=source)
        rates = [copy.rates(seconds) for copy, seconds in zip(copies, samples, strict=True)]
        matrix.put(device, peer, [sum(together) for together in zip(*rates, strict=True)])
    return matrix


@case(
    "device_to_device_memcpy_read_ce",
    "a device (row) copies from its peer (column)",
    form="memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)",
)
def _read(bench: Bench) -> Matrix:
    return _rates(bench, Side.READ, both_ways=False)


@case(
    "device_to_device_memcpy_write_ce",
    "a device (row) copies to its peer (column)",
    form="memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)",
)
def _write(bench: Bench) -> Matrix:
    return _rates(bench, Side.WRITE, both_ways=False)


@case(
    "device_to_device_bidirectional_memcpy_read_ce",
    "two devices copy from each other; the sum",
    form="memcpy CE GPU(row) <-> GPU(column) Total bandwidth (GB/s)",
)
def _both_read(bench: Bench) -> Matrix:
    return _rates(bench, Side.READ, both_ways=True)


@case(
    "device_to_device_bidirectional_memcpy_write_ce",
    "two devices copy to each other; the sum",
    form="memcpy CE GPU(row) <-> GPU(column) Total bandwidth (GB/s)",
)
def _both_write(bench: Bench) -> Matrix:
    return _rates(bench, Side.WRITE, both_ways=True)


def _total(bench: Bench, side: Side, *, inward: bool) -> Matrix:
    """Each device in turn with all its peers at once: bytes of all, until the last has ended."""
    matrix = Matrix.of("host", ["host"], "device", bench.devices)
    buffers, nbytes, verify = bench.buffers, bench.options.nbytes, bench.options.verify
    reached = list(peers(bench))
    for device in bench.devices:
        ways = [(peer, device) if inward else (device, peer) for one, peer in reached if one == device]
        if not ways:
            continue
        copies = [peer_copy(bench, *way, side, into=f"target of {way[0]}") for way in ways]
        for source, target in ways if verify else ():
            buffers.clear_device(target, buffers.device(target, f"target of {source}"), nbytes)
        samples = bench.seconds([copy.load for copy in copies])
        for source, target in ways if verify else ():
            buffers.check_device(target, buffers.device(target, f"target of {source}"), nbytes, of=source)
        total = len(copies) * nbytes / GB
        matrix.put("host", device, [total / max(at_once) for at_once in zip(*samples, strict=True)])
    return matrix


@case(
    "all_to_one_write_ce",
    "all peers copy to a device at once; the sum",
    form="memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)",
)
def _all_write(bench: Bench) -> Matrix:
    return _total(bench, Side.WRITE, inward=True)


@case(
    "all_to_one_read_ce",
    "all peers copy from a device at once; the sum",
    form="memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)",
)
def _all_read(bench: Bench) -> Matrix:
    return _total(bench, Side.READ, inward=False)


@case(
    "one_to_all_write_ce",
    "a device copies to all its peers at once; the sum",
    form="memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)",
)
def _one_write(bench: Bench) -> Matrix:
    return _total(bench, Side.WRITE, inward=False)


@case(
    "one_to_all_read_ce",
    "a device copies from all its peers at once; the sum",
    form="memcpy CE GPU(row) <- GPU(column) bandwidth (GB/s)",
)
def _one_read(bench: Bench) -> Matrix:
    return _total(bench, Side.READ, inward=True)


@case(
    "device_local_copy",
    "a copy within a device, counted once although it reads and writes",
    form="memcpy local GPU(column) bandwidth (GB/s)",
)
def _local(bench: Bench) -> Matrix:
    matrix = Matrix.of("host", ["host"], "device", bench.devices)
    buffers = bench.buffers
    for device in bench.devices:
        copy = peer_copy(bench, device, device, Side.WRITE)
        if bench.options.verify:
            buffers.clear_device(device, buffers.device(device, "target"), bench.options.nbytes)
        (seconds,) = bench.seconds([copy.load])
        if bench.options.verify:
            buffers.check_device(device, buffers.device(device, "target"), bench.options.nbytes, of=device)
        matrix.put("host", device, copy.rates(seconds))
    return matrix
