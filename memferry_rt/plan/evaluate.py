"""Choices judged: whether they fit, and how long an iteration they make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .choice import Choice, Shares, share_device
from .iteration import Iteration, build_iteration
from .machine import Machine
from .rates import Rates
from .setting import Setting
from .simulate import Trace, simulate


@dataclass(frozen=True)
class Outcome:
    """A choice that fits, and the seconds of an iteration of it."""

    choice: Choice
    shares: Shares
    seconds: float


@dataclass(frozen=True)
class Run:
    """An iteration as it was simulated."""

    iteration: Iteration
    trace: Trace
    rates: Rates

    @property
    def begin(self) -> float:
        return self.trace.ends[self.iteration.begins]

    @property
    def end(self) -> float:
        return self.trace.ends[self.iteration.ends]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


def fewer_relays(machine: Machine) -> Iterator[Machine]:
    """The machine as it is, then with fewer of its relays: both directions alike, or one of them without."""
    into, out = len(machine.relays_to_device), len(machine.relays_from_device)
    pairs = [(into, out)]
    for count in range(max(into, out) + 1):
        pairs += [(min(count, into), min(count, out)), (min(count, into), 0), (0, min(count, out))]
    for pair in dict.fromkeys(pairs):
        yield machine.with_relays(*pair)


class Evaluator:
    """Simulates choices within a device budget, each once.

    Parameters
    ----------
    setting : Setting
    device_memory : int
    adaptive : bool
        Idle devices relay as far as that makes the iteration shorter, in each direction by itself.  Else all
        that there are do, whatever else needs host memory.

    Attributes
    ----------
    count : int
        Of simulations so far.
    """

    def __init__(self, setting: Setting, device_memory: int, *, adaptive: bool = True) -> None:
        self.setting = setting
        self.device_memory = device_memory
        self.count = 0
        machines = fewer_relays(setting.machine) if adaptive else iter([setting.machine])
        self._variants = [(replace(setting, machine=machine), Rates(machine)) for machine in machines]
        self._best: dict[Choice, int] = {}  # of the variants
        self._known: dict[Choice, Outcome | None] = {}

    def __call__(self, choice: Choice) -> Outcome | None:
        """The outcome; None if the choice does not fit."""
        if choice not in self._known:
            self._known[choice] = self._judge(choice)
        return self._known[choice]

    def shares(self, choice: Choice) -> Shares:
        return share_device(self.setting.workload, choice, self.device_memory)

    def run(self, choice: Choice, *, record: bool = False) -> Run:
        """Simulate a choice that fits."""
        if len(self._variants) == 1:
            return self._simulate(choice, 0, record=record)
        if choice not in self._best:
            runs = [self._simulate(choice, number) for number in range(len(self._variants))]
            self._best[choice] = min(range(len(runs)), key=lambda number: runs[number].seconds)
            if not record:
                return runs[self._best[choice]]
        return self._simulate(choice, self._best[choice], record=record)

    def machine_of(self, choice: Choice) -> Machine:
        """The machine, with as many relays as a choice that fits gains of."""
        self.run(choice)
        return self._variants[self._best.get(choice, 0)][0].machine

    def _simulate(self, choice: Choice, number: int, *, record: bool = False) -> Run:
        setting, rates = self._variants[number]
        iteration = build_iteration(setting, choice, self.shares(choice))
        trace = simulate(iteration.graph, rates, nbytes=iteration.nbytes, record=record)
        return Run(iteration, trace, rates)

    def _judge(self, choice: Choice) -> Outcome | None:
        shares = self.shares(choice)
        if not shares.fits:
            return None
        self.count += 1
        return Outcome(choice, shares, self.run(choice).seconds)
