"""From a few numbers to a whole choice: what memory has room for goes where it helps most."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..split import spread
from .choice import Choice, LayerChoice, Shares, share_device, state_nbytes
from .cost import LayerCost
from .model import Workload
from .modes import GradientMode, LayerModes, StateMode, WeightMode
from .options import PlanOptions

PARTITION = 2 << 20  # bytes: what device memory is mapped by


@dataclass(frozen=True)
class Knobs:
    """What the search turns.

    Attributes
    ----------
    weights : tuple of WeightMode
        Of each layer.
    gradients : tuple of GradientMode
    pin : int
        Layers of those that are streamed whose weights stay on the device, the first ones, if all of these fit.
    states : int
        Layers whose state is at home on the device, the first ones, as far as there is room.
    share : float
        Of the other parameters, what the device updates with state streamed through it.
    kept : int
        Blocks that keep their activations where they may choose.
    spares : int
    """

    weights: tuple[WeightMode, ...]
    gradients: tuple[GradientMode, ...]
    pin: int = 0
    states: int = 0
    share: float = 0.0
    kept: int = 0
    spares: int = 0


class Composer:
    """Makes choices of knobs, within what is given by hand.

    Parameters
    ----------
    workload : Workload
    costs : tuple of LayerCost
    options : PlanOptions
    given : dict of str to LayerModes
        Modes by hand, for every layer.
    """

    def __init__(
        self,
        workload: Workload,
        costs: tuple[LayerCost, ...],
        options: PlanOptions,
        given: dict[str, LayerModes],
    ) -> None:
        self._workload = workload
        self._costs = costs
        self._options = options
        self._given = [given[layer.name] for layer in workload.layers]
        self.optional = [number for number, layer in enumerate(workload.layers) if layer.recompute is None]

    def allowed(self, layer: int) -> tuple[WeightMode, ...]:
        """The weight modes that a layer may have; of one with weights of its own."""
        if self._given[layer].weight is not None:
            return (self._given[layer].weight,)  # type: ignore[return-value]
        users = [number for number, owner in enumerate(self._workload.owners) if owner == layer]
        modes = [mode for mode in WeightMode if mode in self._options.weight_modes]
        return tuple(mode for mode in modes if all(mode in self._costs[user].forward for user in users))

    def start(self) -> Knobs:
        """Everything streamed, gradients through the ring, updates by the CPU, but for what is given."""
        weights, gradients = [], []
        for given in self._given:
            weights.append(given.weight or WeightMode.STREAM)
            gradients.append(given.gradient or GradientMode.BUFFER)
        return Knobs(tuple(weights), tuple(gradients))

    def compose(self, knobs: Knobs) -> Choice:
        """The choice; it may not fit."""
        weights = [given.weight or mode for given, mode in zip(self._given, knobs.weights, strict=True)]
        layers = [
            LayerChoice(weights[number], self._gradient(number, weights, knobs), recompute=bool(layer.recompute))
            for number, layer in enumerate(self._workload.layers)
        ]
        for place, number in enumerate(reversed(self.optional)):
            layers[number] = replace(layers[number], recompute=place >= knobs.kept)
        for number, given in enumerate(self._given):
            if given.state is not None:
                layers[number] = replace(layers[number], state=given.state)
        if knobs.pin:
            layers = self._pinned(layers, knobs.pin)
        layers = self._with_states(layers, knobs.states)
        layers = self._with_updates(layers, knobs.share)
        choice = Choice(tuple(layers), knobs.spares)
        return self._with_partial(choice) if self._options.partial else choice

    def _gradient(self, number: int, weights: list[WeightMode], knobs: Knobs) -> GradientMode:
        mode = self._given[number].gradient or knobs.gradients[number]
        able = self._costs[number].gradient_modes(weights[self._workload.owners[number]])
        return mode if mode in able else GradientMode.BUFFER

    def _shares(self, layers: list[LayerChoice]) -> Shares:
        return share_device(self._workload, Choice(tuple(layers)), self._options.device_memory)

    def _pinned(self, layers: list[LayerChoice], count: int) -> list[LayerChoice]:
        pinned = list(layers)
        for number, spec in enumerate(self._workload.layers):
            free = layers[number].weight is WeightMode.STREAM and self._given[number].weight is None
            if count and free and spec.parameters:
                pinned[number] = replace(layers[number], weight=WeightMode.RESIDENT)
                count -= 1
        return pinned if self._shares(pinned).fits else layers

    def at_home(self, choice: Choice) -> int:
        """How many of the first layers could have weights and state on the device, with all others streamed."""
        shares = share_device(self._workload, choice, self._options.device_memory)
        room, count = shares.slabs + shares.pinned + shares.states - 2 * shares.least, 0
        for spec in self._workload.layers:
            room -= spec.weight_nbytes + state_nbytes(spec)
            if room < 0:
                break
            count += 1
        return count

    def _with_states(self, layers: list[LayerChoice], count: int) -> list[LayerChoice]:
        """Keep the state of layers on the device that keep their weights there."""
        if not count or StateMode.RESIDENT not in self._options.state_modes:
            return layers
        streaming = [replace(each, state=StateMode.STREAMED) for each in layers]  # which takes a ring
        shares = self._shares(streaming if StateMode.STREAMED in self._options.state_modes else layers)
        room = shares.slabs - shares.least
        for number, spec in enumerate(self._workload.layers):
            if not count:
                break
            needs = state_nbytes(spec)
            if self._may_keep_state(number, layers) and needs <= room:
                layers[number] = replace(layers[number], state=StateMode.RESIDENT, gradient=GradientMode.BUFFER)
                room, count = room - needs, count - 1
        return layers

    def _may_keep_state(self, number: int, layers: list[LayerChoice]) -> bool:
        resident = layers[number].weight is WeightMode.RESIDENT
        free = self._given[number].state is None and self._given[number].gradient is not GradientMode.INPLACE
        return resident and free and self._workload.layers[number].parameters > 0

    def _with_updates(self, layers: list[LayerChoice], share: float) -> list[LayerChoice]:
        """Share the other updates between the CPU and the device."""
        if not share or StateMode.STREAMED not in self._options.state_modes:
            return layers
        free = [
            spec.parameters if each.state is StateMode.CPU and given.state is None else 0
            for spec, each, given in zip(self._workload.layers, layers, self._given, strict=True)
        ]
        device = spread(free, share)
        return [
            replace(each, state=StateMode.STREAMED) if streamed else each
            for each, streamed in zip(layers, device, strict=True)
        ]

    def _with_partial(self, choice: Choice) -> Choice:
        """What slabs leave over, to the first partitions of one layer that comes and goes."""
        layers = list(choice.layers)
        coming = [
            (number, spec)
            for number, spec in enumerate(self._workload.layers)
            if layers[number].weight is WeightMode.STREAM and self._costs[number].backward_needs_weights
        ]
        if not coming:
            return choice
        slabs = share_device(self._workload, choice, self._options.device_memory).slabs
        number, spec = max(coming, key=lambda each: each[1].weight_nbytes)
        over = slabs % spec.weight_nbytes // PARTITION * PARTITION
        if 0 < over < spec.weight_nbytes and slabs > 2 * spec.weight_nbytes:
            layers[number] = replace(layers[number], resident_nbytes=over)
        return replace(choice, layers=tuple(layers))
