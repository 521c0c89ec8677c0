"""What ``memferry bandwidth`` can be told, checked once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from memferry_allocator import InvalidRequestError, parse_size
from memferry_transport.measure import CASES, MeasureOptions, find_case

from ..errors import ToolError
from ..topo.options import check_fixture

_DEVICES = re.compile(r"\d+(,\d+)*")
FULL = MeasureOptions()
QUICK = MeasureOptions(nbytes=128 << 20, samples=3, copies=4)
EMULATED = MeasureOptions(nbytes=16 << 20, samples=1, copies=2)  # of virtual times one sample says everything
DEFAULT_CASES = tuple(name for name, case in CASES.items() if case.form is not None)


@dataclass(frozen=True)
class BandwidthOptions:
    """Settings of one run of ``memferry bandwidth``.

    Attributes
    ----------
    cases : tuple of str
    device : {"auto", "cuda", "emulated"}
    fixture : str, optional
        The machine whose links emulated devices have.
    devices : tuple of int, optional
        None: all.
    size, samples, copies : int, optional
        None: what suits the device.
    quick : bool
    json, csv, nvbandwidth, plot : Path, optional
    explain, recalibrate : bool
    time_limit_s : float, optional
    """

    cases: tuple[str, ...]
    device: str
    fixture: str | None
    devices: tuple[int, ...] | None
    size: int | None
    samples: int | None
    copies: int | None
    quick: bool
    json: Path | None
    csv: Path | None
    nvbandwidth: Path | None
    plot: Path | None
    explain: bool
    recalibrate: bool
    time_limit_s: float | None

    @classmethod
    def build(
        cls,
        *,
        all_cases: bool = False,
        case: list[str] | None = None,
        device: str = "auto",
        fixture: str | None = None,
        devices: str | None = None,
        size: str | None = None,
        samples: int | None = None,
        copies: int | None = None,
        quick: bool = False,
        json: str | None = None,
        csv: str | None = None,
        nvbandwidth_compat: str | None = None,
        plot: str | None = None,
        explain: bool = False,
        recalibrate: bool = False,
        time_limit: float | None = None,
    ) -> BandwidthOptions:
        """Options from what a user writes.

        Raises
        ------
        ToolError, InvalidRequestError
            Something that makes no sense; the message begins with the option's name.
        """
        if device not in ("auto", "cuda", "emulated"):
            raise ToolError(f"--device: {device!r} is none; write auto, cuda or emulated")
        if fixture is not None:
            check_fixture(fixture)
            if device != "emulated":
                raise ToolError("--fixture: it says which links emulated devices have; add --device emulated")
        if devices is not None and _DEVICES.fullmatch(devices) is None:
            raise ToolError(f"--devices: {devices!r} is no list of ordinals; write for example 0,1")
        if time_limit is not None and not time_limit > 0:
            raise ToolError(f"--time-limit: {time_limit} is not more than 0 seconds")
        for option, number in (("--samples", samples), ("--copies", copies)):
            if number is not None and number < 1:
                raise ToolError(f"{option}: {number} is less than 1")
        nbytes = None if size is None else parse_size(size, name="--size")
        if nbytes is not None and nbytes % 4096:
            raise ToolError(f"--size: {size} is no multiple of 4096 bytes")
        return cls(
            cases=_cases(all_cases or quick, case or [], only_ways=explain or recalibrate),
            device=device,
            fixture=fixture,
            devices=None if devices is None else tuple(int(number) for number in devices.split(",")),
            size=nbytes,
            samples=samples,
            copies=copies,
            quick=quick,
            json=_path(json, "--json"),
            csv=_path(csv, "--csv"),
            nvbandwidth=_path(nvbandwidth_compat, "--nvbandwidth-compat"),
            plot=_path(plot, "--plot"),
            explain=explain,
            recalibrate=recalibrate,
            time_limit_s=time_limit,
        )

    def settle(self, *, emulated: bool) -> MeasureOptions:
        """How much is measured, once the device is known."""
        base = EMULATED if emulated else QUICK if self.quick else FULL
        return MeasureOptions(
            nbytes=base.nbytes if self.size is None else self.size,
            samples=base.samples if self.samples is None else self.samples,
            copies=base.copies if self.copies is None else self.copies,
        )


def _cases(everything: bool, named: list[str], *, only_ways: bool) -> tuple[str, ...]:
    """All of them, those that are named, none where only the calibration is asked for, else nvbandwidth's."""
    if everything:
        return tuple(CASES)
    for name in named:
        try:
            find_case(name)
        except InvalidRequestError as error:
            raise ToolError(
                f"--case: {str(error).removeprefix('case: ')}; see memferry bandwidth --list"
            ) from None
    return tuple(dict.fromkeys(named)) if named or only_ways else DEFAULT_CASES


def _path(text: str | None, name: str) -> Path | None:
    if text == "":
        raise ToolError(f"{name}: the name is empty; leave the option out, or name a file")
    return None if text is None else Path(text)
