"""When weights come and go in an iteration: uses in order, the loads that they need, and what makes room."""

from __future__ import annotations

from .choice import Choice, slab_nbytes
from .cost import LayerCost
from .model import Workload
from .modes import StateMode, WeightMode
from .slabs import Use, plan_loads

FREE = (-1, -1)  # room that there is from the beginning


class Schedule:
    """The loads of two iterations' uses.

    Passes 0 and 2 are forwards, 1 and 3 backwards; updates are made between 1 and 2.

    Parameters
    ----------
    workload : Workload
    costs : tuple of LayerCost
    choice : Choice
    capacity : int
        Bytes of device memory for weights that come and go.
    shared : bool
        Whether ranks share the updates: then no device copy survives one.
    """

    def __init__(
        self,
        workload: Workload,
        costs: tuple[LayerCost, ...],
        choice: Choice,
        capacity: int,
        *,
        shared: bool = False,
    ) -> None:
        self._shared = shared
        self._places: dict[tuple[int, int], int] = {}  # of the uses, by pass and layer
        self._uses: list[Use] = []
        self._owners = workload.owners
        count = len(workload.layers)
        for number in range(4):
            for layer in range(count) if number % 2 == 0 else range(count - 1, -1, -1):
                self._add(number, layer, workload, costs, choice)
        self._keys = list(self._places)
        self._mark_last(workload, choice)
        found = plan_loads(self._uses, capacity)
        self._loads, self._released = found.loads, found.released

    def _add(
        self, number: int, layer: int, workload: Workload, costs: tuple[LayerCost, ...], choice: Choice
    ) -> None:
        owner = self._owners[layer]
        mode = choice.layers[owner].weight
        backward = number % 2 == 1
        if mode is WeightMode.STREAM or (mode is WeightMode.DHA_THEN_LOAD and backward):
            if backward and not costs[layer].backward_needs_weights:
                return
            self._places[number, layer] = len(self._uses)
            self._uses.append(Use(owner, slab_nbytes(workload.layers[owner], choice.layers[owner])))

    def _mark_last(self, workload: Workload, choice: Choice) -> None:
        """The last use before an update at home: after it the copy is worth nothing."""
        for passes in ((0, 1), (2, 3)):
            last: dict[int, int] = {}
            for place, key in enumerate(self._keys):
                if key[0] in passes:
                    last[self._owners[key[1]]] = place
            for owner, place in last.items():
                kept = not self._shared and choice.layers[owner].state is not StateMode.CPU
                if workload.layers[owner].state_nbytes and not kept:
                    self._uses[place] = Use(owner, self._uses[place].nbytes, last=True)

    def load_before(self, number: int, layer: int) -> tuple[int, int] | None:
        """The pass and layer after which there is room for a use's load, or `FREE`; None if it needs no load."""
        place = self._places.get((number, layer))
        if place is None or place not in self._loads:
            return None
        after = self._loads[place]
        return FREE if after < 0 else self._keys[after]

    def released_after(self, number: int, layer: int) -> int:
        """Bytes that are given up when a use ends."""
        place = self._places.get((number, layer))
        return self._uses[place].nbytes if place in self._released and place is not None else 0

    def there_at(self, number: int) -> int:
        """Bytes of slabs that are there when a pass begins."""
        before = [place for place, key in enumerate(self._keys) if key[0] < number]
        came = sum(self._uses[place].nbytes for place in before if place in self._loads)
        return came - sum(self._uses[place].nbytes for place in before if place in self._released)

    def stays(self, layer: int) -> bool:
        """Whether a streamed layer's copy is still there when its update comes."""
        if self._shared:
            return False
        first = next((key for key in self._keys if key[0] == 2 and self._owners[key[1]] == layer), None)
        return first is not None and self._places[first] not in self._loads
