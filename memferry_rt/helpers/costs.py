"""What the ways over helpers cost: from the machine's calibration, or measured when training is set up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memferry_allocator import Driver, EmulatedDriver, MemFerryError
from memferry_transport import Calibration, CalibrationError, Path
from memferry_transport.calibration import load_calibration
from memferry_transport.measure import MeasureOptions, calibrate
from memferry_transport.topology import discover, prior_calibration

SHORT = MeasureOptions(nbytes=32 << 20, samples=3, copies=4)  # some seconds for each helper
EMULATED_SLICE = 1 << 20


@dataclass(frozen=True)
class Costs:
    """A calibration of the ways of one device over its helpers, and where it comes from, in words."""

    calibration: Calibration
    source: str


def find_costs(driver: Driver, device: int, helpers: Sequence[int]) -> Costs:
    """What a device's ways over `helpers` cost.

    As ``memferry bandwidth --recalibrate`` has kept it for this machine; where it has not, measured now, which
    takes some seconds for each helper, and memory on both devices meanwhile.  An emulated machine's are those of
    the links that it was given.

    Raises
    ------
    CalibrationError
        What was kept cannot be read, or nothing can be measured now: times or bytes make no sense, or there is no
        room.
    """
    topology = discover(driver)
    if isinstance(driver, EmulatedDriver):
        known = prior_calibration(topology, EMULATED_SLICE)
        return Costs(_only(known, device, helpers), "costs as the emulated links have them")
    kept = load_calibration(topology.machine)
    if kept is not None and {Path(device), *(Path(device, helper) for helper in helpers)} <= _paths(kept):
        return Costs(_only(kept, device, helpers), f"costs as calibrated {kept.date}")
    began = time.perf_counter()
    try:
        measured = calibrate(driver, topology, devices=(device, *helpers), targets=(device,), options=SHORT)
    except MemFerryError as error:
        raise CalibrationError(
            f"helpers: what their ways cost cannot be measured now ({error}); run `memferry bandwidth "
            "--recalibrate` once, what it finds is used from then on"
        ) from error
    seconds = time.perf_counter() - began
    return Costs(
        measured,
        f"costs measured at set-up in {seconds:.1f} s; `memferry bandwidth --recalibrate` keeps them",
    )


def _paths(calibration: Calibration) -> set[Path]:
    return {path for path, _ in calibration.ways}


def _only(calibration: Calibration, device: int, helpers: Sequence[int]) -> Calibration:
    """What it says of one device's ways, over these helpers."""
    ways = {
        (path, direction): measured
        for (path, direction), measured in calibration.ways.items()
        if path.device == device and (path.helper is None or path.helper in helpers)
    }
    return replace(calibration, ways=ways)
