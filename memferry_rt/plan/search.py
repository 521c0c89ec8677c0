"""The search for the choice with the shortest iteration: proposals of the programs, then one change at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .choice import host_nbytes, spare_nbytes
from .compose import Composer, Knobs
from .evaluate import Evaluator, Outcome
from .model import LayerSpec
from .modes import StateMode, WeightMode
from .options import PlanOptions
from .propose import propose_weights
from .propose_gradients import in_time, within_limit, within_reserve

WORTHWHILE = 0.002  # of an iteration: what a change must gain
RESERVES = (0.75, 0.5, 0.25, 0.0)
PROPOSALS = 4


class Search:
    """Turns knobs while that makes iterations shorter.

    Attributes
    ----------
    workload : Workload
    best : Outcome or None
        None as long as nothing fits.
    knobs : Knobs
        Of the best.
    reserves : dict of float to Outcome
        What each reserve factor of gradients would give, beside the best.
    """

    def __init__(self, evaluate: Evaluator, composer: Composer, options: PlanOptions) -> None:
        self._evaluate = evaluate
        self._composer = composer
        self._options = options
        self.workload = evaluate.setting.workload
        self.knobs = composer.start()
        self.best: Outcome | None = None
        self.reserves: dict[float, Outcome] = {}

    def run(self) -> None:
        """Search, until nothing gains or the evaluations are used up."""
        self._settle(self._seeds())
        if self.best is None:
            return
        for _ in range(2):
            before = self.best
            self._turn_numbers()
            self._propose()
            self._flip_weights()
            self._turn_gradients()
            if self.best is before:
                return

    # -- steps --------------------------------------------------------------------------------------------
    def _try(self, knobs: Knobs, *, gain: float = WORTHWHILE) -> bool:
        """Take knobs over if they are better by `gain`."""
        if self.best is not None and self._exhausted:
            return False
        outcome = self._evaluate(self._composer.compose(knobs))
        if outcome is None or (self.best is not None and outcome.seconds >= self.best.seconds * (1 - gain)):
            return False
        self.best, self.knobs = outcome, knobs
        return True

    def _settle(self, candidates: Iterable[Knobs]) -> bool:
        return any(list(map(self._try, candidates)))

    def _seeds(self) -> Iterator[Knobs]:
        share, spares = self._balanced(), self._spares()
        for knobs in self.simplest():
            yield knobs
            few = self._composer.at_home(self._composer.compose(knobs))
            for pin in dict.fromkeys((0, few, len(knobs.weights))):
                yield replace(knobs, share=share, pin=pin, states=len(knobs.weights) if pin else 0)
                yield replace(knobs, pin=pin, spares=spares)

    def simplest(self) -> list[Knobs]:
        """Where the search begins: weights streamed, but for embeddings, and but for what is large."""
        start = self._composer.start()
        frugal = [self._frugal(start, mode) for mode in (WeightMode.DHA, WeightMode.RING)]
        return list(dict.fromkeys((start, self.embeddings_direct(start), *frugal)))

    def embeddings_direct(self, knobs: Knobs) -> Knobs:
        weights = list(knobs.weights)
        for number in self.workload.lookups:
            if WeightMode.DHA in self._composer.allowed(number):
                weights[number] = WeightMode.DHA
        return replace(knobs, weights=tuple(weights))

    def _frugal(self, knobs: Knobs, mode: WeightMode) -> Knobs:
        """Large layers read in place or through the ring, so that little device memory is enough."""
        sizes = [layer.weight_nbytes for layer in self.workload.layers if layer.parameters]
        weights = list(knobs.weights)
        for number, layer in enumerate(self.workload.layers):
            able = [each for each in (mode, WeightMode.DHA) if each in self._composer.allowed(number)]
            if able and layer.weight_nbytes > sorted(sizes)[len(sizes) // 2]:
                weights[number] = able[0]
        return replace(knobs, weights=tuple(weights))

    def _turn_numbers(self) -> None:
        """How many states stay, what the device updates, what is kept, how far updates run ahead."""
        for values in (self._share_values, self._state_values, self._kept_values, self._spare_values):
            for knobs in values():
                self._try(knobs)

    def _share_values(self) -> Iterator[Knobs]:
        if StateMode.STREAMED in self._options.state_modes:
            for step in (-0.2, 0.2, -0.1, 0.1, -0.05, 0.05):
                yield replace(self.knobs, share=min(1.0, max(0.0, self.knobs.share + step)))

    def _state_values(self) -> Iterator[Knobs]:
        count = len(self.knobs.weights)
        now = 0
        if self.best is not None:
            now = sum(each.state is StateMode.RESIDENT for each in self.best.choice.layers)
        yield replace(self.knobs, pin=now)
        for states in dict.fromkeys((count, now // 2, max(0, now - 2), 0)):
            yield replace(self.knobs, states=states)
            yield replace(self.knobs, states=states, pin=count)

    def _kept_values(self) -> Iterator[Knobs]:
        count = len(self._composer.optional)
        step = count
        while step:
            for kept in (self.knobs.kept + step, self.knobs.kept - step):
                if 0 <= kept <= count:
                    yield replace(self.knobs, kept=kept)
            step //= 2

    def _spare_values(self) -> Iterator[Knobs]:
        most = self._spares()
        for spares in dict.fromkeys((most, most // 2, most // 4, 0)):
            yield replace(self.knobs, spares=spares)

    def _propose(self) -> None:
        """What the programs find for the releases and loads of the best so far."""
        assert self.best is not None
        run = self._evaluate.run(self.best.choice)
        for weights in propose_weights(self._evaluate.setting, self.best.choice, run, self._composer, PROPOSALS):
            self._try(replace(self.knobs, weights=weights))

    def _flip_weights(self) -> None:
        """Single changes: each layer of its own kind, and of many alike the first, the last and all."""
        for group in groups(self.workload.layers):
            modes = [mode for mode in self._composer.allowed(group[0]) if mode is not WeightMode.RESIDENT]
            for mode in modes:
                for members in dict.fromkeys(((group[0],), (group[-1],), tuple(group))):
                    self._try(self._flipped(members, mode))

    def _flipped(self, members: tuple[int, ...], mode: WeightMode) -> Knobs:
        weights = list(self.knobs.weights)
        for number in members:
            weights[number] = mode
        return replace(self.knobs, weights=tuple(weights))

    def _turn_gradients(self) -> None:
        """What both programs of gradient offload propose; gradients that leave by the ring are the arm to beat."""
        assert self.best is not None
        forced = self._forced_gradients()
        if forced is not None:
            outcome = self._evaluate(self._composer.compose(forced))
            if outcome is not None:
                self.best, self.knobs = outcome, forced
            return
        setting = self._evaluate.setting
        timed = in_time(setting, self.best.choice, self._composer, self.best.shares.ring)
        if timed is not None:
            self._try(replace(self.knobs, gradients=timed))
        for reserve in RESERVES:
            if self._exhausted:
                return
            modes = within_reserve(setting, self.best.choice, self._composer, reserve)
            knobs = replace(self.knobs, gradients=modes)
            outcome = self._evaluate(self._composer.compose(knobs))
            if outcome is not None:
                self.reserves[reserve] = outcome
                self._try(knobs)

    def _forced_gradients(self) -> Knobs | None:
        """The best with no more gradient bytes on the device than the options allow, if they limit these."""
        assert self.best is not None
        setting, choice, composer = self._evaluate.setting, self.best.choice, self._composer
        if self._options.reserve is not None:
            modes = within_reserve(setting, choice, composer, self._options.reserve)
        elif self._options.gradient_memory is not None:
            modes = within_limit(setting, choice, composer, self._options.gradient_memory)
        else:
            return None
        return replace(self.knobs, gradients=modes)

    def as_offload(self) -> Knobs:
        """What `memferry_rt.offload` does without a plan.

        What has room stays, first weights, then state; CPU and device share the other updates.
        """
        start = self._composer.start()
        count = len(start.weights)
        return replace(start, pin=count, states=count, share=self._balanced())

    # -- limits -------------------------------------------------------------------------------------------
    @property
    def _exhausted(self) -> bool:
        return self._evaluate.count >= self._options.evaluations

    def _balanced(self) -> float:
        """The device's share of the updates at which it and the CPU end together."""
        machine = self._evaluate.setting.machine
        if StateMode.STREAMED not in self._options.state_modes:
            return 0.0
        device = machine.both_ways * min(machine.to_device, machine.from_device) / 14
        cpu = machine.cpu_update / machine.ranks / 28
        return device / (device + cpu)

    def _spares(self) -> int:
        """The most spare slabs that are wanted and that host memory has room for."""
        if self._options.spares is not None:
            return self._options.spares
        if not self._options.early:
            return 0
        most = sum(1 for layer in self.workload.layers if layer.parameters)
        if self._options.host_memory is None:
            return 0
        base = host_nbytes(self.workload, self._composer.compose(self._composer.start()))
        return max(0, min(most, (self._options.host_memory - base) // spare_nbytes(self.workload)))


def groups(layers: Iterable[LayerSpec]) -> list[list[int]]:
    """Layers alike, that own weights: by kind and shapes."""
    found: dict[object, list[int]] = {}
    for number, layer in enumerate(layers):
        if layer.parameters:
            found.setdefault((layer.kind, layer.shapes), []).append(number)
    return list(found.values())
