"""A model's part of the device: the pool, the weights cached in it, and the rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memferry_allocator import Direction, Driver, Event, Mode, Place, ShadowSpace, Stream, View

from ...cache import LayerCache
from ...device_kernels import DeviceMoves
from ...device_update import DeviceUpdate
from ...helpers import NO_HELP, Help
from ...plan.modes import GradientMode
from ...staging import StagingRing
from ...streaming import StateStream
from ...trace import AccessTrace
from .budget import Budget
from .counted import CountedEngine, SafeCopier
from .layer import LayerState
from .outgoing import Outgoing, open_moves
from .residence import Residents
from .tensors import TensorFactory
from .weight_panels import WeightPanels


class DeviceMemory:
    """What a model keeps on its device, within the budget.

    Parameters
    ----------
    driver : Driver
    device : int
    layers : sequence of LayerState
    budget : Budget
    factory : TensorFactory
    stream : callable
        The stream on which the calling thread's kernels run.
    ready : callable
        Whether a layer's update is over, without blocking.
    settle : callable
        Blocks until a layer's update is made or, on the device, enqueued.
    moved : callable
        Told of a layer whose optimizer state and gradients have another home now.
    wait : callable
        Lets a stream wait for the event of a copy.
    update : DeviceUpdate or None
        The kernel that state is streamed through.
    read, ahead : callable
        Open a layer's host pages for the current stream; see `WeightPanels`.
    help : Help
        Devices that lend their links.

    Attributes
    ----------
    cache : LayerCache
        The weights in the pool.
    panels : WeightPanels
        Weights that come panel by panel.
    ring : StagingRing or None
        What gradients leave through.
    outgoing : Outgoing or None
        What gradients in place are made in.
    moves : DeviceMoves or None
        Kernels that write gradients in place; opened when some are.
    streaming : StateStream or None
        What optimizer state is updated through.
    residents : Residents
        Layers whose state, or gradients alone, live in the pool.
    """

    def __init__(
        self,
        driver: Driver,
        device: int,
        layers: Sequence[LayerState],
        budget: Budget,
        factory: TensorFactory,
        *,
        stream: Callable[[], Stream],
        ready: Callable[[int], bool],
        settle: Callable[[int], None],
        moved: Callable[[LayerState], None],
        wait: Callable[[Stream, Event], None],
        update: DeviceUpdate | None,
        read: Callable[[LayerState], View],
        ahead: Callable[[LayerState], View | None],
        help: Help = NO_HELP,
    ) -> None:
        self._driver = driver
        self._device = device
        self._layers = layers
        self._stream = stream
        self._update = update
        self._wait = wait
        self._factory = factory
        self._measure = not factory.emulated  # whose clock knows nothing of the CPU's work
        self.budget = budget
        self.engine = CountedEngine(driver, device, layers, help)
        self.space = ShadowSpace(
            driver, device, device_budget=budget.pool, copier=SafeCopier(self.engine, Direction.DEVICE_TO_HOST)
        )
        self.weights = self.space.buffer("weights", [layer.weight_span for layer in layers], fitting=False)
        for layer, partition in zip(layers, self.weights, strict=True):
            partition.name = layer.name
        self.trace = AccessTrace(
            len(layers), loads=lambda layer, backward: layers[layer].plan.loads(backward=backward)
        )
        self.panels = WeightPanels(driver, self.engine, factory, stream=stream, read=read, ahead=ahead)
        self.cache = LayerCache(
            self.weights,
            self.trace,
            ready=ready,
            held=lambda layer: self._layers[layer].held(),
            settle=settle,
            ended=lambda layer: self.panels.forget(),
        )
        self.residents = Residents(SafeCopier(self.engine, *Direction), factory, moved)
        self.ring: StagingRing | None = None
        self.outgoing: Outgoing | None = None
        self.moves: DeviceMoves | None = None
        self.streaming: StateStream | None = None
        self._streamed = (0, 0)  # bytes in and out through rings that are closed

    def open(self) -> None:
        """Take the budget's parts of the pool, largest first, and move in what is to live there."""
        pool, stream = self.space.pool, self._stream()
        for layer in self.budget.kept:
            self.cache.keep(layer)
        self.panels.open(pool, self.budget.panels, stream)
        self.residents.move_in((self._layers[layer] for layer in self.budget.resident), pool, stream)
        self.residents.sum_here((self._layers[layer] for layer in self.budget.summed), pool, stream)
        if self._update is not None and self.budget.stream:
            self.streaming = StateStream(
                self._driver, self._device, self._update, pool, self.budget.stream, measure=self._measure
            )
        self.ring = StagingRing(pool, self.budget.ring, stream, wait=self._wait) if self.budget.ring else None
        if any(layer.plan.gradient is GradientMode.INPLACE for layer in self._layers):
            self.moves = self.moves or open_moves(self._driver, self._device)
        if self.budget.outgoing:
            ring = StagingRing(pool, self.budget.outgoing, stream, wait=self._wait)
            self.outgoing = Outgoing(self.engine, self._factory, ring, self._stream)

    @property
    def bytes_moved(self) -> dict[Direction, int]:
        """Bytes submitted to the copy engines so far."""
        moved, streaming = self.engine.bytes_moved, self._streamed
        if self.streaming is not None:
            streaming = (streaming[0] + self.streaming.bytes_in, streaming[1] + self.streaming.bytes_out)
        moved[Direction.HOST_TO_DEVICE] += streaming[0] + self.panels.strided_bytes_in
        moved[Direction.DEVICE_TO_HOST] += streaming[1]
        return moved

    def bring_home(self, layer: LayerState) -> None:
        """Block until a layer's weights at home are the newest, whoever made them; its update is over."""
        self.weights[layer.index].acquire(Place.HOST, Mode.READ).release()

    def forget_copies(self) -> None:
        """Give up the device copies of weights, which come from home again: they may not be whole."""
        self.panels.forget()
        for layer in self._layers:
            self.cache.evict(layer.index)

    def drop(self) -> None:
        """Give everything back to the pool, after bringing home what is newer there.

        It begins where an earlier call, or `open`, has failed.
        """
        self.cache.let_go()
        for layer in self._layers:
            self.cache.evict(layer.index)
            layer.forget_places()
        stream = self._stream()
        self.panels.close(stream)
        self.residents.move_out(self.space.pool, stream)
        if self.streaming is not None:
            self.streaming.close(stream)
            self._streamed = (
                self._streamed[0] + self.streaming.bytes_in,
                self._streamed[1] + self.streaming.bytes_out,
            )
            self.streaming = None
        if self.ring is not None:
            self.ring.close(stream)
            self.ring = None
        if self.outgoing is not None:
            self.outgoing.close(stream)
            self.outgoing = None

    def resize(self, budget: Budget) -> None:
        """Exchange the budget, after `drop`; what was in device memory comes back as far as there is room."""
        self.budget = budget
        self.trace.replan()
        self.space.resize(budget.pool)
        budget.apply()
        self.open()
        for layer in self._layers:
            if not self.cache.load_early(layer.index):
                break
