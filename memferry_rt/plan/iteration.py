"""One iteration of a choice as tasks: a backward, the update after it, and the whole next iteration.

The iteration time is that from the end of one backward to the end of the next: the update, as far as nothing hides
it, a forward and a backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .choice import Choice, Shares, slab_nbytes
from .cost import LayerCost, Work, cpu_update_nbytes, update_nbytes
from .machine import Machine
from .model import Workload
from .modes import GradientMode, StateMode, WeightMode
from .rates import Flow
from .schedule import FREE, Schedule
from .simulate import Graph

SETTLE = 2e-4  # seconds from the end of backward until the norm is known and updates begin
CALL = 2e-5  # of one layer's update by the CPU, to begin it


@dataclass(frozen=True)
class Setting:
    """Everything but the choice that decides how long an iteration takes.

    Attributes
    ----------
    early : bool
        Whether updates made during backward, into spare slabs, are used: clipping does not bite.
    overlap : bool
        Whether a forward begins as soon as its first layers are updated; else when all are.
    """

    workload: Workload
    costs: tuple[LayerCost, ...]
    machine: Machine
    early: bool = False
    overlap: bool = True


@dataclass
class Iteration:
    """The tasks, and which of them are what.

    Attributes
    ----------
    graph : Graph
    begins, ends : int
        The tasks at whose ends the iteration begins and ends.
    nbytes : int
        Device memory at the beginning.
    forward, backward, update, load : dict of int to int
        Tasks of the iteration, by layer.
    """

    graph: Graph
    begins: int
    ends: int
    nbytes: int
    forward: dict[int, int]
    backward: dict[int, int]
    update: dict[int, int]
    load: dict[int, int]


def build_iteration(setting: Setting, choice: Choice, shares: Shares) -> Iteration:
    """The tasks of a choice.

    Raises
    ------
    ValueError
        The choice does not fit in its shares.
    """
    if not shares.fits:
        raise ValueError("a choice that does not fit has no iteration")
    return _Builder(setting, choice, shares).build()


class _Builder:
    def __init__(self, setting: Setting, choice: Choice, shares: Shares) -> None:
        self._setting = setting
        self._machine = setting.machine
        self._layers = setting.workload.layers
        self._owners = setting.workload.owners
        self._choices = choice.layers
        self._shares = shares
        self._part = 1 / setting.machine.ranks
        self._graph = Graph()
        self._schedule = Schedule(setting.workload, setting.costs, choice, shares.slabs)
        self._kernels: dict[tuple[int, int], int] = {}  # by pass and layer
        self._home: dict[
            int, int
        ] = {}  # of each layer, the task that brings its gradient where the update reads it
        self._update: dict[int, int] = {}
        self._loads: dict[tuple[int, int], int] = {}  # by pass and the layer that owns the weights
        self._streaming = False  # whether state has begun to stream in this update
        self._settled: int | None = None  # the task after which updates may begin
        self._in_ring = 0
        self._leaving: deque[tuple[int, int]] = deque()  # gradients in the ring: the task that ends it, and bytes
        self._spares = [0, choice.spares, 0, choice.spares]  # by pass

    def build(self) -> Iteration:
        """All tasks, in the order in which each queue gets them."""
        self._backwards(1)
        self._updates()
        for layer in range(len(self._layers)):
            self._forward(layer)
        self._backwards(3)
        choices = self._choices
        kept = sum(layer.kept_nbytes(choices[number].recompute) for number, layer in enumerate(self._layers))
        nbytes = self._shares.fixed + self._schedule.there_at(1) + kept + self._setting.workload.working_nbytes
        kernels = self._kernels
        return Iteration(
            self._graph,
            kernels[1, 0],
            kernels[3, 0],
            nbytes,
            {layer: task for (number, layer), task in kernels.items() if number == 2},
            {layer: task for (number, layer), task in kernels.items() if number == 3},
            self._update,
            {layer: task for (number, layer), task in self._loads.items() if number == 2},
        )

    # -- forward and backward -----------------------------------------------------------------------------
    def _forward(self, layer: int) -> None:
        spec, mode = self._layers[layer], self._mode(layer)
        work = self._setting.costs[layer].forward[mode]
        loaded = self._come(2, layer)
        takes = spec.kept_nbytes(self._choices[layer].recompute)
        if layer == len(self._layers) - 1:
            takes += self._setting.workload.working_nbytes
        waits = [loaded, self._update.get(self._owners[layer])]
        if not self._setting.overlap and layer == 0:
            waits += self._update.values()
        self._kernel(2, layer, "F", [work], waits, takes, 0)

    def _backwards(self, number: int) -> None:
        for layer in range(len(self._layers) - 1, -1, -1):
            self._backward(number, layer)

    def _backward(self, number: int, layer: int) -> None:
        spec, choice, costs = self._layers[layer], self._choices[layer], self._setting.costs[layer]
        mode = self._mode(layer)
        work = [costs.backward[mode, choice.gradient]]
        if choice.recompute:
            work.append(costs.recompute[mode])
        leaves = spec.gradient_nbytes
        if choice.gradient is GradientMode.INPLACE or choice.state is StateMode.RESIDENT:
            leaves = 0
        waits = [self._come(number, layer), *self._make_way(leaves)]
        begun = self._graph.add("compute", f"begin {spec.name}", [], after=waits) if leaves else None
        needs = spec.backward_nbytes(choice.recompute)
        ends = spec.kept_nbytes(choice.recompute) + needs
        if layer == len(self._layers) - 1:
            ends += self._setting.workload.working_nbytes
        kernel = self._kernel(number, layer, "B", work, waits, needs, ends)
        self._home[layer] = kernel
        if leaves:
            self._home[layer] = self._leave(layer, leaves, begun, kernel)
        if self._spares[number] and choice.state is StateMode.CPU and spec.state_nbytes:
            self._spares[number] -= 1
            self._update_on_cpu(layer, early=True)

    def _kernel(
        self,
        number: int,
        layer: int,
        label: str,
        work: Sequence[Work],
        after: Sequence[int | None],
        takes: int,
        gives: int,
    ) -> int:
        flows = [
            (Flow.TIME, sum(each.seconds for each in work)),
            (Flow.READ, sum(each.read_nbytes for each in work)),
            (Flow.WRITE, sum(each.write_nbytes for each in work)),
            (Flow.COPY_IN, sum(each.panel_nbytes for each in work)),
        ]
        gives += self._schedule.released_after(number, layer)
        task = self._graph.add(
            "compute", f"{label} {self._layers[layer].name}", flows, after=after, takes=takes, gives=gives
        )
        self._kernels[number, layer] = task
        return task

    def _mode(self, layer: int) -> WeightMode:
        return self._choices[self._owners[layer]].weight

    def _come(self, number: int, layer: int) -> int | None:
        """The task that brings the weights for a use, if one must."""
        owner = self._owners[layer]
        spec, choice = self._layers[owner], self._choices[owner]
        earlier = self._loads.get((number, owner))
        first = number == 2 and earlier is None
        update = self._update.get(owner) if number == 2 else None
        if choice.weight is WeightMode.RESIDENT:
            if not first or choice.state is not StateMode.CPU or update is None:
                return earlier
            return self._loading(number, owner, spec.weight_nbytes, [update], 0)
        room = self._schedule.load_before(number, layer)
        if room is None:
            return earlier
        nbytes = spec.weight_nbytes if first and choice.state is StateMode.CPU else slab_nbytes(spec, choice)
        after = [update, None if room is FREE else self._kernels.get(room)]
        return self._loading(number, owner, nbytes, after, slab_nbytes(spec, choice))

    def _loading(self, number: int, owner: int, nbytes: int, after: Sequence[int | None], takes: int) -> int:
        flows = [(Flow.COPY_IN, nbytes * self._part), (Flow.PEER, nbytes * (1 - self._part))]
        label = f"L {self._layers[owner].name}"
        task = self._graph.add("in", label, flows, after=after, latency=self._machine.copy_latency, takes=takes)
        self._loads[number, owner] = task
        return task

    def _make_way(self, nbytes: int) -> list[int]:
        """What must have left the ring before a layer's gradients may follow: they go in turn."""
        waits: list[int] = []
        while nbytes and self._in_ring > self._shares.ring:
            task, gone = self._leaving.popleft()
            self._in_ring -= gone
            waits = [task]
        return waits

    def _leave(self, layer: int, nbytes: int, begun: int | None, kernel: int) -> int:
        """A layer's gradients go home, one parameter's while the next one's is made, the last at the end."""
        spec, peers = self._layers[layer], nbytes * (1 - self._part)
        tail = min(spec.largest_nbytes, self._shares.ring // 2, nbytes)
        parts = [(nbytes - tail, begun, 0.0), (tail, kernel, peers)]
        for size, after, gathered in parts:
            if size:
                flows = [(Flow.COPY_OUT, size * self._part), (Flow.PEER, gathered)]
                task = self._graph.add(
                    "out", f"G {spec.name}", flows, after=[after], latency=self._machine.copy_latency
                )
        self._leaving.append((task, nbytes))
        self._in_ring += nbytes
        return task

    # -- updates ------------------------------------------------------------------------------------------
    def _updates(self) -> None:
        """Of all layers that were not updated early, in forward order."""
        self._settled = self._graph.add("host", "norm", [(Flow.TIME, SETTLE)], after=[self._kernels[1, 0]])
        for layer, choice in enumerate(self._choices):
            if not self._layers[layer].state_nbytes or layer in self._update:
                continue
            if choice.state is StateMode.CPU:
                self._update_on_cpu(layer)
            elif choice.state is StateMode.STREAMED:
                self._update_streamed(layer)
            else:
                self._update_resident(layer)

    def _update_on_cpu(self, layer: int, *, early: bool = False) -> None:
        spec = self._layers[layer]
        nbytes = cpu_update_nbytes(spec) + (2 * spec.weight_nbytes if early else 0)  # copied home by `step`
        after = [self._home[layer]] if early else [self._home[layer], self._settled]
        task = self._graph.add(
            "cpu", f"U {spec.name}", [(Flow.CPU, nbytes * self._part)], after=after, latency=CALL
        )
        self._update.setdefault(layer, task)

    def _update_streamed(self, layer: int) -> None:
        spec = self._layers[layer]
        there = self._choices[layer].weight is WeightMode.RESIDENT or self._schedule.stays(layer)
        into, out = update_nbytes(spec, weights=not there)
        latency = 2 * self._machine.copy_latency
        if not self._streaming:
            self._streaming = True
            latency += self._shares.stream / 3 / self._machine.to_device  # the ring fills
        flows = [(Flow.COPY_IN, into * self._part), (Flow.COPY_OUT, out * self._part)]
        after = [self._home[layer], self._settled]
        self._update[layer] = self._graph.add("state", f"U {spec.name}", flows, after=after, latency=latency)

    def _update_resident(self, layer: int) -> None:
        spec = self._layers[layer]
        seconds = cpu_update_nbytes(spec) * self._part / self._machine.device_memory
        self._update[layer] = self._graph.add(
            "compute", f"U {spec.name}", [(Flow.TIME, seconds)], after=[self._home[layer], self._settled]
        )
