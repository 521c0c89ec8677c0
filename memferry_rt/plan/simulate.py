"""Tasks on queues, simulated event by event: fluid links, order of queues, memory at every moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlanError
from .rates import FLOWS, Flow, Rates

Flows = Sequence[tuple[Flow, float]]
_DONE = 1 + 1e-9


class Graph:
    """Tasks: each on a queue that runs one at a time and in order, each after others.

    Attributes
    ----------
    labels : list of str
    queues : list of str
        Of each task.
    """

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.queues: list[str] = []
        self.latencies: list[float] = []
        self.flows: list[list[tuple[Flow, float]]] = []
        self.after: list[tuple[int, ...]] = []
        self.takes: list[int] = []
        self.gives: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def add(
        self,
        queue: str,
        label: str,
        flows: Flows,
        *,
        after: Sequence[int | None] = (),
        latency: float = 0.0,
        takes: int = 0,
        gives: int = 0,
    ) -> int:
        """A task behind what is on its queue already.

        Parameters
        ----------
        queue, label : str
        flows : sequence of (Flow, float)
            All that it needs, at once; it ends when all of it is done.
        after : sequence of int or None
            Tasks that must have ended before it starts; None is none.
        latency : float
            Seconds at its beginning, before anything flows.
        takes, gives : int
            Bytes of device memory more when it starts, and less when it ends; either may be negative.

        Returns
        -------
        int
            The task.
        """
        self.labels.append(label)
        self.queues.append(queue)
        self.latencies.append(latency)
        self.flows.append([(flow, amount) for flow, amount in flows if amount > 0])
        self.after.append(tuple({task for task in after if task is not None}))
        self.takes.append(takes)
        self.gives.append(gives)
        return len(self.labels) - 1


@dataclass(frozen=True)
class Segment:
    """A time in which nothing began or ended: its end, and what was under way, by kind of flow."""

    end: float
    counts: tuple[int, ...]
    rates: tuple[float, ...]


@dataclass
class Trace:
    """What happened.

    Attributes
    ----------
    starts, ends : list of float
        Of the tasks.
    amounts : list of float
        That flowed, by kind of flow.
    peak_nbytes : int
        Of device memory, over all moments.
    memory : list of (float, int)
        Device memory from each time on, if it was recorded.
    segments : list of Segment
        If they were recorded.
    """

    starts: list[float]
    ends: list[float]
    amounts: list[float]
    peak_nbytes: int
    memory: list[tuple[float, int]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)


def simulate(graph: Graph, rates: Rates, *, nbytes: int = 0, record: bool = False) -> Trace:
    """Run all tasks.

    Parameters
    ----------
    graph : Graph
    rates : Rates
    nbytes : int
        Of device memory in use at the beginning.
    record : bool
        Keep memory and segments.

    Raises
    ------
    PlanError
        Tasks wait for each other in a circle.
    """
    return _Run(graph, rates, nbytes, record).run()


class _Run:
    def __init__(self, graph: Graph, rates: Rates, nbytes: int, record: bool) -> None:
        count = len(graph)
        self._graph = graph
        self._rates = rates
        self._record = record
        self._now = 0.0
        self._nbytes = nbytes
        self._waiting = [len(after) for after in graph.after]
        self._followers: list[list[int]] = [[] for _ in range(count)]
        for task, after in enumerate(graph.after):
            for before in after:
                self._followers[before].append(task)
        self._behind: list[int] = [-1] * count  # the next on the same queue
        self._first: list[bool] = [False] * count  # whether it is at the head of its queue
        last: dict[str, int] = {}
        for task, queue in enumerate(graph.queues):
            if queue in last:
                self._behind[last[queue]] = task
            else:
                self._first[task] = True
            last[queue] = task
        self._open = [0] * count  # flows that a task still has
        self._latent = [latency > 0 for latency in graph.latencies]
        self._active: list[list[Any]] = []  # each flow: what is left, its kind, its task
        self._counts = [0] * FLOWS
        self._left = count
        self._trace = Trace([0.0] * count, [0.0] * count, [0.0] * FLOWS, nbytes)

    def run(self) -> Trace:
        ready = [task for task, first in enumerate(self._first) if first and not self._waiting[task]]
        self._settle(self._begin(ready))
        while self._active:
            self._settle(self._advance())
        if self._left:
            stuck = next(task for task, first in enumerate(self._first) if first and self._waiting[task])
            raise PlanError(f"{self._graph.labels[stuck]} waits for what comes after it: the plan cannot be run")
        return self._trace

    def _advance(self) -> list[int]:
        """To the next end of a flow; the tasks that have no more of them."""
        counts, open_, amounts = self._counts, self._open, self._trace.amounts
        rates = self._rates.of(tuple(counts))
        step = min([left / rates[kind] for left, kind, _ in self._active])
        self._now += step
        if self._record:
            self._trace.segments.append(Segment(self._now, tuple(counts), rates))
        keep, over = [], []
        for flow in self._active:
            left, kind, task = flow
            done = rates[kind] * step
            if left <= done * _DONE:
                amounts[kind] += left
                counts[kind] -= 1
                open_[task] -= 1
                if not open_[task]:
                    over.append(task)
            else:
                amounts[kind] += done
                flow[0] = left - done
                keep.append(flow)
        self._active = keep
        return [task for task in over if not self._goes_on(task)]

    def _goes_on(self, task: int) -> bool:
        """Whether only the latency of a task is over."""
        if not self._latent[task]:
            return False
        self._latent[task] = False
        return self._flow(task, self._graph.flows[task])

    def _settle(self, over: list[int]) -> None:
        """End tasks, and begin all that can begin now."""
        while over:
            over = self._begin(self._end(over))

    def _begin(self, tasks: list[int]) -> list[int]:
        """Start tasks; those that have nothing to do."""
        graph, idle = self._graph, []
        for task in tasks:
            self._trace.starts[task] = self._now
            self._take(graph.takes[task])
            latency = graph.latencies[task]
            if not self._flow(task, [(Flow.TIME, latency)] if latency > 0 else graph.flows[task]):
                idle.append(task)
        return idle

    def _flow(self, task: int, flows: Flows) -> bool:
        for kind, amount in flows:
            self._active.append([amount, kind, task])
            self._counts[kind] += 1
        self._open[task] = len(flows)
        return bool(flows)

    def _end(self, tasks: list[int]) -> list[int]:
        """Tasks are over; which others can start now."""
        ready = []
        for task in tasks:
            self._trace.ends[task] = self._now
            self._left -= 1
            self._take(-self._graph.gives[task])
            behind = self._behind[task]
            if behind >= 0:
                self._first[behind] = True
                if not self._waiting[behind]:
                    ready.append(behind)
            for follower in self._followers[task]:
                self._waiting[follower] -= 1
                if not self._waiting[follower] and self._first[follower]:
                    ready.append(follower)
        return ready

    def _take(self, nbytes: int) -> None:
        if nbytes:
            self._nbytes += nbytes
            self._trace.peak_nbytes = max(self._trace.peak_nbytes, self._nbytes)
            if self._record:
                self._trace.memory.append((self._now, self._nbytes))
