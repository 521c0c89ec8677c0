"""What a machine can do: the numbers that predictions are made of, each with where it is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memferry_allocator import Direction
from memferry_transport.topology import Topology, candidates
from memferry_transport.topology.rates import host_duplex, host_latency
from memferry_transport.topology.ways import together

from ..errors import PlanError
from .profile import CopySample, Profile

UPDATE_NBYTES = 28  # of host memory, that the CPU's update of a parameter in half precision moves
LINKS = "measured on an H200: topology h200-x1"
KERNELS = "kernels on mapped host memory, measured on an H200"
ASSUMED = "assumed"


@dataclass(frozen=True)
class Machine:
    """One device and its host.  Rates are bytes per second if they do not say otherwise.

    Attributes
    ----------
    name : str
    to_device, from_device : float
        Long copies, each direction alone.
    both_ways : float
        Both directions at once, each as a share of its rate alone: 0.5 to 1.
    copy_latency : float
        Seconds before the first byte of a copy.
    host_reads, host_writes : float
        Kernels that read or write host memory, alone.
    kernel_share : float
        Of the link, that such a kernel gets beside a copy in its direction: 0 to 1.
    read_again_tokens : float
        A matrix product reads its weight from host memory once for so many rows.
    host_memory : float
        Host memory for all that uses it: the CPU's update and copies.
    cpu_update : float
        Host memory traffic of the CPU's update, alone.
    matmul : float
        FLOP per second of large matrix products in half precision; those in fp32 take eight times as long.
    device_memory : float
        Device memory, for kernels that do little else.
    launch : float
        Seconds between two kernels that the framework launches.
    peers : float
        Between devices, for what each of several ranks gathers.
    ranks : int
        Devices that train together on this host, each with a link of its own; host memory is shared.
    sources : mapping
        Where the numbers are from, by their names.

    Raises
    ------
    PlanError
        A number that is not positive, or a share that is none.
    """

    name: str
    to_device: float
    from_device: float
    both_ways: float
    copy_latency: float
    host_reads: float
    host_writes: float
    kernel_share: float
    read_again_tokens: float
    host_memory: float
    cpu_update: float
    matmul: float
    device_memory: float
    launch: float
    peers: float = 0.0
    ranks: int = 1
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise PlanError(f"machine: {name}: {getattr(self, name)} is not more than 0")
        if not 0.5 <= self.both_ways <= 1:
            raise PlanError(f"machine: both_ways: {self.both_ways} is not a share from 0.5 to 1")
        if not 0 < self.kernel_share < 1:
            raise PlanError(f"machine: kernel_share: {self.kernel_share} is not a share between 0 and 1")
        if self.ranks < 1 or (self.ranks > 1 and not self.peers > 0):
            raise PlanError(f"machine: {self.ranks} ranks need a rate between devices")

    def load_seconds(self, nbytes: float) -> float:
        """A copy to the device, alone."""
        return self.copy_latency + nbytes / self.to_device if nbytes else 0.0

    def changed(self, source: str, **numbers: float) -> Machine:
        """With other numbers, from another source."""
        return replace(self, **numbers, sources={**self.sources, **dict.fromkeys(numbers, source)})  # type: ignore[arg-type]


_POSITIVE = (
    "to_device",
    "from_device",
    "host_reads",
    "host_writes",
    "read_again_tokens",
    "host_memory",
    "cpu_update",
    "matmul",
    "device_memory",
    "launch",
)

H200 = Machine(
    name="NVIDIA H200",
    to_device=55.4e9,
    from_device=55.2e9,
    both_ways=0.907,
    copy_latency=12e-6,
    host_reads=51e9,
    host_writes=52e9,
    kernel_share=0.5,
    read_again_tokens=210,
    host_memory=157e9,
    cpu_update=124e9,
    matmul=770e12,
    device_memory=3.5e12,
    launch=5e-6,
    peers=391e9,
    sources={
        "to_device": LINKS,
        "from_device": LINKS,
        "both_ways": LINKS,
        "copy_latency": "fitted to copies of 64 KiB to 16 MiB on an H200",
        "host_reads": KERNELS,
        "host_writes": KERNELS,
        "kernel_share": ASSUMED,
        "read_again_tokens": "fitted to x @ W.T with W in host memory, 256 to 16384 tokens, on an H200",
        "host_memory": "CPU and device updating together, 14 threads: docs/performance.md",
        "cpu_update": "the CPU updating alone, 14 threads: docs/performance.md",
        "matmul": "x @ W.T of 16384 x 4096 x 11008 in bf16 on an H200",
        "device_memory": "fitted with the work of a block to llama-1b in device memory on an H200",
        "launch": ASSUMED,
        "peers": "copies between two H200 over 18 NVLinks, measured",
    },
)


def machine_from_topology(
    topology: Topology, device: int = 0, *, helpers: bool = False, ranks: int = 1, like: Machine = H200
) -> Machine:
    """A machine whose links are a topology's; what a topology does not say is taken from another one.

    Parameters
    ----------
    topology : Topology
    device : int
    helpers : bool
        Whether devices without work of their own relay copies to this one.
    ranks : int
        Devices that train together; then there are no helpers.
    like : Machine

    Raises
    ------
    PlanError
        There is no such device, or there are not so many, or those that train shall relay.
    """
    if not 0 <= device < len(topology.devices) or ranks > len(topology.devices):
        raise PlanError(
            f"topology: device {device} of {ranks} ranks is asked for; {topology.name or 'the machine'} has "
            f"{len(topology.devices)}"
        )
    if helpers and ranks > 1:
        raise PlanError("topology: devices that train have no time to relay; ask for helpers or for several ranks")
    rates = {}
    for name, direction in (("to_device", Direction.HOST_TO_DEVICE), ("from_device", Direction.DEVICE_TO_HOST)):
        ways = candidates(topology, device, direction)
        costs = together(topology, ways if helpers else ways[:1], direction)
        rates[name] = sum(cost.bytes_per_second for _, cost in costs)
    link = topology.host_link(device)
    latency, both_ways = host_latency(link), host_duplex(link)
    source = f"topology {topology.name or topology.machine}"
    numbers = {
        **rates,
        "copy_latency": latency,
        "both_ways": both_ways,
        "host_reads": like.host_reads * min(1.0, rates["to_device"] / like.to_device),
        "host_writes": like.host_writes * min(1.0, rates["from_device"] / like.from_device),
    }
    found = like.changed(source, **numbers)
    return replace(found, name=topology.devices[device].name, ranks=ranks)


def machine_from_profile(profile: Profile, like: Machine = H200) -> Machine:
    """A machine whose numbers are those that a profile has; the others are taken from another one."""
    numbers: dict[str, float] = {}
    for name, copies in (("to_device", profile.to_device), ("from_device", profile.from_device)):
        if copies:
            latency, numbers[name] = _fit(copies)
            numbers["copy_latency"] = latency
    if profile.both_ways is not None:
        numbers["both_ways"] = min(1.0, max(0.5, profile.both_ways))
    if profile.cpu_update_rate is not None:
        numbers["cpu_update"] = UPDATE_NBYTES * profile.cpu_update_rate
    if profile.host_memory_rate is not None:
        numbers["host_memory"] = profile.host_memory_rate
    shares = [
        1 - timing.copy_rate / numbers["to_device"]
        for layer in profile.layers
        for timing in layer.timings
        if timing.copy_rate is not None and timing.beside.value == "h2d" and "to_device" in numbers
    ]
    if shares:
        numbers["kernel_share"] = min(0.95, max(0.05, sorted(shares)[len(shares) // 2]))
    return replace(like.changed(f"profile of {profile.device}", **numbers), name=profile.device)


def _fit(copies: tuple[CopySample, ...]) -> tuple[float, float]:
    """Latency and rate of copies: from the largest and the smallest, or the rate alone of a single size."""
    small, large = min(copies, key=lambda c: c.nbytes), max(copies, key=lambda c: c.nbytes)
    if large.nbytes < 4 * small.nbytes or large.seconds <= small.seconds:
        return 12e-6, large.nbytes / large.seconds
    rate = (large.nbytes - small.nbytes) / (large.seconds - small.seconds)
    return max(0.0, small.seconds - small.nbytes / rate), rate
