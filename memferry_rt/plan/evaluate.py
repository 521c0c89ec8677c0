"""Choices judged: whether they fit, and how long an iteration they make."""

from __future__ import annotations

from dataclasses import dataclass

from .choice import Choice, Shares, share_device
from .iteration import Iteration, Setting, build_iteration
from .rates import Rates
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


class Evaluator:
    """Simulates choices within a device budget, each once.

    Attributes
    ----------
    count : int
        Of simulations so far.
    """

    def __init__(self, setting: Setting, device_memory: int) -> None:
        self.setting = setting
        self.device_memory = device_memory
        self.count = 0
        self._rates = Rates(setting.machine)
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
        iteration = build_iteration(self.setting, choice, self.shares(choice))
        trace = simulate(iteration.graph, self._rates, nbytes=iteration.nbytes, record=record)
        return Run(iteration, trace, self._rates)

    def _judge(self, choice: Choice) -> Outcome | None:
        shares = self.shares(choice)
        if not shares.fits:
            return None
        self.count += 1
        return Outcome(choice, shares, self.run(choice).seconds)
