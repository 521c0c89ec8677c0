"""A simulated iteration as spans and memory over time, from 0 at its beginning."""

from __future__ import annotations

from dataclasses import dataclass

from .evaluate import Run

QUEUES = ("compute", "in", "out", "cpu", "state", "peers", "relay in", "relay out")


@dataclass(frozen=True)
class Span:
    """One task.

    Attributes
    ----------
    queue : str
        compute; in and out: copies to the device and from it; cpu: updates there; state: updates streamed through
        the device; peers: between ranks; relay in and relay out: what idle devices copy.
    kind : str
        F, B: forward, backward; U: update; L: load of weights; G: gradients that leave; X: those that ranks
        exchange; S: adding them up.
    layer : str
    start, end : float
        Seconds.
    """

    queue: str
    kind: str
    layer: str
    start: float
    end: float


def spans(run: Run) -> list[Span]:
    """What happens in the iteration, by queue and time; what began before it is cut off."""
    found = []
    graph, trace = run.iteration.graph, run.trace
    for task, label in enumerate(graph.labels):
        kind, _, layer = label.partition(" ")
        start, end = max(trace.starts[task], run.begin), min(trace.ends[task], run.end)
        if graph.queues[task] in QUEUES and len(kind) == 1 and end > start:
            found.append(Span(graph.queues[task], kind, layer, start - run.begin, end - run.begin))
    return sorted(found, key=lambda span: (QUEUES.index(span.queue), span.start))


def device_memory(run: Run) -> list[tuple[float, int]]:
    """Device memory from each time of the iteration on; the run must have been recorded."""
    first, found = run.iteration.nbytes, list[tuple[float, int]]()
    for time, nbytes in run.trace.memory:
        if time <= run.begin:
            first = nbytes
        elif time <= run.end:
            if found and found[-1][0] == time - run.begin:
                found.pop()
            found.append((time - run.begin, nbytes))
    return [(0.0, first), *found]


def at(memory: list[tuple[float, int]], time: float) -> int:
    """Bytes at a time."""
    return [nbytes for since, nbytes in memory if since <= time][-1]
