"""Which layers' weights are in device memory: loaded before they are needed, evicted by the forecast."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memferry_allocator import Mode, OutOfMemory, Partition, Place, Stream, View, format_size

from .trace import AccessTrace


class LayerCache:
    """Layers in the device budget, as views that stay open until their memory is wanted.

    Who evicts what follows Bélády: the layer whose next use is farthest goes first, and a layer is loaded early
    only over layers that are needed later.  Layers that are kept are never evicted, and those that are read in
    place have a view of their host pages instead.

    Parameters
    ----------
    partitions : sequence of Partition
        The layers' weights, in forward order.
    trace : AccessTrace
    ready : callable
        Whether a layer's host weights are final, so that they may be copied.
    held : callable
        Whether a tensor outside the cache still uses a layer's device memory; such a layer is not evicted.
    settle : callable
        Blocks until a layer's update is made or, on the device, enqueued: its device copy may then be evicted.
    ended : callable
        Told when a layer's host pages are open to the device no longer.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        trace: AccessTrace,
        *,
        ready: Callable[[int], bool],
        held: Callable[[int], bool],
        settle: Callable[[int], None],
        ended: Callable[[int], None] = lambda layer: None,
    ) -> None:
        self._partitions = partitions
        self._trace = trace
        self._ready = ready
        self._held = held
        self._settle = settle
        self._ended = ended
        self._views: dict[int, View] = {}
        self._at_home: dict[int, View] = {}
        self._kept: set[int] = set()
        self._pins = [0] * len(partitions)

    def use(self, layer: int, stream: Stream, *, training: bool, backward: bool = False) -> int:
        """The device pointer of a layer's weights, valid in `stream`'s order until `evict` or `release`.

        Raises
        ------
        OutOfMemory
            Layers in use at the same time leave no room for this one.
        """
        moved = self._trace.use(layer, backward=backward) if training else layer not in self._views
        view = self._views.get(layer)
        if view is None:
            self._require_room(layer)
            view = self._views[layer] = self._partitions[layer].acquire(Place.DEVICE, Mode.READ, stream=stream)
        elif stream not in view.streams:
            view.record_stream(stream)
        if moved:
            self._prefetch(layer, training=training)
        return view.ptr

    def read_in_place(self, layer: int, stream: Stream, *, training: bool, backward: bool = False) -> View:
        """A view of a layer's host pages for kernels of `stream`, valid until its use ends.

        Its update is made or, on the device, enqueued.
        """
        moved = self._trace.use(layer, backward=backward) if training else layer not in self._at_home
        view = self.open_at_home(layer, stream)
        if moved:
            self._prefetch(layer, training=training)
        return view

    def open_at_home(self, layer: int, stream: Stream) -> View:
        """As `read_in_place`, ahead of a use that is yet to come."""
        view = self._at_home.get(layer)
        if view is None:
            view = self._at_home[layer] = self._partitions[layer].acquire(Place.MAPPED, Mode.READ, stream=stream)
        elif stream not in view.streams:
            view.record_stream(stream)
        return view

    def keep(self, layer: int) -> None:
        """Load a layer and keep its device memory until `let_go`.

        Raises
        ------
        OutOfMemory
            The pool has no room for it.
        """
        self._partitions[layer].pin()
        self._kept.add(layer)

    def let_go(self) -> None:
        """No layer is kept any more."""
        while self._kept:
            layer = next(iter(self._kept))
            self._partitions[layer].unpin()
            self._kept.remove(layer)

    def pin(self, layer: int) -> None:
        """Keep a layer in device memory until it is unpinned as often."""
        self._pins[layer] += 1

    def unpin(self, layer: int) -> None:
        self._pins[layer] -= 1

    def is_pinned(self, layer: int) -> bool:
        return self._pins[layer] > 0

    def load_early(self, layer: int) -> bool:
        """Start loading a layer if forward needs it and there is room without evicting; False if there is none."""
        partition = self._partitions[layer]
        if not partition.resident and self._trace.loads(layer, False):
            if layer not in self._kept and partition.space.pool.largest_free < partition.nbytes:
                return False
            partition.prefetch()
        return True

    def release(self) -> None:
        """Close every view: their last uses are those enqueued until now."""
        for views in (self._views, self._at_home):
            for view in views.values():
                view.release()
            views.clear()

    def evict(self, layer: int) -> None:
        """Give a layer's device memory back, after bringing home what is newer there.

        One that is kept loses what its memory holds, and is loaded anew at its next use.
        """
        self._settle(layer)
        self.end_use(layer)
        if layer in self._kept:
            self._partitions[layer].acquire(Place.HOST, Mode.READ_WRITE).release()
        else:
            self._partitions[layer].evict()

    def end_use(self, layer: int) -> None:
        """End the views of a layer's weights; they stay where they are."""
        view = self._views.pop(layer, None)
        if view is not None:
            view.release()
        view = self._at_home.pop(layer, None)
        if view is not None:
            view.release()
            self._ended(layer)

    def open_for_update(self, layer: int, stream: Stream) -> View:
        """A writing view of a layer's device copy, which becomes the newest; its reading views end.

        Raises
        ------
        OutOfMemory
            Layers in use leave no room for it.
        """
        self._require_room(layer)
        self.end_use(layer)
        return self._partitions[layer].acquire(Place.DEVICE, Mode.READ_WRITE, stream=stream)

    @property
    def resident(self) -> list[int]:
        """The layers in device memory now."""
        return [layer for layer, partition in enumerate(self._partitions) if partition.resident]

    def _prefetch(self, current: int, *, training: bool) -> None:
        later = range(current + 1, len(self._partitions))
        order = self._trace.upcoming() if training else (i for i in later if self._trace.loads(i, False))
        for layer in order:
            partition = self._partitions[layer]
            if partition.resident:
                continue
            if not self._ready(layer):
                return
            beyond = self._trace.next_use(layer) if training else -1
            if layer not in self._kept and not self._make_room(partition.nbytes, beyond=beyond, keep=current):
                return
            partition.prefetch()
            if not training:
                return

    def _require_room(self, layer: int) -> None:
        partition = self._partitions[layer]
        if partition.resident or layer in self._kept:
            return
        if not self._make_room(partition.nbytes, beyond=-1, keep=layer):
            raise self._no_room(layer)

    def _make_room(self, nbytes: int, *, beyond: int, keep: int) -> bool:
        """Evict layers that are needed later than `beyond` until `nbytes` fit; whether they do."""
        pool = self._partitions[0].space.pool
        while pool.largest_free < nbytes:
            victim = max(
                (layer for layer in self.resident if layer != keep and self._evictable(layer)),
                key=self._trace.next_use,
                default=None,
            )
            if victim is None or self._trace.next_use(victim) <= beyond:
                return False
            self.evict(victim)
        return True

    def _evictable(self, layer: int) -> bool:
        return not self._pins[layer] and layer not in self._kept and not self._held(layer)

    def _no_room(self, layer: int) -> OutOfMemory:
        partition = self._partitions[layer]
        pool = partition.space.pool
        stuck = [self._partitions[other].name for other in self.resident]
        return OutOfMemory(
            f"{partition.name} needs {format_size(partition.nbytes)} of the device pool, which has "
            f"{format_size(pool.nbytes)}, while these are in use at the same time: {', '.join(stuck)}; "
            "raise device_memory, or drop tensors that alias weights",
            size=partition.nbytes,
            used=pool.used,
            limit=pool.nbytes,
            budget="device pool",
        )
