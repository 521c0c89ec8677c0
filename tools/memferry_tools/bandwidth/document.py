"""A run's results as JSON: settings, machine, calibration, every sample, and a summary."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memferry_allocator import Driver
from memferry_transport import Calibration
from memferry_transport.calibration.file import to_json
from memferry_transport.measure import CaseResult, MeasureOptions, has_virtual_clock
from memferry_transport.topology import Topology, dumps

from ..errors import ToolError
from ..machine import describe_machine
from ..version import version
from .summary import summarise

SCHEMA = "memferry.bandwidth"
SCHEMA_VERSION = 1


def document(
    driver: Driver,
    devices: Sequence[int],
    topology: Topology,
    settings: MeasureOptions,
    results: Sequence[CaseResult],
    calibration: Calibration | None,
    seconds: float,
) -> dict[str, Any]:
    """Everything there is to keep of a run.  What could not be measured is null."""
    emulated = has_virtual_clock(driver)
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "memferry": version(),
        "settings": {**dataclasses.asdict(settings), "devices": list(devices)},
        "machine": {
            **describe_machine(),
            "driver": driver.name,
            "emulated": emulated,
            "cuda": cuda_version(driver),
            "clock": "virtual" if emulated else "device",
            "make": topology.machine,
            "devices": names_of(topology, devices),
            "topology": json.loads(dumps(_without_identity(topology))),
        },
        "calibration": None if calibration is None else to_json(calibration),
        "cases": [result.to_json() for result in results],
        "seconds": seconds,
        "summary": summarise(results, calibration),
    }


def names_of(topology: Topology, devices: Sequence[int]) -> list[str]:
    """The names of some devices; those of a lost one, too."""
    names = {device.ordinal: device.name for device in topology.devices}
    return [names[device] for device in devices]


def cuda_version(driver: Driver) -> int | None:
    """The CUDA version that the driver supports, as CUDA writes it: 13000 is 13.0."""
    if driver.name != "cuda":
        return None
    from cuda.bindings import driver as cu

    error, number = cu.cuDriverGetVersion()
    return int(number) if int(error) == 0 else None


def _without_identity(topology: Topology) -> Topology:
    """The make, and the links as they are now; not which pieces these are."""
    devices = tuple(dataclasses.replace(device, uuid=None) for device in topology.devices)
    return dataclasses.replace(topology, devices=devices)


def read_document(path: Path) -> dict[str, Any]:
    """Results that were written earlier.

    Raises
    ------
    ToolError
        The file cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ToolError(f"--compare: {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ToolError(f"--compare: {path} is no JSON: {error}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ToolError(f"--compare: {path} was not written by memferry bandwidth --json")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise ToolError(
            f"--compare: {path} has schema version {found.get('schema_version')}; "
            f"this MemFerry reads {SCHEMA_VERSION}"
        )
    return found
