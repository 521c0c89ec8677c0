"""A picture of what was measured by size."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from memferry_transport.measure import CaseResult

from ..errors import ToolError
from ..optional import require

INSTALL = "'memferry-rt[tools]'"


def draw(results: Sequence[CaseResult], title: str) -> bytes:
    """A PNG with one plot for each case that was measured by size.

    Raises
    ------
    ToolError
        matplotlib is missing, or there is nothing to draw.
    """
    shown = [
        result
        for result in results
        if result.matrix is not None and result.matrix.column == "bytes" and len(result.matrix.columns) > 1
    ]
    if not shown:
        raise ToolError(
            "--plot: no case that was run measures by size; add for example --case host_to_device_by_size"
        )
    figure = _figure(1 + (len(shown) - 1) // 2, min(2, len(shown)))
    figure.suptitle(title)
    for number, result in enumerate(shown):
        _plot(figure.axes[number], result)
    for axes in figure.axes[len(shown) :]:
        axes.set_visible(False)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


def check_drawable() -> None:
    """Find out whether a picture can be drawn, before time is spent on it."""
    require("matplotlib", what="--plot", install=INSTALL)


def _figure(rows: int, columns: int) -> Any:
    require("matplotlib", what="--plot", install=INSTALL)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * columns, 4 * rows), layout="constrained")
    figure.subplots(rows, columns, squeeze=False)
    return figure


def _plot(axes: Any, result: CaseResult) -> None:
    matrix = result.matrix
    assert matrix is not None
    for row in matrix.rows:
        points = [(int(column), matrix.value(row, column)) for column in matrix.columns]
        known = [(size, value) for size, value in points if value is not None]
        axes.plot(
            [size for size, _ in known],
            [value for _, value in known],
            marker=".",
            label=row if matrix.row == "ways" else f"{matrix.row} {row}",
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bytes")
    axes.set_ylabel(result.unit)
    axes.set_title(result.name)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
