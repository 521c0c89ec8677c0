"""Between host and devices by the copy engines: nvbandwidth's cases under its names."""

from __future__ import annotations

from memferry_allocator import Direction

from .bench import Bench
from .catalogue import case
from .copies import check, clear, host_copy
from .result import Matrix

IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


def _opposite(direction: Direction) -> Direction:
    return OUT if direction is IN else IN


def host_rates(
    bench: Bench, direction: Direction, *, both_ways: bool = False, all_devices: bool = False
) -> Matrix:
    """Each device's rate in turn, by itself or beside copies that load the links meanwhile.

    Parameters
    ----------
    both_ways : bool
        Copies in the other direction run beside it.
    all_devices : bool
        All other devices copy in the same way beside it.
    """
    matrix = Matrix.of("host", ["host"], "device", bench.devices)
    for device in bench.devices:
        clear(bench, device, direction)
        copies = [host_copy(bench, device, direction)]
        if both_ways:
            copies.append(host_copy(bench, device, _opposite(direction), beside=True))
        for other in bench.devices if all_devices else ():
            if other != device:
                ways = (direction, _opposite(direction)) if both_ways else (direction,)
                copies += [host_copy(bench, other, way, beside=True) for way in ways]
        samples = bench.seconds([copy.load for copy in copies])
        check(bench, device, direction)
        matrix.put("host", device, copies[0].rates(samples[0]))
    return matrix


@case(
    "host_to_device_memcpy_ce",
    "one copy from host to device at a time",
    form="memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)",
)
def _in(bench: Bench) -> Matrix:
    return host_rates(bench, IN)


@case(
    "device_to_host_memcpy_ce",
    "one copy from device to host at a time",
    form="memcpy CE CPU(row) <- GPU(column) bandwidth (GB/s)",
)
def _out(bench: Bench) -> Matrix:
    return host_rates(bench, OUT)


@case(
    "host_to_device_bidirectional_memcpy_ce",
    "host to device, while another copy runs from device to host",
    form="memcpy CE CPU(row) <-> GPU(column) bandwidth (GB/s)",
)
def _in_beside_out(bench: Bench) -> Matrix:
    return host_rates(bench, IN, both_ways=True)


@case(
    "device_to_host_bidirectional_memcpy_ce",
    "device to host, while another copy runs from host to device",
    form="memcpy CE CPU(row) <-> GPU(column) bandwidth (GB/s)",
)
def _out_beside_in(bench: Bench) -> Matrix:
    return host_rates(bench, OUT, both_ways=True)


@case(
    "all_to_host_memcpy_ce",
    "device to host, while all other devices copy to the host",
    form="memcpy CE CPU(row) <- GPU(column) bandwidth (GB/s)",
)
def _all_out(bench: Bench) -> Matrix:
    return host_rates(bench, OUT, all_devices=True)


@case(
    "all_to_host_bidirectional_memcpy_ce",
    "device to host, while it and all other devices copy both ways",
    form="memcpy CE CPU(row) <-> GPU(column) bandwidth (GB/s)",
)
def _all_out_beside_in(bench: Bench) -> Matrix:
    return host_rates(bench, OUT, both_ways=True, all_devices=True)


@case(
    "host_to_all_memcpy_ce",
    "host to device, while all other devices are copied to as well",
    form="memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)",
)
def _all_in(bench: Bench) -> Matrix:
    return host_rates(bench, IN, all_devices=True)


@case(
    "host_to_all_bidirectional_memcpy_ce",
    "host to device, while it and all other devices copy both ways",
    form="memcpy CE CPU(row) <-> GPU(column) bandwidth (GB/s)",
)
def _all_in_beside_out(bench: Bench) -> Matrix:
    return host_rates(bench, IN, both_ways=True, all_devices=True)
