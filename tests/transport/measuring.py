"""A bench of emulated devices whose links are all different, and small enough to take no time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from memferry_allocator import Direction, Driver, EmulatedDriver, EmulatedOptions
from memferry_allocator.driver import LinkModel
from memferry_transport.measure import Bench, MeasureOptions, hold

IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
H2D, D2H = LinkModel(8e-6, 50e9), LinkModel(12e-6, 40e9)
LOCAL, PEER = LinkModel(3e-6, 2e12), LinkModel(9e-6, 300e9)
NBYTES = 64 << 10


def emulated(devices: int = 2, **options: Any) -> EmulatedDriver:
    links = {"host_to_device": H2D, "device_to_host": D2H, "on_device": LOCAL, "peer": PEER}
    return EmulatedDriver(EmulatedOptions(device_count=devices, **{"eagerness": 0.0, **links, **options}))


@contextmanager
def bench_of(
    driver: Driver | None = None, *, devices: tuple[int, ...] = (0, 1), nbytes: int = NBYTES, **options: Any
) -> Iterator[Bench]:
    """A bench that is given back in the end, with its driver; holding streams back takes no time."""
    driver = driver or emulated()
    settings = MeasureOptions(**{"nbytes": nbytes, "samples": 1, "copies": 2, **options})
    try:
        with (
            patch.object(hold, "PLUG_BYTES", nbytes),
            Bench(driver, devices, settings, machine="two devices") as bench,
        ):
            yield bench
    finally:
        driver.close()


def gb_per_second(link: LinkModel, nbytes: int = NBYTES) -> float:
    """What a link of its own gives."""
    return nbytes / link.seconds(nbytes) / 1e9
