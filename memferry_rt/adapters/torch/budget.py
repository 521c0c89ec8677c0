"""How the device budget is shared: a pool for weights and gradients, and what torch reserves.

``device_memory`` bounds both together.  On a real device torch's part is capped; on the emulated device, where
torch computes on host tensors, the pool alone counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from memferry_allocator.sizes import align_up

from ...errors import BudgetError
from ...layout import LayerLayout
from ...streaming import BYTES, SLOTS, UNIT

RING_UNIT = 512
SMALLEST_RING = 4 << 10
SMALLEST_STREAM = SLOTS * BYTES * UNIT
WORTHWHILE_STREAM = SLOTS * BYTES * (64 << 10)  # with smaller copies, starting them takes most of the time
LARGEST_STREAM = SLOTS * BYTES * (8 << 20)  # elements: copies of 32 MiB, far above what starting one costs
SLACK = 0.06  # of torch's peak in the first step: fragmentation differs a little from step to step


@dataclass(frozen=True)
class UpdateRoom:
    """What the update on the device could use of the pool, in bytes.

    Attributes
    ----------
    streaming : int
        For the ring through which state is streamed; 0 where none is.
    least : int
        A smaller ring is not worth having.
    resident : tuple of int
        State and gradients of each layer that may live on the device; 0 for one that may not.
    summed : tuple of int
        Gradients of each layer that may be summed on the device; empty where a step has one micro-step.
    """

    streaming: int = 0
    least: int = 0
    resident: tuple[int, ...] = ()
    summed: tuple[int, ...] = ()

    @property
    def wanted(self) -> int:
        """With room for everything."""
        return self.streaming + sum(map(max, zip_longest(self.resident, self.summed, fillvalue=0)))


@dataclass(frozen=True)
class Budget:
    """Bytes of the pool, of the rings inside it, and of torch's part.

    Attributes
    ----------
    stream : int
        Of the ring through which optimizer state is streamed.
    resident : tuple of int
        The layers whose optimizer state and gradients live in the pool.
    summed : tuple of int
        The layers of which the gradients alone do.
    together : int
        What the weights that are needed at the same time must have of the pool.
    least, comfortable, wanted : int
        The smallest pool that works, one that lets weights arrive ahead of their use, and one that holds all.
    device : int or None
        The CUDA device whose torch allocator is capped; None on the emulated device.
    """

    total: int
    pool: int
    ring: int
    stream: int
    resident: tuple[int, ...]
    summed: tuple[int, ...]
    together: int
    least: int
    comfortable: int
    wanted: int
    largest_gradient: int
    smallest_layer: int
    weights: int
    room: UpdateRoom
    fixed: bool
    device: int | None

    @property
    def torch_limit(self) -> int:
        return self.total - self.pool

    def smallest_for(self, torch_nbytes: int) -> int:
        """The smallest total that, shared like this one, leaves torch `torch_nbytes` bytes."""
        if self.fixed:
            return self.pool + torch_nbytes
        quarter = -(-torch_nbytes * 4 // 3)  # where a quarter of the total is the pool
        return max(torch_nbytes + self.least, min(quarter, torch_nbytes + self.comfortable))

    def begin(self) -> None:
        """Cap what torch may reserve, give back what it only caches, and count its peak from here on.

        For a model that has left the device already: its weights there do not count.
        """
        self.apply()
        if self.device is not None:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def apply(self) -> None:
        """Cap what torch may reserve."""
        if self.device is not None:
            capacity = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.torch_limit / capacity), self.device)

    def release(self) -> None:
        if self.device is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def peak(self, pool_peak: int) -> int:
        """Most bytes of the budget in use so far."""
        if self.device is None:
            return pool_peak
        return self.pool + torch.cuda.max_memory_reserved(self.device)

    def after_first_step(self) -> Budget | None:
        """A budget with a larger pool, if torch has left room for one."""
        if self.device is None or self.fixed:
            return None
        reserved = torch.cuda.max_memory_reserved(self.device)
        spare = self.total - reserved - int(SLACK * reserved)
        pool = min(spare, self.wanted) // RING_UNIT * RING_UNIT
        if pool < self.pool + self.smallest_layer:
            return None
        return replace(self, pool=pool).shared()

    def shared(self) -> Budget:
        """With the pool shared: first what weights must have, then the rings, the other weights, and state.

        Sums of gradients come before state, as every micro-step is spared two transfers of them, and those of the
        first layers before weights: they would leave when backward is over and nothing is left to hide it.
        """
        ring = _ring(self.pool, self.largest_gradient, self.together)
        stream = min(self.room.streaming, self.pool // 8, self.pool - self.together - ring)
        stream = stream // SMALLEST_STREAM * SMALLEST_STREAM
        left = self.pool - ring - stream - self.weights
        sums: dict[int, int] = {}
        more = max(left, min(self.pool // 8, self.pool - self.together - ring - stream))
        for layer, nbytes in enumerate(self.room.summed):
            if 0 < nbytes <= more:
                sums[layer] = nbytes
                left, more = left - nbytes, more - nbytes
        resident = []
        for layer, nbytes in enumerate(self.room.resident):
            if 0 < nbytes <= left + sums.get(layer, 0):
                resident.append(layer)
                left -= nbytes - sums.pop(layer, 0)
        if stream < self.room.least or len(resident) == len(self.room.resident):
            stream = 0  # it would not pay, or nothing is left that could use it
        return replace(self, ring=ring, stream=max(stream, 0), resident=tuple(resident), summed=tuple(sums))


def plan_budget(
    total: int,
    layouts: Sequence[LayerLayout],
    together: Iterable[tuple[int, ...]],
    *,
    pool: int | None,
    device: int | None,
    room: UpdateRoom | None = None,
) -> Budget:
    """Share a device budget.

    Parameters
    ----------
    total : int
        ``device_memory`` in bytes.
    layouts : sequence of LayerLayout
    together : iterable of tuple of int
        Layers that must be in device memory at the same time, in the order in which they come to be there.
    pool : int, optional
        The pool's size, if the user gives it.
    device : int or None
        The CUDA device; None on the emulated device.
    room : UpdateRoom, optional
        What the update on the device could use; nothing by default.

    Raises
    ------
    BudgetError
        Some set of layers does not fit; it names the smallest budget that does.
    """
    gradient = max(
        (slot.spec.gradient_nbytes for layout in layouts for slot in layout.slots if slot.spec.trainable),
        default=0,
    )
    least_ring = min(_whole_ring(gradient), SMALLEST_RING) if gradient else 0
    worst = max((_room(layouts, group) for group in together), default=(0, ""))
    smallest = worst[0] + least_ring
    available = total if pool is None else pool
    if smallest > available or (pool is not None and pool > total):
        name = "device_memory" if pool is None else "pool_memory"
        reason = f"{worst[1]} must be in it at once" if smallest > available else "it is part of device_memory"
        raise BudgetError(name, available, smallest, reason)
    weights = sum(layout.weight_nbytes for layout in layouts)
    room = room or UpdateRoom()
    wanted = weights + _whole_ring(gradient) + room.wanted
    arriving = 2 * max(layout.weight_nbytes for layout in layouts)
    comfortable = min(arriving + _whole_ring(gradient) + room.streaming, wanted)
    if pool is not None:
        chosen = pool
    elif device is None:
        chosen = min(total, wanted)
    else:
        chosen = max(smallest, min(comfortable, total // 4))
    return Budget(
        total=total,
        pool=chosen,
        ring=0,
        stream=0,
        resident=(),
        summed=(),
        together=worst[0],
        least=smallest,
        comfortable=comfortable,
        wanted=wanted,
        largest_gradient=gradient,
        smallest_layer=min(layout.weight_nbytes for layout in layouts),
        weights=sum(align_up(layout.weight_nbytes, RING_UNIT) for layout in layouts),
        room=room,
        fixed=pool is not None,
        device=device,
    ).shared()


def _room(layouts: Sequence[LayerLayout], group: tuple[int, ...]) -> tuple[int, str]:
    """Bytes in which the layers of a group, arriving in this order, can always be placed; and their names.

    A layer that comes when k others are pinned finds what is free in up to k + 1 holes; the largest of them holds
    it for certain if together they are k + 1 times its size.
    """
    sizes = [layouts[layer].weight_nbytes for layer in group]
    room = max(sum(sizes[:count]) + (count + 1) * sizes[count] for count in range(len(sizes)))
    return room, " and ".join(layouts[layer].name for layer in group)


def _ring(pool: int, gradient: int, weights: int) -> int:
    """An eighth of the pool, or two of the largest gradient if that is less, and never what weights must have."""
    if not gradient:
        return 0
    share = max(pool // 8, SMALLEST_RING)
    return min(_whole_ring(gradient), share, pool - weights) // RING_UNIT * RING_UNIT


def _whole_ring(gradient: int) -> int:
    return 2 * align_up(max(gradient, 1), RING_UNIT)
