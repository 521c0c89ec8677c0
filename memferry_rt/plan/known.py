"""What is known of devices and hosts that nobody has measured: figures of their makers, and shares of them.

Of what a maker gives, as much is taken as was reached on an H200: 770 of 989 TFLOPS in matrix products, 3.5 of
4.8 TB/s of device memory.  Of hosts three quarters of what their memory channels carry are taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from memferry_transport.topology import Topology
from memferry_transport.topology import machine as packaged

from .machine import ASSUMED, H200, Machine

_MATMUL = H200.matmul / 989e12
_DEVICE_MEMORY = H200.device_memory / 4.8e12
_HOST_MEMORY = 0.75
_CPU = 157 / 171  # of host memory, what the CPU's update has alone: as with 32 threads beside two H200
_PEERS = H200.peers / 450e9  # of a link's rate, with both directions at once: as over an H200's NVLinks


@dataclass(frozen=True)
class Make:
    """A device as its maker describes it.

    Attributes
    ----------
    flops : float
        FLOP per second of dense matrix products in bf16.
    device_memory : float
        Bytes per second.
    peers : float or None
        Bytes per second to other devices, each direction, where topologies do not say it.
    """

    flops: float
    device_memory: float
    peers: float | None = None


DEVICES = {
    "NVIDIA A100-SXM4-80GB": Make(312e12, 2.039e12),
    "NVIDIA H20": Make(148e12, 4.0e12),
    "NVIDIA GeForce RTX 4090": Make(165.2e12, 1.008e12),
    "Ascend 910C": Make(752e12, 3.2e12, peers=392e9),
}

HOSTS = {
    "hgx-h200-x8": (2, 307.2e9, "two sockets of eight channels of DDR5-4800"),
    "a100-x8": (2, 204.8e9, "two sockets of eight channels of DDR4-3200"),
    "cloudmatrix384-node": (4, 187.7e9, "four sockets of eight channels of DDR4-2933"),
}
MEASURED_HOSTS = {
    "h200-x2": (171e9, 157e9, "CPU and copies of two devices, 32 threads, measured; the record was not kept"),
}


def device_numbers(name: str) -> Machine:
    """A device of this name; where nothing is known of it, with the numbers of an H200."""
    make = DEVICES.get(name)
    if make is None:
        return H200
    numbers = {"matmul": make.flops * _MATMUL, "device_memory": make.device_memory * _DEVICE_MEMORY}
    if make.peers is not None:
        numbers["peers"] = make.peers * _PEERS
    return H200.changed(f"{ASSUMED}: of the maker's figure as much as an H200 reaches of its own", **numbers)


def host_numbers(machine: Machine, topology: Topology) -> Machine:
    """The same device in the host of a topology, as far as something is known of such hosts."""
    name = next((each for each in (*MEASURED_HOSTS, *HOSTS) if _is_like(topology, each)), "")
    if name in MEASURED_HOSTS:
        memory, cpu, source = MEASURED_HOSTS[name]
        return machine.changed(source, host_memory=memory, cpu_update=cpu)
    if name in HOSTS:
        sockets, rate, what = HOSTS[name]
        memory = sockets * rate * _HOST_MEMORY
        return machine.changed(
            f"{ASSUMED}: three quarters of {what}", host_memory=memory, cpu_update=memory * _CPU
        )
    return machine


def _is_like(topology: Topology, name: str) -> bool:
    return name == topology.name or topology.fingerprint() == packaged(name).fingerprint()
