"""When layers compute and when bytes move in each mode, by device events, and a picture of it.

    python -m benchmarks.timeline [--device cuda|emulated] [--json FILE] [--plot FILE]
    python -m benchmarks.timeline --from FILE --plot FILE

Linear layers one after the other, as in a transformer's feed-forward parts.  The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from memferry_allocator import Direction, Event, Span, Stream, open_device
from memferry_rt.adapters.torch.operators import LaneOutbox, linear_forward, weight_gradient
from memferry_rt.adapters.torch.operators.linear import WeightPanel
from memferry_rt.adapters.torch.profiling import Home, Stand
from memferry_rt.panels import SLOTS, Cut, HostMatrix, Panel, PanelRing, borders, panel_step
from memferry_rt.staging import StagingRing
from memferry_tools.machine import describe_machine
from memferry_tools.optional import require
from memferry_tools.version import version

LAYERS = 4
COMPUTE, COPY = "compute", "copy"


@dataclass(frozen=True)
class Interval:
    """What happened, in seconds since the first mark."""

    lane: str
    label: str
    begin_s: float
    end_s: float


class Marks:
    """Events around work on streams of a stand."""

    def __init__(self, stand: Stand) -> None:
        self._stand = stand
        self._first = stand.mark()
        self._spans: list[tuple[str, str, Event, Event]] = []

    @contextlib.contextmanager
    def around(self, stream: Stream, lane: str, label: str) -> Iterator[None]:
        begin = self._on(stream)
        yield
        self._spans.append((lane, label, begin, self._on(stream)))

    def intervals(self) -> list[Interval]:
        """All of it, once it is over."""
        self._stand.settle()
        since = self._first
        return [
            Interval(lane, label, begin.elapsed_since(since), end.elapsed_since(since))
            for lane, label, begin, end in self._spans
        ]

    def _on(self, stream: Stream) -> Event:
        return stream.record(self._stand.driver.create_event(self._stand.device, timing=True))


class MarkedRing(PanelRing):
    """A ring whose copies are marked."""

    marks: Marks
    label = ""

    def carry(self, matrix: HostMatrix, cut: Cut, start: int, stop: int, into: Span) -> tuple[Panel, Event]:
        with self.marks.around(self._lane, COPY, self.label):
            return super().carry(matrix, cut, start, stop, into)


class Scene:
    """Layers in host memory, and what each mode does with them."""

    def __init__(self, stand: Stand, shape: tuple[int, int], dtype: torch.dtype, panel: int) -> None:
        self.stand, self.shape, self.dtype, self.panel = stand, shape, dtype, panel
        self.homes = [stand.home(shape, dtype) for _ in range(LAYERS)]
        for home in self.homes:
            home.host.normal_(0.0, 0.02)
        self.slabs = [stand.buffer(shape, dtype) for _ in range(2)]
        self.pool = stand.pool((SLOTS + 2) * panel)
        outer, inner = shape
        self.cut = Cut(False, panel_step(outer, inner * dtype.itemsize, panel))

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self.stand.torch_device).to(self.dtype)

    def stream(self, marks: Marks, tokens: int) -> None:
        """Whole layers into two slabs, the next while one computes."""
        stand, x = self.stand, self.random(tokens, self.shape[1])
        lane = stand.engine.lane(Direction.HOST_TO_DEVICE)
        emptied: list[Event | None] = [None, None]
        for number, home in enumerate(self.homes):
            slab, free = self.slabs[number % 2], emptied[number % 2]
            if free is not None:
                lane.wait(free)
            with marks.around(lane, COPY, str(number)):
                stand.engine.copy(slab.span, home.span, Direction.HOST_TO_DEVICE, stream=lane)
            stand.stream.wait(lane.record())
            with marks.around(stand.stream, COMPUTE, str(number)):
                linear_forward(x, slab.tensor)
            emptied[number % 2] = stand.stream.record()

    def ring(self, marks: Marks, tokens: int) -> None:
        """Panels through a ring."""
        stand, x = self.stand, self.random(tokens, self.shape[1])
        ring = MarkedRing(stand.driver, stand.engine, self.pool, stand.stream, nbytes=self.panel)
        ring.marks = marks
        for number, home in enumerate(self.homes):
            ring.label = str(number)
            linear_forward(x, home.host, None, self._panels(ring, home, marks, str(number)))
        stand.settle()
        ring.close(stand.stream)

    def dha(self, marks: Marks, tokens: int) -> None:
        """Kernels that read host memory."""
        x = self.random(tokens, self.shape[1])
        for number, home in enumerate(self.homes):
            with marks.around(self.stand.stream, COMPUTE, str(number)):
                linear_forward(x, home.mapped)

    def buffer(self, marks: Marks, tokens: int) -> None:
        """Gradients made whole on the device, and copied from there."""
        stand, lane = self.stand, self.stand.engine.lane(Direction.DEVICE_TO_HOST)
        x, dy = self.random(tokens, self.shape[1]), self.random(tokens, self.shape[0])
        left: list[Event | None] = [None, None]
        for number, home in enumerate(self.homes):
            slab, gone = self.slabs[number % 2], left[number % 2]
            if gone is not None:
                stand.stream.wait(gone)
            with marks.around(stand.stream, COMPUTE, str(number)):
                torch.mm(dy.t(), x, out=slab.tensor)
            lane.wait(stand.stream.record())
            with marks.around(lane, COPY, str(number)):
                stand.engine.copy(home.span, slab.span, Direction.DEVICE_TO_HOST, stream=lane)
            left[number % 2] = lane.record()

    def in_place(self, marks: Marks, tokens: int) -> None:
        """Gradients panel by panel, each leaving while the next is made."""
        stand, lane = self.stand, self.stand.engine.lane(Direction.DEVICE_TO_HOST)
        x, dy = self.random(tokens, self.shape[1]), self.random(tokens, self.shape[0])
        ring = StagingRing(self.pool, 2 * self.panel, stand.stream)
        for number, home in enumerate(self.homes):
            box = MarkedOutbox(
                stand.driver, stand.engine, ring, stand.factory.device, stream=stand.stream, home=home.span
            )
            box.begin(marks, lane, str(number))
            parts = borders(self.shape[0], self.cut.step)
            weight_gradient(dy, x, home.mapped, borders=parts, outbox=box)
        stand.settle()
        ring.close(stand.stream)

    def _panels(self, ring: PanelRing, home: Home, marks: Marks, label: str) -> Iterator[WeightPanel]:
        for panel in ring.panels(home.matrix, self.cut, stream=self.stand.stream):
            flat = self.stand.factory.device(panel.span).view(self.dtype)
            with marks.around(self.stand.stream, COMPUTE, label):
                yield panel.start, panel.stop, flat.view(panel.rows, panel.columns)


class MarkedOutbox(LaneOutbox):
    """An outbox whose panels are marked as they are made and as they leave."""

    def begin(self, marks: Marks, lane: Stream, label: str) -> None:
        self._marks, self._out, self._label = marks, lane, label

    @contextlib.contextmanager
    def panel(self, offset: int, like: torch.Tensor) -> Iterator[torch.Tensor]:
        with super().panel(offset, like) as panel, self._marks.around(self._stream, COMPUTE, self._label):
            yield panel

    def _carry(self, piece: Any, home: Span) -> None:
        with self._marks.around(self._out, COPY, self._label):
            super()._carry(piece, home)


def record(device: str, *, small: bool) -> dict[str, Any]:
    """The intervals of every mode, the second time that it runs."""
    driver, ordinal = open_device(device)
    stand = Stand(driver, ordinal)
    shape, panel = ((96, 64), 8 << 10) if small else ((11008, 4096), 8 << 20)
    few, many = (4, 32) if small else (256, 8192)
    with stand.computing():
        scene = Scene(stand, shape, torch.float32 if small else torch.bfloat16, panel)
        parts: list[tuple[str, int, Callable[[Marks, int], None]]] = [
            ("weights STREAM", many, scene.stream),
            ("weights RING", many, scene.ring),
            ("gradients BUFFER", many, scene.buffer),
            ("gradients INPLACE", many, scene.in_place),
            ("weights STREAM", few, scene.stream),
            ("weights DHA", few, scene.dha),
        ]
        modes = [{"mode": name, "tokens": tokens, **_recorded(stand, run, tokens)} for name, tokens, run in parts]
        stand.settle()
        for home in scene.homes:
            home.close()
    stand.close()
    return {
        "schema": "memferry.timeline",
        "schema_version": 1,
        "memferry": version(),
        "machine": {**describe_machine(), "device": driver.device_info(ordinal).name, "emulated": stand.emulated},
        "settings": {"linear": list(shape), "layers": LAYERS, "panel_nbytes": panel},
        "modes": modes,
    }


def _recorded(stand: Stand, run: Callable[[Marks, int], None], tokens: int) -> dict[str, Any]:
    run(Marks(stand), tokens)
    stand.settle()
    if not stand.emulated:
        stand.hold(stand.stream)
        for lane in stand.lanes:
            lane.wait(stand.stream.record())
    marks = Marks(stand)
    run(marks, tokens)
    return {"intervals": [asdict(interval) for interval in marks.intervals()]}


def draw(result: dict[str, Any], file: Path) -> None:
    """A row for each mode: what computes above, what moves below, layers by colour."""
    require("matplotlib", what="the picture", install="'memferry-rt[tools]'")
    from matplotlib.figure import Figure

    modes = result["modes"]
    figure = Figure(figsize=(11, 1.15 * len(modes)), layout="constrained")
    all_axes = figure.subplots(len(modes), 1, squeeze=False)[:, 0]
    for axes, mode in zip(all_axes, modes, strict=True):
        first = min(each["begin_s"] for each in mode["intervals"])
        for each in mode["intervals"]:
            begin, end = (1e3 * (each[key] - first) for key in ("begin_s", "end_s"))
            height = 0 if each["lane"] == COPY else 1
            axes.barh(height, end - begin, left=begin, height=0.8, color=f"C{each['label']}", edgecolor="white")
        axes.set_yticks([0, 1], ["link", "compute"])
        axes.set_title(f"{mode['mode']}, {mode['tokens']} tokens", loc="left", fontsize=9)
        axes.set_xlim(left=0)
    all_axes[-1].set_xlabel("milliseconds")
    emulated = ", EMULATED" if result["machine"]["emulated"] else ""
    figure.suptitle(f"{result['settings']['layers']} linear layers, {result['machine']['device']}{emulated}")
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes that only try it out")
    parser.add_argument("--from", dest="recorded", type=Path, help="draw what was recorded before")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    if arguments.recorded:
        result = json.loads(arguments.recorded.read_text())
    else:
        result = record(arguments.device, small=arguments.small)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.plot:
        draw(result, arguments.plot)


if __name__ == "__main__":
    main()
