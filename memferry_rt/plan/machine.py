"""What a machine can do: the numbers that predictions are made of, each with where it is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memferry_transport.cost import LinearCost

from ..errors import PlanError
from .profile import CopySample, Profile

UPDATE_NBYTES = 28  # of host memory, that the CPU's update of a parameter in half precision moves
LINKS = "measured on an H200: topology h200-x1"
KERNELS = "kernels on mapped host memory, measured on an H200"
ASSUMED = "assumed"


@dataclass(frozen=True)
class Machine:
    """One device and its host.  Rates are bytes per second if they do not say otherwise.

    Where several devices train it is the one of them that has least, and all are taken to do the same at the same
    time: what they share of the host, `host_memory` and `cpu_update`, is divided evenly.

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
        Between devices: what each of several ranks receives from the others while it sends as much.
    peers_over_host : bool
        Whether devices have no links of their own to each other, and exchange through host memory.
    peer_latency : float
        Seconds before the first byte of an exchange between ranks.
    ranks : int
        Devices that train together on this host, each with a link of its own.
    relays_to_device, relays_from_device : tuple of LinearCost
        What each idle device costs that relays copies for this one, beside all others that carry.
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
    peers_over_host: bool = False
    peer_latency: float = 3e-5
    ranks: int = 1
    relays_to_device: tuple[LinearCost, ...] = ()
    relays_from_device: tuple[LinearCost, ...] = ()
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

    @property
    def relayed(self) -> str:
        """What idle devices copy for this one, in words; empty where there are none."""
        ways = (("loads", self.relays_to_device), ("gradients", self.relays_from_device))
        return " and ".join(what for what, relays in ways if relays)

    def with_relays(self, into: int, out: int) -> Machine:
        """With no more than so many of the devices that relay, in each direction."""
        return replace(
            self,
            relays_to_device=self.relays_to_device[:into],
            relays_from_device=self.relays_from_device[:out],
        )

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
    peers=196e9,
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
        "peers": "copies between two H200 over 18 NVLinks, both ways at once, measured",
        "peer_latency": ASSUMED,
    },
)


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
