"""Which ways a transfer takes, and how much each carries: the decisions, without the copies."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from memferry_allocator import Direction, Driver

from . import book
from .adaptive import Adaptive, Situation, situation
from .calibration import Calibration
from .cost import LinearCost
from .health import Health
from .options import SLICE_BYTES, TransferOptions
from .paths import Path
from .quotas import shift, slice_quotas, worth_pulling, worthwhile

KERNEL_UNIT = 64 << 10  # what a kernel's share is a multiple of
KERNEL_PIECE = 1 << 20  # the least that it is worth a launch for
REMEMBERED = 256  # plans: transfers of a program are of few sizes
UNKNOWN = LinearCost(20e-6, 50e9)  # of ways nobody has measured: alike, so that they share evenly


class Share(NamedTuple):
    """What a way is to carry."""

    path: Path
    nbytes: int
    predicted_s: float


class Plan(NamedTuple):
    """Shares of all ways, the direct one first if it is one; some may be 0.  And what it is to take altogether."""

    situation: Situation
    shares: tuple[Share, ...]
    seconds: float


class Planner:
    """Decides by the calibration, by health, by what others are doing, and by what was learnt.

    Parameters
    ----------
    driver : Driver
    device : int
    options : TransferOptions
    calibration : Calibration or None
    health : Health
    """

    def __init__(
        self,
        driver: Driver,
        device: int,
        options: TransferOptions,
        calibration: Calibration | None,
        health: Health,
    ) -> None:
        self._driver = driver
        self._direct = Path(device)
        self._options = options
        self._calibration = calibration
        self._health = health
        measured = None if calibration is None else calibration.slice_bytes
        self.slice_bytes = options.slice_bytes or measured or SLICE_BYTES
        self.adaptive = Adaptive(self.slice_bytes)
        self._choices: dict[tuple[Direction, int, tuple[tuple[Path, ...], ...]], list[Path]] = {}
        self._shares: dict[tuple[Direction, int, tuple[Path, ...]], list[int]] = {}
        self._plans: dict[tuple[Direction, int, tuple[Path, ...]], tuple[Plan, tuple[int, ...]]] = {}
        self._relays = {
            direction: [self._kinds(helper, direction) for helper in self._rank(direction)]
            for direction in Direction
        }

    def paths(self, direction: Direction) -> list[Path]:
        """All ways that may ever be taken, the direct one first."""
        return [self._direct, *(path for kinds in self._relays[direction] for path in kinds)]

    def least_piece(self, direction: Direction) -> int:
        """Bytes that the pieces of a transfer must have, on average, to be worth more than one way."""
        kernels = any(path.by_kernel for path in self.paths(direction))
        return min(self.slice_bytes, KERNEL_PIECE) if kernels else self.slice_bytes

    def threshold(self, direction: Direction) -> float:
        """From how many bytes on several ways are thought of; infinite if there is only one."""
        if not self._relays[direction]:
            return math.inf
        if self._options.break_even_bytes is not None:
            return self._options.break_even_bytes
        known = {} if self._calibration is None else self._calibration.break_even_bytes
        return known.get((self._direct.device, direction), 2 * self.slice_bytes)

    def cost(self, path: Path, direction: Direction) -> LinearCost:
        """As calibrated; a way that was not measured counts as the direct one does."""
        for known in (path, self._direct):
            found = None if self._calibration is None else self._calibration.cost(known, direction)
            if found is not None:
                return found
        return UNKNOWN

    def ways(
        self, direction: Direction, nbytes: int, *, kernels: bool, without: Collection[Path] = ()
    ) -> list[Path]:
        """The ways that are worth taking now, the direct one first unless it is failing and there are others.

        Parameters
        ----------
        nbytes : int
            Of the transfer: by it a helper stages, or sends its kernel.
        kernels : bool
            Whether its bytes lie so that kernels carry them at their full rate.
        without : collection of Path
            Ways that cannot be had now.
        """
        kinds = []
        for relays in self._relays[direction]:
            able = tuple(
                path
                for path in relays
                if self._health.usable(path) and path not in without and (kernels or not path.by_kernel)
            )
            if able and not self._is_busy(able[0], direction):
                kinds.append(able)
        direct = self._health.usable(self._direct) or not kinds
        return self._chosen(direction, nbytes, (((self._direct,),) if direct else ()) + tuple(kinds))

    def may_pull(self, direction: Direction, path: Path, left: int, own: int, direct: int) -> bool:
        """Whether a relay may take a slice from the queue: its device is idle, and it would not hold the end up.

        Parameters
        ----------
        left, own, direct : int
            As for `worth_pulling`.
        """
        if self._is_busy(path, direction):
            return False
        costs = self.cost(path, direction), self.cost(self._direct, direction)
        return worth_pulling(left, own, direct, self.slice_bytes, *costs)

    def plan(self, direction: Direction, nbytes: int, ways: list[Path]) -> Plan:
        """Share `nbytes` out over `ways`, as costs say and earlier transfers have taught."""
        asked = direction, nbytes, tuple(ways)
        plan, shifts = self._plans.get(asked, (None, None))
        if plan is not None and shifts is self.adaptive.shifts(plan.situation):
            return plan
        key = situation(direction, ways, nbytes, self.slice_bytes)
        shifts = self.adaptive.shifts(key)
        quotas = shift(self._quotas(*asked), shifts, key.step)
        costs = [self.cost(path, direction) for path in ways]
        shares = tuple(
            Share(path, quota, cost.seconds(quota)) for path, quota, cost in zip(ways, quotas, costs, strict=True)
        )
        seconds = max(share.predicted_s for share in shares)
        plan = Plan(key, shares, seconds + (self._join(direction) if len(shares) > 1 else 0.0))
        if len(self._plans) >= REMEMBERED:
            self._plans.clear()
        self._plans[asked] = plan, shifts
        return plan

    def _join(self, direction: Direction) -> float:
        known = {} if self._calibration is None else self._calibration.join_s
        return known.get((self._direct.device, direction), 0.0)

    def _chosen(self, direction: Direction, nbytes: int, kinds: tuple[tuple[Path, ...], ...]) -> list[Path]:
        """One of each of `kinds`, such that the transfer ends soonest, without those that are far too slow."""
        key = direction, nbytes, kinds
        known = self._choices.get(key)
        if known is None:
            known = [paths[0] for paths in kinds]
            for index, paths in enumerate(kinds):
                for path in paths[1:]:
                    tried = [*known[:index], path, *known[index + 1 :]]
                    if self._end(direction, nbytes, tried) < self._end(direction, nbytes, known):
                        known = tried
            worth = worthwhile([self.cost(path, direction) for path in known])
            known = [path for path, worthy in zip(known, worth, strict=True) if worthy]
            if len(self._choices) >= REMEMBERED:
                self._choices.clear()
            self._choices[key] = known
        return known

    def _end(self, direction: Direction, nbytes: int, paths: list[Path]) -> float:
        quotas = self._quotas(direction, nbytes, tuple(paths))
        return max(self.cost(path, direction).seconds(quota) for path, quota in zip(paths, quotas, strict=True))

    def _quotas(self, direction: Direction, nbytes: int, paths: tuple[Path, ...]) -> list[int]:
        key = direction, nbytes, paths
        quotas = self._shares.get(key)
        if quotas is None:
            costs = [self.cost(path, direction) for path in paths]
            least = min(KERNEL_UNIT, self.slice_bytes)
            units = [least if path.by_kernel else self.slice_bytes for path in paths]
            if len(self._shares) >= REMEMBERED:
                self._shares.clear()
            quotas = self._shares[key] = slice_quotas(nbytes, costs, units)
        return quotas

    def _is_busy(self, path: Path, direction: Direction) -> bool:
        """Whether a helper that nobody has named needs its link itself."""
        if self._options.helpers != "auto":
            return False
        return book.is_busy(self._driver, path.helper or 0, direction, self._options.helper_idle_s)

    def _kinds(self, helper: int, direction: Direction) -> list[Path]:
        """The ways over a helper: as asked for, or those that were measured, or staging."""
        staged, kernel = (Path(self._direct.device, helper, by) for by in ("staging", "kernel"))
        if self._options.relay != "auto":
            return [kernel if self._options.relay == "kernel" else staged]
        known = self._calibration
        measured = [path for path in (kernel, staged) if known and known.cost(path, direction)]
        return measured or [staged]

    def _rank(self, direction: Direction) -> tuple[int, ...]:
        """The helpers of a direction, the fastest first."""
        if self._options.helpers != "auto":
            return self._options.helpers
        if self._calibration is None:
            return ()
        known = [
            (-measured.cost.bytes_per_second, measured.cost.alpha_s, path.helper)
            for (path, way), measured in self._calibration.ways.items()
            if way is direction
            and path.device == self._direct.device
            and path.helper is not None
            and self._options.relay in ("auto", path.by)
        ]
        ranked = dict.fromkeys(helper for _, _, helper in sorted(known))
        return tuple(ranked)[: self._options.max_helpers]
