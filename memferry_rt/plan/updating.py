"""The tasks that make layers' weights new: by the CPU, or by the device as state passes through it or stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .choice import LayerChoice, Shares
from .cost import cpu_update_nbytes, update_nbytes
from .exchange import MEETING, MEETINGS
from .modes import StateMode, WeightMode
from .rates import Flow
from .schedule import Schedule
from .setting import Setting
from .simulate import Graph

SETTLE = 2e-4  # seconds from the end of backward until the norm is known and updates begin
CALL = 2e-5  # of one layer's update by the CPU, to begin it


class Updating:
    """Adds the updates of one step to a graph; of several ranks each makes its part of every one.

    Parameters
    ----------
    graph : Graph
    setting : Setting
    choices : sequence of LayerChoice
    shares : Shares
    schedule : Schedule
    home : mapping of int to int
        Of each layer, the task that brings its gradient where the update reads it.

    Attributes
    ----------
    tasks : dict of int to int
        By layer.
    """

    def __init__(
        self,
        graph: Graph,
        setting: Setting,
        choices: Sequence[LayerChoice],
        shares: Shares,
        schedule: Schedule,
        home: Mapping[int, int],
    ) -> None:
        self._graph = graph
        self._machine = setting.machine
        self._layers = setting.workload.layers
        self._choices = choices
        self._shares = shares
        self._schedule = schedule
        self._home = home
        self._part = 1 / setting.machine.ranks
        self._streaming = False  # whether state has begun to stream
        self._settled: int | None = None  # the task after which updates may begin
        self.tasks: dict[int, int] = {}

    def early(self, layer: int) -> None:
        """By the CPU into a spare slab, as soon as the gradient is at home."""
        self._on_cpu(layer, early=True)

    def rest(self, backward: int) -> None:
        """Of all layers that were not updated early, in forward order, after the last task of a backward."""
        after, seconds = [backward], SETTLE
        if self._machine.ranks > 1:
            after, seconds = [backward, *self._home.values()], SETTLE + MEETINGS * MEETING
        self._settled = self._graph.add("host", "norm", [(Flow.TIME, seconds)], after=after)
        for layer, choice in enumerate(self._choices):
            if not self._layers[layer].state_nbytes or layer in self.tasks:
                continue
            if choice.state is StateMode.CPU:
                self._on_cpu(layer)
            elif choice.state is StateMode.STREAMED:
                self._streamed(layer)
            else:
                self._resident(layer)

    def _on_cpu(self, layer: int, *, early: bool = False) -> None:
        spec = self._layers[layer]
        nbytes = cpu_update_nbytes(spec) + (2 * spec.weight_nbytes if early else 0)  # copied home by `step`
        after = [self._home[layer]] if early else [self._home[layer], self._settled]
        task = self._graph.add(
            "cpu", f"U {spec.name}", [(Flow.CPU, nbytes * self._part)], after=after, latency=CALL
        )
        self.tasks.setdefault(layer, task)

    def _streamed(self, layer: int) -> None:
        spec = self._layers[layer]
        resident = self._choices[layer].weight is WeightMode.RESIDENT and self._machine.ranks == 1
        into, out = update_nbytes(spec, weights=not (resident or self._schedule.stays(layer)))
        latency = 2 * self._machine.copy_latency
        if not self._streaming:
            self._streaming = True
            latency += self._shares.stream / 3 / self._machine.to_device  # the ring fills
        flows = [(Flow.COPY_IN, into * self._part), (Flow.COPY_OUT, out * self._part)]
        after = [self._home[layer], self._settled]
        self.tasks[layer] = self._graph.add("state", f"U {spec.name}", flows, after=after, latency=latency)

    def _resident(self, layer: int) -> None:
        spec = self._layers[layer]
        seconds = cpu_update_nbytes(spec) * self._part / self._machine.device_memory
        self.tasks[layer] = self._graph.add(
            "compute", f"U {spec.name}", [(Flow.TIME, seconds)], after=[self._home[layer], self._settled]
        )
