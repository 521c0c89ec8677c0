"""What ``memferry topo`` can be told, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memferry_transport.topology import machine_names

from ..errors import ToolError


@dataclass(frozen=True)
class TopoOptions:
    """Settings of one run of ``memferry topo``.

    Attributes
    ----------
    device : {"auto", "cuda", "emulated"}
        Whose machine is looked at, unless `file` or `fixture` is given.
    file : Path, optional
        A topology that was written earlier.
    fixture : str, optional
        A machine that comes with MemFerry.
    json, picture : Path, optional
    """

    device: str
    file: Path | None
    fixture: str | None
    json: Path | None
    picture: Path | None

    @classmethod
    def build(
        cls,
        *,
        device: str = "auto",
        file: str | None = None,
        fixture: str | None = None,
        json: str | None = None,
        picture: str | None = None,
    ) -> TopoOptions:
        """Options from what a user writes.

        Raises
        ------
        ToolError
            Something that makes no sense; the message begins with the option's name.
        """
        if device not in ("auto", "cuda", "emulated"):
            raise ToolError(f"--device: {device!r} is none; write auto, cuda or emulated")
        if file is not None and fixture is not None:
            raise ToolError("--from: give it, or --fixture, but not both")
        if fixture is not None:
            check_fixture(fixture)
        return cls(device, _path(file, "--from"), fixture, _path(json, "--json"), _path(picture, "--picture"))


def check_fixture(name: str) -> None:
    """Refuse a machine that does not come with MemFerry."""
    if name not in machine_names():
        raise ToolError(f"--fixture: {name!r} is none; there are {', '.join(machine_names())}")


def _path(text: str | None, name: str) -> Path | None:
    if text == "":
        raise ToolError(f"{name}: the name is empty; leave the option out, or name a file")
    return None if text is None else Path(text)
