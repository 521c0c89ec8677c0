"""A picture of an iteration: what every queue does, and device memory."""

from __future__ import annotations

import io
from typing import Any

from memferry_rt.plan.evaluate import Run
from memferry_rt.plan.timeline import QUEUES, device_memory, spans

from ..optional import require

INSTALL = "'memferry-rt[tools]'"
_ROWS = {
    "compute": "compute",
    "in": "copies in",
    "out": "copies out",
    "cpu": "CPU updates",
    "state": "state through\nthe device",
    "peers": "between ranks",
    "relay in": "relayed in",
    "relay out": "relayed out",
}
_ALWAYS = 5  # of these rows
_COLOURS = {
    "F": "#4c72b0",
    "B": "#55a868",
    "U": "#c44e52",
    "L": "#8172b2",
    "G": "#ccb974",
    "X": "#64b5cd",
    "S": "#8c8c8c",
}
_WORDS = {
    "F": "forward",
    "B": "backward",
    "U": "update",
    "L": "load of weights",
    "G": "gradients leave",
    "X": "gradients exchanged",
    "S": "added up",
}


def check_drawable() -> None:
    """Find out whether a picture can be drawn, before time is spent on it."""
    require("matplotlib", what="--plot", install=INSTALL)


def draw(run: Run, title: str, budget: int) -> bytes:
    """A PNG of the timeline.

    Raises
    ------
    ToolError
        matplotlib is missing.
    """
    check_drawable()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    figure.suptitle(title)
    _timeline(upper, run)
    _memory(lower, run, budget)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    return png.getvalue()


def _timeline(axes: Any, run: Run) -> None:
    shown: set[str] = set()
    all_spans = spans(run)
    there = {span.queue for span in all_spans}
    rows = [queue for number, queue in enumerate(QUEUES) if number < _ALWAYS or queue in there]
    for span in all_spans:
        axes.broken_barh(
            [(span.start * 1e3, (span.end - span.start) * 1e3)],
            (rows.index(span.queue) - 0.4, 0.8),
            facecolors=_COLOURS[span.kind],
            edgecolor="white",
            linewidth=0.3,
            label=None if span.kind in shown else _WORDS[span.kind],
        )
        shown.add(span.kind)
    axes.set_yticks(range(len(rows)), [_ROWS[queue] for queue in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, run.seconds * 1e3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=len(_WORDS), frameon=False)


def _memory(axes: Any, run: Run, budget: int) -> None:
    points = device_memory(run)
    times = [time * 1e3 for time, _ in points] + [run.seconds * 1e3]
    values = [nbytes / 2**30 for _, nbytes in points]
    axes.step(times, [*values, values[-1]], where="post", color="#333333")
    axes.axhline(budget / 2**30, color="#c44e52", linestyle="--", linewidth=1)
    axes.set_ylim(0, budget / 2**30 * 1.1)
    axes.set_ylabel("device, GiB")
    axes.set_xlabel("ms since the end of the last backward")
    axes.grid(visible=True, alpha=0.3)
