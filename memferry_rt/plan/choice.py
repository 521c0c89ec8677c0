"""What is decided: for every layer its modes, and what they take of both memories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memferry_allocator.sizes import align_up

from ..layout import ALIGNMENT
from ..rings import BYTES, SLOTS, UNIT
from .cost import outgoing_nbytes, ring_nbytes
from .model import LayerSpec, Workload
from .modes import GradientMode, StateMode, WeightMode

RING_UNIT = 512
SMALLEST_RING = 4 << 10
SMALLEST_STREAM = SLOTS * BYTES * UNIT
LARGEST_STREAM = SLOTS * BYTES * (8 << 20)
FRAGMENTATION = 1.15  # torch's reserved over its live bytes, at their peaks
SLACK = 1.06  # what the runtime leaves torch, over its peak in the first step
WORKSPACES = 64 << 20  # of matrix products, in each of the two threads that launch
NEEDS_SLAB = (WeightMode.STREAM, WeightMode.DHA_THEN_LOAD)


@dataclass(frozen=True)
class LayerChoice:
    """One layer's modes.

    Attributes
    ----------
    weight, gradient, state : WeightMode, GradientMode, StateMode
    recompute : bool
    resident_nbytes : int
        Of streamed weights, the first partitions that stay in device memory.
    """

    weight: WeightMode = WeightMode.STREAM
    gradient: GradientMode = GradientMode.BUFFER
    state: StateMode = StateMode.CPU
    recompute: bool = False
    resident_nbytes: int = 0


@dataclass(frozen=True)
class Choice:
    """All layers' modes, and how many spare slabs let the CPU update them during backward."""

    layers: tuple[LayerChoice, ...]
    spares: int = 0


@dataclass(frozen=True)
class Shares:
    """Bytes of device memory, by what has them.

    Attributes
    ----------
    torch : int
        What torch reserves, with what the runtime leaves it beside.
    pool : int
        All others together.
    ring, stream : int
        What gradients leave through, and what state is streamed through.
    panels : int
        The rings of weights in panels, and of gradients that are written home from them.
    pinned : int
        Weights that stay, wholly or in part.
    states : int
        Optimizer state and gradients that stay.
    slabs : int
        Left for weights that come and go.
    least : int
        What these must have.
    """

    torch: int
    pool: int
    ring: int
    stream: int
    panels: int
    pinned: int
    states: int
    slabs: int
    least: int

    @property
    def fits(self) -> bool:
        return self.slabs >= self.least

    @property
    def fixed(self) -> int:
        """What is taken at every moment, beside torch's and the slabs."""
        return self.ring + self.stream + self.panels + self.pinned + self.states

    @property
    def missing(self) -> int:
        """How much more device memory would do."""
        return max(0, self.least - self.slabs)


def share_device(workload: Workload, choice: Choice, device_memory: int) -> Shares:
    """Share a device budget as the runtime does."""
    torch = torch_nbytes(workload, choice)
    pool = device_memory - torch
    pairs = list(zip(workload.layers, choice.layers, strict=True))
    least = max((slab_nbytes(layer, c) for layer, c in pairs), default=0)
    ring = _gradient_ring(pairs, pool, least)
    stream = _state_stream(pairs, pool, least + ring)
    panels = max((ring_nbytes(layer) for layer, c in pairs if c.weight is WeightMode.RING), default=0)
    panels += max((outgoing_nbytes(layer) for layer, c in pairs if c.gradient is GradientMode.INPLACE), default=0)
    pinned = sum(
        _block(layer.weight_nbytes if c.weight is WeightMode.RESIDENT else c.resident_nbytes) for layer, c in pairs
    )
    states = sum(state_nbytes(layer) for layer, c in pairs if c.state is StateMode.RESIDENT)
    slabs = pool - ring - stream - panels - pinned - states
    return Shares(torch, pool, ring, stream, panels, pinned, states, slabs, least)


def host_nbytes(workload: Workload, choice: Choice) -> int:
    """Host memory that the runtime registers: all layers' slabs, wherever their state is at home, and spares."""
    slabs = sum(layer.weight_nbytes + layer.gradient_nbytes + layer.state_nbytes for layer in workload.layers)
    return slabs + choice.spares * spare_nbytes(workload)


def slab_nbytes(layer: LayerSpec, choice: LayerChoice) -> int:
    """Device memory that the layer's weights take while they are there, where they come and go."""
    return layer.weight_nbytes - choice.resident_nbytes if choice.weight in NEEDS_SLAB else 0


def spare_nbytes(workload: Workload) -> int:
    """Of one spare slab."""
    largest = (
        max(layer.state_nbytes for layer in workload.layers),
        max(layer.weight_nbytes for layer in workload.layers),
    )
    return sum(align_up(nbytes, ALIGNMENT) for nbytes in largest)


def torch_live_nbytes(workload: Workload, choice: Choice) -> int:
    """The most that torch's tensors take: what layers keep for backward, and the loss or one layer's backward."""
    kept, peak = 0, 0
    for layer, each in zip(workload.layers, choice.layers, strict=True):
        kept += layer.kept_nbytes(each.recompute)
        peak = max(peak, kept + layer.backward_nbytes(each.recompute))
    return max(peak, kept + workload.working_nbytes) + workload.exchange_nbytes


def torch_nbytes(workload: Workload, choice: Choice) -> int:
    """What torch must have of the budget: as measured, as far as it was, else by count."""
    reserved = FRAGMENTATION * torch_live_nbytes(workload, choice) + WORKSPACES
    if workload.measured_nbytes is not None:
        usual = Choice(tuple(LayerChoice(recompute=bool(layer.recompute)) for layer in workload.layers))
        counted = FRAGMENTATION * torch_live_nbytes(replace(workload, exchange_nbytes=0), usual) + WORKSPACES
        reserved = max(WORKSPACES, workload.measured_nbytes + reserved - counted)
    return int(SLACK * reserved)


def gradient_nbytes(workload: Workload, choice: Choice) -> int:
    """Bytes of the gradients that are made on the device, and leave from there or stay."""
    pairs = zip(workload.layers, choice.layers, strict=True)
    return sum(layer.gradient_nbytes for layer, c in pairs if c.gradient is GradientMode.BUFFER)


def state_nbytes(layer: LayerSpec) -> int:
    """Device memory of a layer's state and gradients, where they are at home there."""
    return _block(layer.state_nbytes) + _block(layer.gradient_nbytes)


def _block(nbytes: int) -> int:
    return align_up(nbytes, RING_UNIT) if nbytes else 0


def _gradient_ring(pairs: Sequence[tuple[LayerSpec, LayerChoice]], pool: int, least: int) -> int:
    """Two of the largest gradient, but no more than an eighth of the pool."""
    largest = max(
        (
            layer.largest_nbytes
            for layer, c in pairs
            if c.gradient is GradientMode.BUFFER and c.state is not StateMode.RESIDENT
        ),
        default=0,
    )
    if not largest:
        return 0
    room = min(2 * _block(largest), max(pool // 8, SMALLEST_RING), pool - least)
    return max(room, SMALLEST_RING) // RING_UNIT * RING_UNIT


def _state_stream(pairs: Sequence[tuple[LayerSpec, LayerChoice]], pool: int, taken: int) -> int:
    if not any(c.state is StateMode.STREAMED for _, c in pairs):
        return 0
    room = max(0, min(LARGEST_STREAM, pool // 8, pool - taken))
    return room // SMALLEST_STREAM * SMALLEST_STREAM
