"""Calibrations in files: one for each machine, in the user's cache directory."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from memferry_allocator import Direction

from ..cost import LinearCost
from ..errors import CalibrationError
from ..paths import By
from ..paths import Path as Way
from .costs import Calibration, Measured

SCHEMA = "memferry.calibration"
SCHEMA_VERSION = 1
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def calibration_path(machine: str) -> Path:
    """Where the calibration of a machine is kept: under ``$XDG_CACHE_HOME``, or ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"
    return folder / "memferry" / "calibration" / f"{_UNSAFE.sub('-', machine).strip('-')}.json"


def save_calibration(calibration: Calibration, path: Path | None = None) -> Path:
    """Write a calibration, whole or not at all, and return where.

    Raises
    ------
    CalibrationError
        It cannot be written there; what was there before still is.
    """
    path = path or calibration_path(calibration.machine)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as partial:
            try:
                partial.write(json.dumps(to_json(calibration), indent=1, allow_nan=False) + "\n")
                partial.close()
                os.replace(partial.name, path)
            except BaseException:
                Path(partial.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise CalibrationError(f"calibration: {path} cannot be written: {error.strerror}") from None
    return path


def load_calibration(machine: str, path: Path | None = None) -> Calibration | None:
    """The calibration that was saved of a machine; None if none was.

    Raises
    ------
    CalibrationError
        The file cannot be read, is malformed, or is another machine's.
    """
    path = path or calibration_path(machine)
    try:
        calibration = from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CalibrationError(f"calibration: {path} cannot be read: {error.strerror}") from None
    except (CalibrationError, ValueError, RecursionError) as error:
        raise CalibrationError(f"calibration: {path} is damaged ({error}); delete it, or measure anew") from None
    if calibration.machine != machine:
        raise CalibrationError(
            f"calibration: {path} is of the machine {calibration.machine!r}, this one is {machine!r}; measure anew"
        )
    return calibration


def to_json(calibration: Calibration) -> dict[str, Any]:
    """Plain data for JSON."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "machine": calibration.machine,
        "source": calibration.source,
        "date": calibration.date,
        "slice_bytes": calibration.slice_bytes,
        "ways": [
            {
                "device": way.device,
                "helper": way.helper,
                "by": way.by,
                "direction": direction.value,
                "alpha_s": measured.cost.alpha_s,
                "bytes_per_second": measured.cost.bytes_per_second,
                "samples": [{"nbytes": size, "seconds": list(times)} for size, times in measured.samples.items()],
            }
            for (way, direction), measured in calibration.ways.items()
        ],
        "break_even": [
            {"device": device, "direction": direction.value, "nbytes": nbytes}
            for (device, direction), nbytes in calibration.break_even_bytes.items()
        ],
        "join": [
            {"device": device, "direction": direction.value, "seconds": seconds}
            for (device, direction), seconds in calibration.join_s.items()
        ],
        "duplex": [{"device": device, "share": share} for device, share in calibration.duplex.items()],
    }


def from_json(content: Any) -> Calibration:
    """A calibration from plain data.

    Raises
    ------
    CalibrationError
        Something is missing, of the wrong kind, or makes no sense; the message names it.
    """
    top = _Entry(content, "the file")
    if (schema := top.text("schema")) != SCHEMA:
        raise CalibrationError(f"its schema is {schema!r}, not {SCHEMA!r}")
    if (version := top.count("schema_version")) != SCHEMA_VERSION:
        raise CalibrationError(f"its schema_version is {version}, this MemFerry reads {SCHEMA_VERSION}")
    return Calibration(
        machine=top.text("machine"),
        source=top.text("source"),
        date=top.text("date"),
        ways={
            (Way(way.count("device"), way.count_or_none("helper"), way.by()), way.direction()): Measured(
                LinearCost(way.number("alpha_s"), way.number("bytes_per_second", more_than_zero=True)),
                {sample.count("nbytes"): sample.numbers("seconds") for sample in way.entries("samples")},
            )
            for way in top.entries("ways")
        },
        slice_bytes=top.count("slice_bytes"),
        break_even_bytes={
            (e.count("device"), e.direction()): e.count("nbytes") for e in top.entries("break_even")
        },
        join_s={(e.count("device"), e.direction()): e.number("seconds") for e in top.later_entries("join")},
        duplex={e.count("device"): e.number("share", more_than_zero=True) for e in top.entries("duplex")},
    )


class _Entry:
    """A JSON object, read with checks."""

    def __init__(self, content: Any, name: str) -> None:
        if not isinstance(content, dict):
            raise CalibrationError(f"{name} is no JSON object")
        self._content, self._name = content, name

    def text(self, key: str) -> str:
        value = self._get(key)
        return value if isinstance(value, str) else self._refuse(key, "no text")

    def count(self, key: str) -> int:
        value = self._get(key)
        return value if type(value) is int and value >= 0 else self._refuse(key, "no integer from 0 up")

    def count_or_none(self, key: str) -> int | None:
        return None if self._get(key) is None else self.count(key)

    def number(self, key: str, *, more_than_zero: bool = False) -> float:
        return self._number(key, self._get(key), more_than_zero)

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(self._number(key, value, False) for value in self._list(key))

    def direction(self) -> Direction:
        value = self.text("direction")
        known = {direction.value: direction for direction in Direction}
        return known[value] if value in known else self._refuse("direction", f"none of {list(known)}")

    def by(self) -> By:
        """How a helper does it; in a file from before there were kernels it says nothing."""
        if "by" not in self._content:
            return "staging"
        value = self.text("by")
        known: dict[str, By] = {"staging": "staging", "kernel": "kernel"}
        return known[value] if value in known else self._refuse("by", f"none of {list(known)}")

    def entries(self, key: str) -> list[_Entry]:
        return [_Entry(value, f"{key}[{number}]") for number, value in enumerate(self._list(key))]

    def later_entries(self, key: str) -> list[_Entry]:
        """Of a list that older files do not have."""
        return self.entries(key) if key in self._content else []

    def _get(self, key: str) -> Any:
        if key not in self._content:
            raise CalibrationError(f"{self._name} has no {key!r}")
        return self._content[key]

    def _list(self, key: str) -> list[Any]:
        value = self._get(key)
        return value if isinstance(value, list) else self._refuse(key, "no list")

    def _number(self, key: str, value: Any, more_than_zero: bool) -> float:
        good = type(value) in (int, float) and math.isfinite(value) and value >= 0
        if not good or (more_than_zero and value == 0):
            self._refuse(key, "no number " + ("above 0" if more_than_zero else "from 0 up"))
        return float(value)

    def _refuse(self, key: str, what: str) -> Any:
        raise CalibrationError(f"{self._name}: {key} {self._content[key]!r} is {what}")
