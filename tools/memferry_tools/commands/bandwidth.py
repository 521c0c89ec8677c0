"""``memferry bandwidth``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    all_cases: Annotated[bool, typer.Option("--all", help="Run every case; by default nvbandwidth's.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Every case, with smaller and fewer copies.")] = False,
    case: Annotated[list[str] | None, typer.Option(help="Run this case; may be given several times.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="Show the cases and exit.")] = False,
    device: Annotated[str, typer.Option(help="auto, cuda or emulated.")] = "auto",
    fixture: Annotated[
        str | None, typer.Option(help="Whose links emulated devices have, e.g. hgx-h200-x8; see memferry topo.")
    ] = None,
    devices: Annotated[str | None, typer.Option(help="Ordinals, e.g. 0,1; all by default.")] = None,
    size: Annotated[
        str | None, typer.Option(help="Of a copy; cases by size go up to twice as much. 512MiB by default.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Measure each value so often; 3 by default.")] = None,
    copies: Annotated[int | None, typer.Option(help="Copies in a sample; 16 by default.")] = None,
    json: Annotated[str | None, typer.Option(help="Write settings, machine, samples and summary here.")] = None,
    csv: Annotated[str | None, typer.Option(help="Write the values here, one a line.")] = None,
    nvbandwidth_compat: Annotated[
        str | None, typer.Option(help="Write nvbandwidth's cases here, in the form of its own --json.")
    ] = None,
    plot: Annotated[str | None, typer.Option(help="Draw the cases by size here, as PNG.")] = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Measure nothing; compare two files of --json.  Exit status 1: something got worse."),
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Of --compare: how much worse still counts as equal.")] = 0.05,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what the transfer engine decides by, and its evidence.")
    ] = False,
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Measure the engine's ways anew, and keep that for later.")
    ] = False,
    time_limit: Annotated[float | None, typer.Option(help="Begin no case after so many seconds.")] = None,
) -> int:
    """Measure the links between host and devices, and the transfer engine over them."""
    given = dict(locals())
    from ..errors import ToolError
    from ..screen import Screen

    if compare is not None:
        from ..bandwidth.compare import compare as show_changes

        if not 0 <= tolerance < 1:
            raise ToolError(f"--tolerance: {tolerance} is no share from 0 to 1")
        return show_changes(Path(compare[0]), Path(compare[1]), tolerance, Screen())
    from ..bandwidth.job import list_cases as show_cases
    from ..bandwidth.job import run
    from ..bandwidth.options import BandwidthOptions

    if list_cases:
        return show_cases(Screen())
    settings = {name: value for name, value in given.items() if name not in ("list_cases", "compare", "tolerance")}
    return run(BandwidthOptions.build(**settings))
