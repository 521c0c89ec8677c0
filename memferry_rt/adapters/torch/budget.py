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
from ...plan.modes import GradientMode, StateMode, WeightMode
from ...streaming import BYTES, SLOTS, UNIT
from .modes import STREAMED, LayerPlan

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
    kept : tuple of int
        The layers whose weights never leave the pool.
    states : tuple of int
        State and gradients of each layer that a plan has in the pool; 0 for the others.
    panels : int
        Bytes of the ring through which weights go panel by panel.
    outgoing : int
        Bytes of the ring in which gradients are made panel by panel; 0 where torch's memory serves for that.
    together : int
        What the weights that are needed at the same time must have of the pool.
    least, comfortable, wanted : int
        The smallest pool that works, one that lets weights arrive ahead of their use, and one that holds all.
    device : int or None
        The CUDA device whose torch allocator is capped; None on the emulated device.
    granted : int
        The largest pool that torch has left room for; plans that need less do not take it from those that follow.
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
    kept: tuple[int, ...] = ()
    panels: int = 0
    outgoing: int = 0
    most_outgoing: int = 0
    states: tuple[int, ...] = ()
    granted: int = 0

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

    def replacing(self, other: Budget) -> Budget:
        """This budget in the pool of `other`, as it has grown, where that is enough."""
        if self.device is None or self.fixed:
            return self
        granted = max(other.pool, other.granted)
        return replace(self, pool=max(self.least, min(granted, self.wanted)), granted=granted).shared()

    def least_of(self, other: Budget) -> Budget:
        """The smallest that works, to be replaced by one in the pool of `other` later."""
        small = replace(self, pool=self.least, room=UpdateRoom(), granted=max(other.pool, other.granted))
        return small.shared()

    def shared(self) -> Budget:
        """With the pool shared: first what weights must have, then the rings, the other weights, and state.

        Sums of gradients come before state, as every micro-step is spared two transfers of them, and those of the
        first layers before weights: they would leave when backward is over and nothing is left to hide it.
        """
        ring = _ring(self.pool, self.largest_gradient, self.together)
        free = self.pool - self.together - ring
        outgoing = self.most_outgoing if self.most_outgoing <= free else 0
        free -= outgoing
        stream = min(self.room.streaming, self.pool // 8, free) // SMALLEST_STREAM * SMALLEST_STREAM
        left = self.pool - ring - outgoing - stream - self.weights - self.panels - sum(self.states)
        sums: dict[int, int] = {}
        more = max(left, min(self.pool // 8, free - stream))
        for layer, nbytes in enumerate(self.room.summed):
            if 0 < nbytes <= more:
                sums[layer] = nbytes
                left, more = left - nbytes, more - nbytes
        resident = [layer for layer, nbytes in enumerate(self.states) if nbytes]
        for layer, nbytes in enumerate(self.room.resident):
            if 0 < nbytes <= left + sums.get(layer, 0):
                resident.append(layer)
                left -= nbytes - sums.pop(layer, 0)
        if stream < self.room.least or len(resident) == len(self.room.resident):
            stream = 0  # it would not pay, or nothing is left that could use it
        return replace(
            self,
            ring=ring,
            outgoing=outgoing,
            stream=max(stream, 0),
            resident=tuple(sorted(resident)),
            summed=tuple(sums),
        )


def plan_budget(
    total: int,
    layouts: Sequence[LayerLayout],
    together: Iterable[tuple[int, ...]],
    *,
    pool: int | None,
    device: int | None,
    room: UpdateRoom | None = None,
    plans: Sequence[LayerPlan] | None = None,
    panels: int = 0,
    outgoing: int = 0,
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
    plans : sequence of LayerPlan, optional
        What each layer does; by default all are streamed.
    panels : int
        Bytes of the ring through which weights go panel by panel.
    outgoing : int
        Bytes of the ring that gradients in place are made in, if there is room for it.

    Raises
    ------
    BudgetError
        Some set of layers does not fit; it names the smallest budget that does.
    """
    plans = plans or [STREAMED] * len(layouts)
    gradient = max(
        (
            slot.spec.gradient_nbytes
            for layout, plan in zip(layouts, plans, strict=True)
            for slot in layout.slots
            if slot.spec.trainable and plan.gradient is GradientMode.BUFFER
        ),
        default=0,
    )
    kept = tuple(layer for layer, plan in enumerate(plans) if plan.weight is WeightMode.RESIDENT)
    states = tuple(
        _state_nbytes(layout) if plan.state is StateMode.RESIDENT else 0
        for layout, plan in zip(layouts, plans, strict=True)
    )
    stay = panels + sum(align_up(layouts[layer].weight_nbytes, RING_UNIT) for layer in kept) + sum(states)
    in_pool = [layout.weight_nbytes for layout, plan in zip(layouts, plans, strict=True) if plan.in_pool]
    least_ring = min(_whole_ring(gradient), SMALLEST_RING) if gradient else 0
    worst = max((_room(layouts, group) for group in together if group), default=(0, ""))
    names = ", ".join(filter(None, (worst[1], *(layouts[layer].name for layer in kept))))
    smallest = max(stay + worst[0] + least_ring, RING_UNIT)
    available = total if pool is None else pool
    if smallest > available:
        name = "device_memory" if pool is None else "pool_memory"
        raise BudgetError(name, available, smallest, f"{names} must be in it at once")
    if pool is not None and pool > total:
        raise BudgetError("device_memory", total, pool, "pool_memory is part of it")
    weights = sum(in_pool)
    room = room or UpdateRoom()
    ring = _whole_ring(gradient) if gradient else 0
    wanted = max(weights + panels + outgoing + ring + sum(states) + room.wanted, RING_UNIT)
    arriving = stay + 2 * max(in_pool, default=0)
    comfortable = min(arriving + ring + outgoing + room.streaming, wanted)
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
        together=stay + worst[0],
        least=smallest,
        comfortable=comfortable,
        wanted=wanted,
        largest_gradient=gradient,
        smallest_layer=min(in_pool, default=RING_UNIT),
        weights=sum(align_up(nbytes, RING_UNIT) for nbytes in in_pool),
        room=room,
        fixed=pool is not None,
        device=device,
        kept=kept,
        panels=panels,
        most_outgoing=outgoing,
        states=states,
    ).shared()


def _state_nbytes(layout: LayerLayout) -> int:
    return align_up(layout.state_nbytes, RING_UNIT) + align_up(layout.gradient_nbytes, RING_UNIT)


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
