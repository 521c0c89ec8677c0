"""One iteration of a choice as tasks: a backward, the update after it, and the whole next iteration.

The iteration time is that from the end of one backward to the end of the next: the update, as far as nothing hides
it, a forward and a backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .choice import Choice, Shares, slab_nbytes
from .copies import add_copy
from .cost import Work
from .exchange import Exchange
from .modes import GradientMode, StateMode, WeightMode
from .rates import Flow
from .schedule import FREE, Schedule
from .setting import Setting
from .simulate import Graph
from .updating import Updating


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
        self._shared = setting.machine.ranks > 1
        self._graph = Graph()
        self._exchange = Exchange(self._graph, setting.machine)
        self._schedule = Schedule(setting.workload, setting.costs, choice, shares.slabs, shared=self._shared)
        self._kernels: dict[tuple[int, int], int] = {}  # by pass and layer
        self._home: dict[
            int, int
        ] = {}  # of each layer, the task that brings its gradient where the update reads it
        self._loads: dict[tuple[int, int], int] = {}  # by pass and the layer that owns the weights
        self._updating = Updating(self._graph, setting, choice.layers, shares, self._schedule, self._home)
        self._update = self._updating.tasks
        self._in_ring = 0.0
        self._leaving: deque[tuple[int, float]] = (
            deque()
        )  # gradients in the ring: the task that ends it, and bytes
        self._sent: int | None = None  # the layer whose pieces are on their way between ranks
        self._spares = [0, choice.spares, 0, choice.spares]  # by pass

    def build(self) -> Iteration:
        """All tasks, in the order in which each queue gets them."""
        self._backwards(1)
        self._updating.rest(self._kernels[1, 0])
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
            if self._shared:
                self._backward_of_rank(number, layer)
            else:
                self._backward(number, layer)
        self._land()

    def _backward_of_rank(self, number: int, layer: int) -> None:
        """As `_backward`, but what goes home is the mean's own piece, behind the next layer's backward."""
        spec, choice, costs = self._layers[layer], self._choices[layer], self._setting.costs[layer]
        work = [costs.backward[self._mode(layer), GradientMode.BUFFER], Work(self._exchange.pack_seconds(spec))]
        if choice.recompute:
            work.append(costs.recompute[self._mode(layer)])
        needs, made = spec.backward_nbytes(choice.recompute), spec.gradient_nbytes
        ends = spec.kept_nbytes(choice.recompute) + needs
        if layer == len(self._layers) - 1:
            ends += self._setting.workload.working_nbytes
        kernel = self._kernel(number, layer, "B", work, [self._come(number, layer)], needs + made, ends)
        if not made:
            return
        self._land()
        self._exchange.send(spec, choice.gradient, kernel)
        self._sent = layer

    def _land(self) -> None:
        """The own piece of the layer that was sent last goes home."""
        if self._sent is None:
            return
        layer, self._sent = self._sent, None
        nbytes = self._layers[layer].gradient_nbytes * self._part
        if self._choices[layer].gradient is GradientMode.INPLACE:
            self._home[layer] = self._exchange.land([])
            return
        task = self._exchange.land(self._make_way(nbytes))
        label = f"G {self._layers[layer].name}"
        task = add_copy(self._graph, self._machine, "out", label, nbytes, after=[task])
        self._home[layer] = self._is_leaving(task, nbytes)

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
            self._updating.early(layer)

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
        replaced = first and update is not None and (self._shared or choice.state is StateMode.CPU)
        if choice.weight is WeightMode.RESIDENT:
            return self._loading(number, owner, spec.weight_nbytes, [update], 0) if replaced else earlier
        room = self._schedule.load_before(number, layer)
        if room is None:
            return earlier
        nbytes = spec.weight_nbytes if replaced else slab_nbytes(spec, choice)
        after = [update, None if room is FREE else self._kernels.get(room)]
        return self._loading(number, owner, nbytes, after, slab_nbytes(spec, choice))

    def _loading(self, number: int, owner: int, nbytes: int, after: Sequence[int | None], takes: int) -> int:
        part = self._part if self._setting.gathered else 1.0
        label, gathered = f"L {self._layers[owner].name}", nbytes * (1 - part)
        task = add_copy(
            self._graph, self._machine, "in", label, nbytes * part, after=after, takes=takes, gathered=gathered
        )
        self._loads[number, owner] = task
        return task

    def _make_way(self, nbytes: float) -> list[int]:
        """What must have left the ring before a layer's gradients may follow: they go in turn."""
        waits: list[int] = []
        while nbytes and self._in_ring > self._shares.ring:
            task, gone = self._leaving.popleft()
            self._in_ring -= gone
            waits = [task]
        return waits

    def _leave(self, layer: int, nbytes: int, begun: int | None, kernel: int) -> int:
        """A layer's gradients go home, one parameter's while the next one's is made, the last at the end."""
        spec = self._layers[layer]
        tail = min(spec.largest_nbytes, self._shares.ring // 2, nbytes)
        for size, after in ((nbytes - tail, begun), (tail, kernel)):
            if size:
                task = add_copy(self._graph, self._machine, "out", f"G {spec.name}", size, after=[after])
        return self._is_leaving(task, nbytes)

    def _is_leaving(self, task: int, nbytes: float) -> int:
        self._leaving.append((task, nbytes))
        self._in_ring += nbytes
        return task
