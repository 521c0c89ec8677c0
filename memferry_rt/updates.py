"""The update's worker: layers are updated on the CPU, in order, beside the thread that launches kernels."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from memferry_allocator import Driver


class UpdateQueue:
    """Runs updates one after another in a thread of its own.

    What the submitting thread knew when it submitted is known to the update, and what the update did is known
    to whoever has waited for it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="memferry-update")
        self._pending: dict[int, Future[Any]] = {}

    def submit(self, layer: int, update: Callable[[], None]) -> None:
        """Queue the update of a layer; the layer's previous one must have been waited for."""
        token = self._driver.publish()

        def run() -> Any:
            self._driver.observe(token)
            update()
            return self._driver.publish()

        self._pending[layer] = self._pool.submit(run)

    def poll(self, layer: int) -> bool:
        """Whether a layer's update is done, without blocking; if it is, what it did is known from now on."""
        future = self._pending.get(layer)
        if future is not None and not future.done():
            return False
        self.wait(layer)
        return True

    def wait(self, layer: int) -> None:
        """Block until a layer's update is done; raises what it raised."""
        future = self._pending.pop(layer, None)
        if future is not None:
            self._driver.observe(future.result())

    def wait_all(self) -> None:
        """Block until every update is done; raises what the first failing one raised."""
        for layer in list(self._pending):
            self.wait(layer)

    def close(self) -> None:
        """Finish what is queued and end the thread; a second call does nothing."""
        self._pool.shutdown()
