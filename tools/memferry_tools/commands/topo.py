"""``memferry topo``."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    device: Annotated[str, typer.Option(help="auto, cuda or emulated.")] = "auto",
    file: Annotated[
        str | None, typer.Option("--from", help="Show the machine of this file, written with --json.")
    ] = None,
    fixture: Annotated[
        str | None, typer.Option(help="Show a machine that comes with MemFerry, e.g. h200-x2.")
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write the topology here.")] = None,
    picture: Annotated[str | None, typer.Option(help="Draw it here, as PNG.")] = None,
) -> int:
    """Show the devices of a machine and how they are connected."""
    settings = dict(locals())
    from ..topo.job import run
    from ..topo.options import TopoOptions

    return run(TopoOptions.build(**settings))
