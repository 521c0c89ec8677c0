"""Transfers over several ways at once: everything submitted in one go, no CPU in the loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from memferry_allocator import DeviceLostError, Direction, Driver, DriverError, Event, Stream

from .carriers import Carrier, DirectLink
from .health import Health
from .job import Job
from .paths import Path
from .pieces import Piece, deal, overlap, slices
from .planner import Plan, Planner
from .quotas import SLOWEST
from .relays import Relays
from .runs import Run
from .transfer import Transfer

VECTOR = 16  # bytes that a thread of a kernel carries at a time, if both ends lie alike


class MultiPath:
    """The ways of an engine beside its own link.  The engine's lock is held round every call.

    Parameters
    ----------
    driver : Driver
    planner : Planner
    relays : Relays
    health : Health
    lane : callable
        The engine's own stream of a direction.
    timed : bool
        Take times, and learn from them.
    """

    def __init__(
        self,
        driver: Driver,
        planner: Planner,
        relays: Relays,
        health: Health,
        lane: Callable[[Direction], Stream],
        *,
        timed: bool,
    ) -> None:
        self._driver = driver
        self._planner, self._relays, self._health = planner, relays, health
        self._lane = lane
        self._timed = timed
        self._slow: set[Path] = set()  # seen once, the last time

    def suits(
        self, pieces: Sequence[Piece], nbytes: int, direction: Direction, device: int, stream: Stream
    ) -> bool:
        """Whether a transfer may be cut up: long pieces, apart from one another, in memory that helpers reach."""
        inward = direction is Direction.HOST_TO_DEVICE
        return (
            nbytes >= self._planner.least_piece(direction) * len(pieces)
            and all(self._driver.device_of(piece[0 if inward else 1]) == device for piece in pieces)
            and not overlap((piece.dst, piece.nbytes) for piece in pieces)
            and not self._driver.is_capturing(stream)
        )

    def ways(self, direction: Direction, nbytes: int, pieces: Sequence[Piece]) -> list[tuple[Path, Carrier]]:
        """The ways to take now, made ready and verified; the direct one first if it is one of them."""
        alike = not any((dst ^ src) % VECTOR for dst, src, _ in pieces)
        without: set[Path] = set()
        with self._driver.beside_captures():  # whoever captures is not to be disturbed by looking and making
            self._learn()
            while True:
                paths = self._planner.ways(direction, nbytes, kernels=alike, without=without)
                found = [(path, carrier) for path in paths if (carrier := self._carrier(path, direction))]
                if len(found) == len(paths):
                    return found
                without.update(set(paths) - {path for path, _ in found})

    def _carrier(self, path: Path, direction: Direction) -> Carrier | None:
        if path.direct:
            return DirectLink(self._driver, self._lane(direction))
        return self._relays.get(path, direction)

    def job(self, pieces: Sequence[Piece], nbytes: int, direction: Direction, stream: Stream) -> Job | None:
        """A transfer for the queue; None if only the direct way is worth it now."""
        ways = self.ways(direction, nbytes, pieces)
        if all(path.direct for path, _ in ways):
            return None
        begin = stream.record()
        runs = [Run(path, carrier, begin, timed=False) for path, carrier in ways]
        return Job(direction, nbytes, slices(pieces, self._planner.slice_bytes), runs)

    def carry(self, pieces: Sequence[Piece], nbytes: int, direction: Direction, stream: Stream) -> Transfer | None:
        """Submit a transfer over several ways; None if only the direct one is worth it now.

        Raises
        ------
        DriverError, RaceError
            As for `TransferEngine.copy`.
        """
        ways = self.ways(direction, nbytes, pieces)
        if all(path.direct for path, _ in ways):
            return None
        plan = self._planner.plan(direction, nbytes, [path for path, _ in ways])
        if all(share.path.direct or not share.nbytes for share in plan.shares):
            return None
        timed = self._timed and self._planner.adaptive.wants(plan.situation)
        with self._driver.several_calls(stream.device):
            runs = self._runs(plan, ways, stream.record(), pieces, timed)
            try:
                self._submit(runs)
            finally:
                join(stream, runs)
            self.blame(runs)
            shares = tuple(run.share() for run in runs)
            if timed and not any(run.error for run in runs):
                self._planner.adaptive.watch(plan.situation, shares)
            carried = tuple(share for share in shares if share.nbytes)
            copies = sum(share.copies for share in carried)
            return Transfer(direction, nbytes, copies, stream.record(), carried, predicted_s=plan.seconds)

    def _runs(
        self,
        plan: Plan,
        ways: Sequence[tuple[Path, Carrier]],
        begin: Event,
        pieces: Iterable[Piece],
        timed: bool,
    ) -> list[Run]:
        runs = []
        hands = deal(pieces, [share.nbytes for share in plan.shares])
        for (path, carrier), share, hand in zip(ways, plan.shares, hands, strict=True):
            run = Run(path, carrier, begin, timed=timed, predicted_s=share.predicted_s)
            run.take(hand)
            runs.append(run)
        return runs

    def _submit(self, runs: list[Run]) -> None:
        """Kernels first, for they are one call and the last to start; then the direct share, also few; then the
        others' slices in turns: so all start soon."""
        waiting = sorted((run for run in runs if run.todo), key=lambda run: not run.path.by_kernel)
        while waiting:
            for run in waiting:
                try:
                    if run.path.direct or run.path.by_kernel:
                        run.submit()
                    else:
                        run.step()
                except DriverError as error:
                    hand_over(run, error, runs)
            waiting = [run for run in runs if run.todo]
            if not waiting:
                waiting = self._lost_meanwhile(runs)

    def _lost_meanwhile(self, runs: list[Run]) -> list[Run]:
        """Hand over what was submitted to devices that are lost by now; those that have something to do again."""
        for run in runs:
            try:
                run.end()
            except DriverError as error:
                hand_over(run, error, runs)
        return [run for run in runs if run.todo]

    def blame(self, runs: Iterable[Run]) -> None:
        """Count the errors of ways whose bytes went another way: so it was not the bytes' fault."""
        for run in runs:
            if isinstance(run.error, DeviceLostError):
                self._health.lost(run.path, str(run.error))
            elif run.error is not None:
                self._health.failed(run.path, str(run.error))

    def _learn(self) -> None:
        if not self._timed:
            return
        seen = self._planner.adaptive.learn()
        best = max((rate for _, rate in seen), default=0.0)
        for path, rate in seen:
            if rate >= SLOWEST * best or path.direct:
                self._slow.discard(path)
            elif path not in self._slow:  # once may be the first use of its streams, or an idle link waking up
                self._slow.add(path)
            else:
                self._slow.discard(path)
                self._health.suspend(
                    path, f"it carried {rate / 1e9:.2f} GB/s where another way had {best / 1e9:.2f}"
                )


def hand_over(run: Run, error: DriverError, runs: Sequence[Run]) -> None:
    """Give what a failing way has not carried to the first that does not fail.

    Raises
    ------
    DriverError
        There is none left; the direct way's error says most, if it is one of them.
    """
    left = run.fail(error)
    heir = next((other for other in runs if other.error is None), None)
    if heir is None:
        raise next(other.error for other in runs if other.error is not None)
    heir.follow(run.end())  # what it may still be writing comes before the same bytes by another way
    heir.take(left)


def join(stream: Stream, runs: Iterable[Run]) -> None:
    """Order what `stream` gets from now on behind everything that was submitted, to whatever is not lost."""
    for run in runs:
        with contextlib.suppress(DeviceLostError):
            for event in run.end():
                stream.wait(event)
