"""Queued work: it runs as late as the program allows, and in every order that the program allows."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Work:
    """One piece of queued work, and what must have run before it."""

    run: Callable[[], None] | None
    after: tuple[Work, ...]
    end: float
    done: bool = False
    polls: int = 0


@dataclass(eq=False)
class Queue:
    """The work of one stream, in its order."""

    pending: deque[Work] = field(default_factory=deque)
    last: Work | None = None


class Scheduler:
    """Runs queued work when something needs it, and some of the rest by a seeded chance."""

    def __init__(self, seed: int, eagerness: float) -> None:
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._queues: list[Queue] = []

    def queue(self) -> Queue:
        queue = Queue()
        self._queues.append(queue)
        return queue

    def remove(self, queue: Queue) -> None:
        self._queues.remove(queue)

    def drop(self, queue: Queue) -> None:
        """Count everything queued as done without running it."""
        for work in queue.pending:
            work.done, work.run, work.after = True, None, ()
        queue.pending.clear()

    def append(self, queue: Queue, work: Work) -> None:
        queue.pending.append(work)
        queue.last = work

    def force(self, work: Work | None) -> None:
        """Run `work` and everything that must come before it, then perhaps something more."""
        if work is not None:
            self._run(work)
        self.tick()

    def tick(self) -> None:
        """Perhaps run some work that nothing waits for yet."""
        for queue in self._queues:
            self._trim(queue)
            while queue.pending and self._random.random() < self._eagerness:
                self._run(queue.pending[0])
                self._trim(queue)

    @staticmethod
    def _trim(queue: Queue) -> None:
        while queue.pending and queue.pending[0].done:
            queue.pending.popleft()

    @staticmethod
    def _run(work: Work) -> None:
        stack = [work]
        while stack:
            top = stack[-1]
            if top.done:
                stack.pop()
                continue
            waiting = [earlier for earlier in top.after if not earlier.done]
            if waiting:
                stack.extend(waiting)
                continue
            if top.run is not None:
                top.run()
            top.done, top.run, top.after = True, None, ()
            stack.pop()
