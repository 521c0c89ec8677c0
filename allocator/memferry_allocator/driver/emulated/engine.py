"""The engine of an emulated machine: work enters here, is checked against all that came before, and is queued."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from ..types import Span
from .clock import Carrier, Links, VirtualClock
from .options import EmulatedOptions
from .order import Access, AccessLog, Clock, OpenAccess, join
from .state import HostThreads, StreamState, Touch
from .work import Scheduler, Work

PATIENCE = 16  # a program that has asked so often whether work is done does not let it wait any longer


class Engine:
    """Order, races and time.  The driver's lock is held round every call."""

    def __init__(self, options: EmulatedOptions) -> None:
        self._actors = itertools.count(1)
        self.threads = HostThreads(self._actors)
        self.log = AccessLog()
        self.scheduler = Scheduler(options.seed, options.eagerness)
        self.clock = VirtualClock()
        self.links = Links(options)

    def stream(self, device: int) -> StreamState:
        return StreamState(device, next(self._actors), self.scheduler.queue())

    def known(self, state: StreamState) -> Clock:
        """What comes before whatever the calling thread enqueues on a stream next."""
        known = dict(state.clock)
        join(known, self.threads.clock)
        return known

    def enqueue(
        self,
        state: StreamState,
        run: Callable[[], None] | None,
        touches: Sequence[Touch],
        *,
        after: tuple[Work, ...] = (),
        link: Carrier | None = None,
        nbytes: int = 0,
        label: str = "",
    ) -> Work:
        """Queue work on a stream, unless it races with what nothing orders it after.

        Raises
        ------
        RaceError
            It does; nothing has happened.
        """
        known, actor = self.known(state), state.actor
        for touch in touches:
            for line in touch.place.lines:
                end = line.ptr + line.nbytes
                self.log.check(line.ptr, end, write=touch.write, actor=actor, clock=known, label=label)
        time = known[actor] = known.get(actor, 0) + 1
        state.clock = known  # only now: what was refused has not happened
        access = Access(actor, time, label)
        for touch in touches:
            if touch.lasting:
                for line in touch.place.lines:
                    self.log.record(line.ptr, line.ptr + line.nbytes, write=touch.write, access=access)
        before = after if state.queue.last is None else (state.queue.last, *after)
        ready = self.clock.ready(work.end for work in before)
        end_time = ready if link is None else link.reserve(ready, nbytes)
        work = Work(run, tuple(earlier for earlier in before if not earlier.done), end_time)
        self.scheduler.append(state.queue, work)
        return work

    # -- accesses that take a while -------------------------------------------------------------------
    def open(self, touches: list[Touch], actor: int, clock: Clock, label: str) -> list[OpenAccess]:
        """Begin accesses that last until `close`; all of them, or none where one races."""
        opened = []
        for touch in touches:
            for line in touch.place.lines:
                end = line.ptr + line.nbytes
                self.log.check(line.ptr, end, write=touch.write, actor=actor, clock=clock, label=label)
                opened.append(OpenAccess(line.ptr, end, touch.write, actor, label))
        for access in opened:
            self.log.begin(access)
        return opened

    def recheck(self, opened: list[OpenAccess], actor: int, clock: Clock) -> None:
        """Check accesses that change hands: who began them must not have touched the bytes since."""
        for access in opened:
            self.log.finish(access)
        try:
            for access in opened:
                start, end, label = access.start, access.end, access.label
                self.log.check(start, end, write=access.write, actor=actor, clock=clock, label=label)
        finally:
            for access in opened:
                self.log.begin(access)

    def close(self, opened: list[OpenAccess], actor: int, clock: Clock) -> None:
        for access in opened:
            self.log.finish(access)
            entry = Access(actor, clock[actor], access.label)
            self.log.record(access.start, access.end, write=access.write, access=entry)

    # -- the host -------------------------------------------------------------------------------------
    def settled(self, lines: Iterable[Span], label: str) -> None:
        """Refuse what the calling thread has not waited for: it is about to take the bytes away."""
        threads = self.threads
        for line in lines:
            end = line.ptr + line.nbytes
            self.log.check(line.ptr, end, write=True, actor=threads.actor, clock=threads.clock, label=label)

    def forget(self, lines: Iterable[Span]) -> None:
        """Drop what no longer exists."""
        for line in lines:
            self.log.forget(line.ptr, line.ptr + line.nbytes)

    def reach(self, work: Work | None, clock: Clock) -> None:
        """The calling thread has waited for `work`, and knows what its clock knows."""
        self.scheduler.force(work)
        join(self.threads.clock, clock)
        if work is not None:
            self.clock.reach(work.end)
            self.links.settle(self.clock.now)

    def poll(self, work: Work | None, clock: Clock) -> bool:
        """Whether `work` is done, which asking for it helps."""
        self.scheduler.tick()
        if work is not None and not work.done:
            work.polls += 1
            if work.polls < PATIENCE:
                return False
        self.reach(work, clock)
        return True
