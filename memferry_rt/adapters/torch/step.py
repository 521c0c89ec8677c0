"""The update of a step: every layer's, by whom it is made, and how its new weights become visible."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memferry_allocator import Driver, Event, Mode, Partition, Place, Stream, View

from ...device_update import DeviceUpdate
from ...errors import OffloadError
from ...native import AdamOperands, NativeCalls
from ...plan.modes import StateMode
from ...split import UpdateRates, spread
from ...updates import UpdateQueue
from .early import EarlyUpdates
from .gradient_slot import GradientSlot
from .layer import LayerState
from .memory import DeviceMemory
from .optimizer import OptimizerPatch
from .update import AdamUpdate, LayerUpdate

Pieces = Sequence[tuple[Any, AdamOperands]]  # of a layer's update: what calls share, and where it is at home


@dataclass(frozen=True)
class _Work:
    """One layer's update, with everything that it depends on captured."""

    layer: LayerState
    indices: set[int]
    settings: list[Any]
    counts: Mapping[int, Any]
    scale: float

    @property
    def captured(self) -> tuple[set[int], list[Any], Mapping[int, Any], float]:
        return self.indices, self.settings, self.counts, self.scale

    @property
    def has_masters(self) -> bool:
        """Whether no update reads the layer's weights: all that is updated has fp32 masters beside them."""
        return all(slot.spec.master for slot in self.layer.layout.slots if slot.spec.updated)

    @property
    def replaces_weights(self) -> bool:
        """Whether it makes every weight of the layer anew, without reading any."""
        slots = self.layer.layout.slots
        return self.has_masters and all(
            index in self.indices for index, slot in enumerate(slots) if slot.spec.numel
        )


class StepUpdates:
    """Submits the updates of a step.

    A layer whose state lives on the device is updated there, on the compute stream.  The others are shared in
    forward order between the CPU and the device, through which their state is streamed.

    Parameters
    ----------
    driver : Driver
    layers : sequence of LayerState
    plans : mapping of LayerState to LayerUpdate
        The layers that the optimizer updates.
    memory : DeviceMemory
    patch : OptimizerPatch
    queue : UpdateQueue
    update : DeviceUpdate or None
        The kernel on the device.
    split : float or None
        The share of the parameters to be updated on the device; None balances by measured rates.
    stream : callable
        The stream on which the calling thread's kernels run.
    shared : bool
        Other ranks update other parts of the same host pages.

    Attributes
    ----------
    early : EarlyUpdates or None
        Who makes updates ahead of the step; set by who has spare slabs.
    """

    def __init__(
        self,
        driver: Driver,
        layers: Sequence[LayerState],
        plans: Mapping[LayerState, LayerUpdate],
        memory: DeviceMemory,
        patch: OptimizerPatch,
        queue: UpdateQueue,
        update: DeviceUpdate | None,
        split: float | None,
        stream: Callable[[], Stream],
        shared: bool = False,
    ) -> None:
        self._driver = driver
        self._layers = layers
        self.plans = plans
        self._memory = memory
        self._patch = patch
        self._queue = queue
        self._update = update
        self._split = split
        self._stream = stream
        self._shared = shared
        self.early: EarlyUpdates | None = None
        self.rates = UpdateRates()
        self.updated: list[LayerState] = []  # in the last step; some of them in these ways:
        self.streamed: list[LayerState] = []
        self.made_early: set[LayerState] = set()
        self.cpu_nbytes = 0  # of host memory that the CPU's updates have read and written
        self._unseen: set[LayerState] = set()
        self._streamed: dict[LayerState, Event] = {}

    def first_use(self, layer: LayerState) -> bool:
        """Whether this is the first use of a streamed layer since its update."""
        if layer not in self._unseen:
            return False
        self._unseen.remove(layer)
        return True

    def may_still_read(self, layer: LayerState) -> bool:
        """Whether the device may still read a layer's gradients: nothing has waited for its weights since."""
        return layer in self._unseen

    def streamed_until(self, layer: LayerState) -> Event | None:
        """The end of a layer's streaming, unless the host knows it to be over; its update is enqueued.

        From there on its state is at home, and its gradients there may be written.
        """
        return self._streamed.get(layer)

    def settle(self, layer: LayerState) -> None:
        """Block until a layer's streaming is over; its update is enqueued."""
        end = self._streamed.get(layer)
        if end is not None:
            end.synchronize()
            del self._streamed[layer]

    def numel(self, layers: Iterable[LayerState]) -> int:
        """How many parameters the optimizer updates in these layers."""
        return sum(self.plans[layer].numel for layer in layers)

    def submit(self, present: Sequence[GradientSlot], scale: float) -> None:
        """Queue the update of every layer that has gradients."""
        self._measure()
        settings = self._patch.settings()
        indices: dict[LayerState, set[int]] = {}
        for slot in present:
            if slot.layer.layout.slots[slot.index].spec.updated:
                indices.setdefault(slot.layer, set()).add(slot.index)
        updated = [layer for layer in self._layers if layer in indices]
        self.refuse_aliases(updated)
        early = self._made_early(updated, indices, settings, scale)
        self.updated, self.made_early = updated, early
        for layer in updated:
            if layer.residence is None:
                self._memory.cache.end_use(layer.index)
                self.settle(layer)
        self._assign([layer for layer in updated if layer.residence is None and layer not in early])
        for layer in updated:
            counts = {index: self._patch.count(layer.parameters[index]) for index in indices[layer]}
            layer.touch(indices[layer])
            work = _Work(layer, indices[layer], settings, counts, scale)
            if layer.residence is not None:
                self._update_in_place(work)
            elif layer in early:
                self._publish(work)
            elif layer in self.streamed:
                self._submit_streamed(work)
            else:
                self._submit_to_cpu(work)

    def release_weights(self, layers: Sequence[LayerState]) -> None:
        """Give up the device copies of layers whose weights are about to change at home.

        Raises
        ------
        OffloadError
            A tensor aliases one of them; nothing was given up.
        """
        self.refuse_aliases(layers)
        for layer in layers:
            self._memory.cache.evict(layer.index)

    def forget_early(self) -> None:
        """What was made ahead is of no use: gradients have changed in a way that leaves no trace."""
        if self.early is not None:
            self.early.drop_all()

    def skip(self) -> None:
        """There is no update in this step, and nothing made ahead is of use."""
        self.forget_early()
        if self.early is not None:
            self.early.speculation.learn(False)

    def _made_early(
        self,
        updated: Sequence[LayerState],
        indices: Mapping[LayerState, set[int]],
        settings: list[Any],
        scale: float,
    ) -> set[LayerState]:
        """The layers whose update of this step is in a spare slab already."""
        made: set[LayerState] = set()
        if self.early is None:
            return made
        for layer in updated:
            if self.early.fits(layer, indices[layer], settings, scale):
                made.add(layer)
        self.early.drop_all(but=made)
        self.early.speculation.learn(scale == 1.0)
        return made

    def refuse_aliases(self, layers: Sequence[LayerState]) -> None:
        """Nobody may hold tensors over device copies of layers whose weights are about to change."""
        if any(layer.held() for layer in layers):
            gc.collect()  # a traceback or a cycle may be all that holds them
        for layer in layers:
            if layer.held():
                raise OffloadError(
                    f"a tensor still aliases the device copy of layer {layer.name!r}, whose weights are "
                    "about to change; delete it, or clone() what you keep of a weight"
                )

    # -- who updates what -----------------------------------------------------------------------------
    def _assign(self, layers: Sequence[LayerState]) -> None:
        """Choose the layers that are streamed through the device in this step."""
        free = [layer for layer in layers if layer.plan.state is None]
        sizes = [self.plans[layer].numel for layer in free]
        there = self._memory.streaming is not None
        chosen = spread(sizes, self._streamed_share(sum(sizes)) if there else 0.0)
        shared = {layer for layer, take in zip(free, chosen, strict=True) if take}
        planned = {layer for layer in layers if there and layer.plan.state is StateMode.STREAMED}
        self.streamed = [layer for layer in layers if layer in shared or layer in planned]
        self._unseen = self._unseen.difference(layers).union(self.streamed)

    def _streamed_share(self, rest: int) -> float:
        """The device's share of the `rest` parameters whose state is at home in host memory."""
        if self._split is None:
            return self.rates.device_share
        resident = self.numel(self._memory.residents.layers)
        return min(1.0, max(0.0, self._split * (resident + rest) - resident) / max(rest, 1))

    def _measure(self) -> None:
        """Take in how fast the last step's updates were."""
        streaming, cpu = self._memory.streaming, self._queue.rate
        self._queue.rate = None
        self.rates = self.rates.measured(cpu, None if streaming is None else streaming.rate())

    # -- the three ways -------------------------------------------------------------------------------
    def _submit_to_cpu(self, work: _Work) -> None:
        layer = work.layer
        state = self._driver.host_access(
            reads=[layer.gradient_span],
            writes=[layer.state_span] if layer.state_span.nbytes else [],
            label=f"update of {layer.name}",
        )
        try:
            weights = self._open_home(work)
        except BaseException:
            state.end()
            raise

        def end() -> None:
            state.end()
            weights.release()

        plan = self.plans[layer]
        self.cpu_nbytes += plan.traffic
        calls = plan.on_cpu(*work.captured)
        if isinstance(calls, NativeCalls):
            self._queue.submit_native(layer.index, calls, end, elements=plan.numel)
        else:
            self._queue.submit(layer.index, calls, end)

    def _publish(self, work: _Work) -> None:
        """Let an update made during backward take effect: only the new weights are copied, beside the forward."""
        layer, early = work.layer, self.early
        assert early is not None
        weights = self._open_home(work)
        calls, slab = early.publish(layer)
        spare = self._driver.host_access(reads=[slab.weights], label=f"new weights of {layer.name}")

        def end() -> None:
            spare.end()
            weights.release()
            early.reuse(slab)

        self.cpu_nbytes += self.plans[layer].traffic + 2 * weights.nbytes
        self._queue.submit_native(layer.index, calls, end, elements=0)

    def _submit_streamed(self, work: _Work) -> None:
        layer, streaming, update = work.layer, self._memory.streaming, self._update
        assert streaming is not None
        assert update is not None
        weights = self._memory.weights[layer.index]
        stay = weights.resident and work.has_masters and layer.plan.new_weights_stay and not self._shared
        if not stay:
            self._open_home(work).release()  # nobody uses the pages from here on
        pieces = self._on_device(layer).native(update, *work.captured)
        known = self._driver.publish()

        def enqueue() -> None:
            self._driver.observe(known)
            before = streaming.bytes_in, streaming.bytes_out
            try:
                if stay:
                    self._stream_into(weights, pieces)
                else:
                    self._stream_home(weights, pieces)
            finally:
                self._streamed[layer] = streaming.out.record()
                layer.traffic.copied_in += streaming.bytes_in - before[0]
                layer.traffic.copied_out += streaming.bytes_out - before[1]

        self._queue.feed(layer.index, enqueue)

    def _stream_into(self, weights: Partition, pieces: Pieces) -> None:
        """Write new weights straight into the device copy; they come home when somebody asks.

        The copy is valid before: what a failure leaves unwritten is as it was.
        """
        streaming = self._memory.streaming
        assert streaming is not None
        with weights.acquire(Place.DEVICE, Mode.READ_WRITE, stream=streaming.compute) as view:
            to_copy = view.ptr - weights.host.ptr
            for prepared, home in pieces:
                streaming.run(dataclasses.replace(home, weight=home.weight + to_copy), prepared, weights_stay=True)

    def _stream_home(self, weights: Partition, pieces: Pieces) -> None:
        streaming = self._memory.streaming
        assert streaming is not None
        try:
            for prepared, home in pieces:
                streaming.run(home, prepared)
        finally:  # readers of the host pages wait for the stream that brings the weights home
            weights.acquire(Place.MAPPED, Mode.READ_WRITE, stream=streaming.out).release()

    def _open_home(self, work: _Work) -> View:
        """A layer's weights at home, for an update that writes them there; it gives up the device copy.

        Where the device has a kernel the CPU has the native one, which does not fail midway: what that replaces
        need not come home first.  A part of what is shared does not replace the whole.
        """
        replaced = self._update is not None and work.replaces_weights and not self._shared
        mode = Mode.WRITE if replaced else Mode.READ_WRITE
        return self._memory.weights[work.layer.index].acquire(Place.HOST, mode)

    def _on_device(self, layer: LayerState) -> AdamUpdate:
        plan = self.plans[layer]
        assert isinstance(plan, AdamUpdate), "the device updates for Adam only"
        return plan

    def _update_in_place(self, work: _Work) -> None:
        """Update a resident layer; its new weights are in device memory, and come home when somebody asks."""
        layer, update = work.layer, self._update
        assert update is not None
        stream = self._stream()
        pieces = self._on_device(layer).native(update, *work.captured)
        with self._memory.cache.open_for_update(layer.index, stream) as weights:
            for prepared, home in pieces:
                update.run(stream, prepared, _on_device(home, layer, weights.ptr))


def _on_device(home: AdamOperands, layer: LayerState, weights: int) -> AdamOperands:
    """A resident layer's operands, from where they would be at home in host memory."""
    residence = layer.residence
    assert residence is not None
    state = residence.state.span.ptr - layer.state_span.ptr
    to_weights = weights - layer.weight_span.ptr
    return dataclasses.replace(
        home,
        parameter=home.parameter + (state if home.weight else to_weights),
        gradient=home.gradient + residence.gradient.span.ptr - layer.gradient_span.ptr,
        exp_avg=home.exp_avg + state,
        exp_avg_sq=home.exp_avg_sq + state,
        weight=home.weight + to_weights if home.weight else 0,
    )
