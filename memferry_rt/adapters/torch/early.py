"""Updates made during backward, into spare slabs; `step` publishes them, or makes them again.

Nothing live changes before `step`: the new state goes into a spare slab, the new weights beside it.  `step` takes
them if everything that they were made from is what it would use itself; then the spare slab becomes the layer's,
and the layer's old one spare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from memferry_allocator import Driver, Event, Span
from memferry_allocator.driver import Bracket
from memferry_allocator.sizes import align_up

from ...device_update import ITEMSIZE
from ...layout import ALIGNMENT, MOMENTS, LayerLayout
from ...native import AdamKernel, AdamOperands, AdamSettings, NativeBatch, NativeCalls, load_gradient_kernels
from ...pages import SlabPages
from ...speculation import Speculation
from ...updates import UpdateQueue
from .adam_state import AdamPatch
from .gradient_slot import GradientSlot
from .layer import LayerState
from .update import NATIVE_CHUNK, AdamUpdate, cut_work


@dataclass(eq=False)
class SpareSlab:
    """Host memory for one layer's new state, and for its new weights until they are published."""

    state: Span
    weights: Span


def host_nbytes(layouts: Sequence[LayerLayout], spares: int) -> int:
    """Host memory of a model with so many spare slabs, each of which fits any layer's state and weights."""
    return sum(layout.host_nbytes for layout in layouts) + spares * sum(map(_whole, _largest(layouts)))


def spares_within(layouts: Sequence[LayerLayout], host_memory: int | None) -> int:
    """How many spare slabs `host_memory` has room for; none where it is not given."""
    if host_memory is None:
        return 0
    each = host_nbytes(layouts, 1) - host_nbytes(layouts, 0)
    return min(len(layouts), max(0, host_memory - host_nbytes(layouts, 0)) // each)


def cut_spares(arena: SlabPages, layouts: Sequence[LayerLayout], count: int) -> list[SpareSlab]:
    """Spare slabs from an arena that has room for them."""
    state, weights = _largest(layouts)
    return [SpareSlab(arena.cut(state), arena.cut(weights)) for _ in range(count)]


def _whole(nbytes: int) -> int:
    return align_up(nbytes, ALIGNMENT)


def _largest(layouts: Sequence[LayerLayout]) -> tuple[int, int]:
    return max(layout.state_nbytes for layout in layouts), max(layout.weight_nbytes for layout in layouts)


class _Seen:
    """A tensor as it was; equal to another look at the same object if nobody has written to it since."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seen) and (self._tensor is other._tensor and self._version == other._version)

    __hash__ = None  # type: ignore[assignment]  # what it looks at changes


@dataclass(frozen=True)
class _Basis:
    """Everything that an update is made from, as far as it can change."""

    settings: list[AdamSettings]
    steps: dict[int, float]
    gradients: dict[int, int]
    parameters: dict[int, int]
    moments: dict[int, list[_Seen]]


@dataclass(eq=False)
class _Early:
    slab: SpareSlab
    basis: _Basis
    operands: list[AdamOperands]
    batch: Future[NativeBatch]


@dataclass(eq=False)
class _Arrivals:
    """The slots of one layer, which of them have their gradient in this backward, and their last copy home."""

    slots: dict[int, GradientSlot] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    home: Event | None = None

    def clear(self) -> None:
        self.arrived.clear()
        self.home = None


class EarlyUpdates:
    """Makes updates as soon as a layer's gradients are final, as far as there are spare slabs.

    Parameters
    ----------
    driver : Driver
    plans : mapping of LayerState to AdamUpdate
    patch : AdamPatch
    queue : UpdateQueue
        Of native calls.
    kernel : AdamKernel
    slots : sequence of GradientSlot
    spares : list of SpareSlab
    streamed_until : callable
        The event after which a layer's state is at home, if the host has not waited for it.
    """

    def __init__(
        self,
        driver: Driver,
        plans: Mapping[LayerState, AdamUpdate],
        patch: AdamPatch,
        queue: UpdateQueue,
        kernel: AdamKernel,
        slots: Sequence[GradientSlot],
        spares: list[SpareSlab],
        *,
        streamed_until: Callable[[LayerState], Event | None],
    ) -> None:
        self._driver = driver
        self._plans = plans
        self._patch = patch
        self._queue = queue
        self._kernel = kernel
        self._spares = spares
        self._streamed_until = streamed_until
        self._early: dict[LayerState, _Early] = {}
        self._layers: dict[LayerState, _Arrivals] = {}
        for slot in slots:
            if slot.layer in plans:
                self._layers.setdefault(slot.layer, _Arrivals()).slots[slot.index] = slot
        self.speculation = Speculation()
        self._failure: BaseException | None = None
        self.published = 0
        self.dropped = 0

    # -- during backward --------------------------------------------------------------------------------
    def changing(self, layer: LayerState) -> None:
        """A gradient of the layer is about to change: what was made from it is of no use."""
        self._drop(layer)

    def arrived(self, slot: GradientSlot) -> None:
        """A gradient is on its way home."""
        layer = self._layers.get(slot.layer)
        if layer is None:
            return
        layer.arrived.add(slot.index)
        layer.home = slot.leaving or layer.home  # one without elements leaves nothing to wait for
        if len(layer.arrived) == len(layer.slots):
            home = layer.home
            layer.clear()
            if self.speculation.active and slot.layer.residence is None and self._patch.shows_own(slot.layer):
                self._try(slot.layer, home)

    def _try(self, layer: LayerState, home: Event | None) -> None:
        """Start a layer's update if a slab is free for it and the settings are ones to go by."""
        slab = next((s for s in self._spares if s.state.nbytes >= layer.layout.state_nbytes), None)
        if slab is None:
            return
        try:
            settings = self._patch.settings()
        except Exception:  # it is `step` that says so, if they are still wrong then
            return
        self._spares.remove(slab)
        try:
            self._begin(layer, slab, home, settings)
        except BaseException:
            self._spares.append(slab)
            raise

    def _begin(self, layer: LayerState, slab: SpareSlab, home: Event | None, settings: list[AdamSettings]) -> None:
        """Start a layer's update; its gradients are at home behind the event, as copies home keep their order."""
        plan = self._plans[layer]
        present = set(plan.indices)
        steps = {index: self._patch.next_count(layer.parameters[index]) for index in present}
        work = [
            (prepared, _into(operands, layer, slab))
            for prepared, operands in plan.native(self._kernel, present, settings, steps, 1.0)
        ]
        calls = self._kernel.calls(cut_work(work))
        known = self._driver.publish()
        awaited = [event for event in (home, self._streamed_until(layer)) if event is not None]

        def compute() -> NativeBatch:
            self._driver.observe(known)
            for event in awaited:
                event.synchronize()
            return self._queue.run_early(self._bracketed(layer, slab), calls)

        self._early[layer] = _Early(
            slab,
            self._basis(layer, present, settings, steps),
            [operands for _, operands in work],
            self._queue.in_feeder(compute),
        )

    def _bracketed(self, layer: LayerState, slab: SpareSlab) -> Callable[[], Bracket]:
        masters = [slot.spec.master for slot in layer.layout.slots if slot.spec.updated]
        return lambda: self._driver.host_access(
            reads=[layer.gradient_span, layer.state_span, *([] if all(masters) else [layer.weight_span])],
            writes=[slab.state, slab.weights],
            label=f"early update of {layer.name}",
        )

    def _basis(
        self,
        layer: LayerState,
        indices: set[int],
        settings: list[AdamSettings],
        steps: Mapping[int, torch.Tensor],
    ) -> _Basis:
        slots = self._layers[layer].slots
        return _Basis(
            settings,
            {index: float(steps[index]) for index in indices},
            {index: slots[index].home._version for index in indices},
            {index: layer.parameter_versions[index] for index in indices},
            {
                index: [_Seen(self._patch.moment(layer.parameters[index], key)) for key in MOMENTS]
                for index in indices
            },
        )

    # -- in step ------------------------------------------------------------------------------------------
    def fits(
        self,
        layer: LayerState,
        indices: set[int],
        settings: list[AdamSettings],
        scale: float,
    ) -> bool:
        """Whether the layer has an update made from exactly this; one made from something else is dropped."""
        self._raise_failure()
        early = self._early.get(layer)
        if early is None:
            return False
        steps = {index: self._patch.next_count(layer.parameters[index]) for index in indices}
        same = indices == set(early.basis.steps) and early.basis == self._basis(layer, indices, settings, steps)
        if scale == 1.0 and same and self._over(early):
            return True
        self._drop(layer)
        self._raise_failure()
        return False

    def publish(self, layer: LayerState) -> tuple[NativeCalls, SpareSlab]:
        """Make the new state the layer's, and give the calls that copy the new weights home, and from where.

        The slab is to be given to `reuse` once they have run.
        """
        early = self._early.pop(layer)
        old = layer.move_state(early.slab.state)
        self._patch.repoint(layer)
        self.published += 1
        kernels = load_gradient_kernels()
        assert kernels is not None, "whoever has the one kernel has the others"
        to_home = layer.weight_span.ptr - early.slab.weights.ptr
        rows = []
        for operands in early.operands:
            dtype = operands.weight_dtype if operands.weight else "float32"
            source = operands.weight or operands.out_parameter
            assert source is not None
            for start in range(0, operands.count, NATIVE_CHUNK):
                offset, count = start * ITEMSIZE[dtype], min(NATIVE_CHUNK, operands.count - start)
                rows.append((source + to_home + offset, dtype, source + offset, dtype, count))
        return kernels.conversions(rows), SpareSlab(old, early.slab.weights)

    def reuse(self, slab: SpareSlab) -> None:
        """Nobody needs the slab's contents any more."""
        self._spares.append(slab)

    def drop_all(self, *, but: Collection[LayerState] = ()) -> None:
        """Forget what was made ahead, once it is over, except of some layers."""
        for layer in list(self._early):
            if layer not in but:
                self._drop(layer)
        for arrivals in self._layers.values():
            arrivals.clear()
        self._failure = None  # of work that nobody will use

    def _drop(self, layer: LayerState) -> None:
        early = self._early.pop(layer, None)
        if early is not None:
            self._over(early)
            self._spares.append(early.slab)
            self.dropped += 1

    def _over(self, early: _Early) -> bool:
        """Wait until the work is over; whether it did not fail."""
        failure = early.batch.exception()
        if failure is None:
            early.batch.result().wait()
        self._failure = self._failure or failure
        return failure is None

    def _raise_failure(self) -> None:
        """What failed in backward's shadow is told in `step`, which has not changed anything yet."""
        failure = self._failure
        if failure is not None:
            self.drop_all()
            raise failure


def _into(home: AdamOperands, layer: LayerState, slab: SpareSlab) -> AdamOperands:
    """Operands whose results go into a spare slab."""
    state = slab.state.ptr - layer.state_span.ptr
    weights = slab.weights.ptr - layer.weight_span.ptr
    return dataclasses.replace(
        home,
        out_parameter=home.parameter + (state if home.weight else weights),
        out_exp_avg=home.exp_avg + state,
        out_exp_avg_sq=home.exp_avg_sq + state,
        weight=home.weight + weights if home.weight else 0,
    )
