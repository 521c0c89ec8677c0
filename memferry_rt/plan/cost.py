"""What each layer costs in each of its modes: from a profile where it says, from formulas where it does not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .machine import Machine
from .model import ITEMSIZE, LayerSpec, Workload
from .modes import GradientMode, WeightMode
from .panels import cut_panels, ring_ends
from .profile import GradientPlace, LayerKind, LayerProfile, Phase, Profile, Timing, WeightPlace

LINE = 128  # bytes: what the device reads of host memory at the least
PANEL = 8 << 20  # of a weight or a gradient, in a ring
PANELS = 3  # in the ring of weights: one is read, one is full, one is being filled
OUTGOING = 2  # in the ring of gradients that are written in place
NORM_READS = 0.1  # how often each row of a norm reads its weight from host memory


class Source(Enum):
    """Where a layer's times are from."""

    PROFILE = "profile"
    FORMULA = "formula"
    BOTH = "profile and formula"


@dataclass(frozen=True)
class Work:
    """A kernel, or several that belong together: it ends when all three are done.

    Attributes
    ----------
    seconds : float
        Of computing.
    read_nbytes, write_nbytes : float
        Of host memory, over the link.
    panel_nbytes : float
        That a copy engine brings meanwhile, panel by panel.
    """

    seconds: float
    read_nbytes: float = 0.0
    write_nbytes: float = 0.0
    panel_nbytes: float = 0.0

    def alone(self, machine: Machine) -> float:
        """Seconds, with the link to itself."""
        panels = self.panel_nbytes / machine.to_device + (machine.copy_latency if self.panel_nbytes else 0.0)
        return max(
            self.seconds, self.read_nbytes / machine.host_reads, self.write_nbytes / machine.host_writes, panels
        )


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs.

    Attributes
    ----------
    forward : mapping of WeightMode to Work
        For every mode that the layer has and that is exact, or all if that does not matter.
    backward : mapping of (WeightMode, GradientMode) to Work
        Without recomputing.
    recompute : mapping of WeightMode to Work
    load_nbytes : int
        Copied to the device for a load.
    source : Source
    """

    forward: dict[WeightMode, Work]
    recompute: dict[WeightMode, Work]
    backward: dict[tuple[WeightMode, GradientMode], Work]
    load_nbytes: int
    backward_needs_weights: bool
    source: Source

    def weight_modes(self) -> tuple[WeightMode, ...]:
        return tuple(self.forward)

    def gradient_modes(self, weight: WeightMode) -> tuple[GradientMode, ...]:
        return tuple(mode for mode in GradientMode if (weight, mode) in self.backward)


def costs(
    workload: Workload, machine: Machine, profile: Profile | None = None, *, exact: bool = True
) -> tuple[LayerCost, ...]:
    """What every layer costs.

    Parameters
    ----------
    workload : Workload
    machine : Machine
    profile : Profile, optional
        Layers that it has not, and ways that it did not measure, go by formula.
    exact : bool
        Leave out modes whose results differ from the plain run's in a bit.
    """
    return tuple(
        _Pricing(layer, workload, machine, None if profile is None else profile.layer(layer.name), exact).price()
        for layer in workload.layers
    )


class _Pricing:
    """One layer's costs as they are put together."""

    def __init__(
        self, layer: LayerSpec, workload: Workload, machine: Machine, profile: LayerProfile | None, exact: bool
    ) -> None:
        self._layer = layer
        self._machine = machine
        self._profile = profile
        self._exact = exact
        self._tokens = workload.tokens
        self._fp32 = workload.dtype == "float32"
        self._itemsize = ITEMSIZE[workload.dtype]
        self._shared = any(other.borrows == layer.name for other in workload.layers)
        self._measured = 0
        self._guessed = 0
        self._nbytes = layer.weight_nbytes
        if layer.borrows is not None:
            self._nbytes = workload.layers[workload.index[layer.borrows]].weight_nbytes

    def price(self) -> LayerCost:
        """The layer's costs in all modes that it may have."""
        modes = [mode for mode in WeightMode if self._may(mode)]
        forward = {mode: self._forward(mode, Phase.FORWARD) for mode in modes}
        recompute = {mode: self._forward(mode, Phase.RECOMPUTE) for mode in modes}
        backward = {
            (mode, gradient): self._backward(mode, gradient)
            for mode in modes
            for gradient in GradientMode
            if gradient is GradientMode.BUFFER or self._may_write_home()
        }
        source = Source.BOTH if self._measured and self._guessed else Source.FORMULA
        return LayerCost(
            forward,
            recompute,
            backward,
            self._layer.weight_nbytes,
            self._layer.kind is not LayerKind.EMBEDDING,
            Source.PROFILE if self._measured and not self._guessed else source,
        )

    # -- what is allowed ----------------------------------------------------------------------------------
    def _may(self, mode: WeightMode) -> bool:
        if mode is WeightMode.RING:
            products = self._layer.kind in (LayerKind.LINEAR, LayerKind.BLOCK, LayerKind.HEAD)
            return products and self._is_exact(WeightPlace.RING, otherwise=False)
        if mode is WeightMode.DHA_THEN_LOAD and self._layer.kind is LayerKind.EMBEDDING:
            return False  # its backward needs no weights: it would be DHA
        return not mode.reads_host or self._is_exact(WeightPlace.HOST, otherwise=True)

    def _may_write_home(self) -> bool:
        """Each element once, in whole lines, and nothing is added to: so not what several layers add to."""
        if not self._layer.gradient_nbytes or self._shared:
            return False
        timing = self._find(Phase.BACKWARD, WeightPlace.DEVICE, GradientPlace.HOST)
        return not self._exact or timing is None or timing.exact is not False

    def _is_exact(self, place: WeightPlace, *, otherwise: bool) -> bool:
        """Whether reading the weights there changes no bit: as measured, else as the kernels let expect."""
        if not self._exact:
            return True
        timing = self._find(Phase.FORWARD, place)
        return otherwise if timing is None or timing.exact is None else timing.exact

    # -- times --------------------------------------------------------------------------------------------
    def _forward(self, mode: WeightMode, phase: Phase) -> Work:
        if mode is WeightMode.DHA_THEN_LOAD:
            mode = WeightMode.DHA if phase is Phase.FORWARD else WeightMode.STREAM
        seconds = self._seconds(phase)
        if mode is WeightMode.RING:
            return self._in_ring(seconds, self._timing(phase, WeightPlace.RING))
        if mode is not WeightMode.DHA:
            return Work(seconds)
        return self._over_link(seconds, self._timing(phase, WeightPlace.HOST), self._read_nbytes())

    def _backward(self, mode: WeightMode, gradient: GradientMode) -> Work:
        seconds = self._seconds(Phase.BACKWARD)
        work = Work(seconds)
        if mode is WeightMode.RING:
            work = self._in_ring(seconds, self._timing(Phase.BACKWARD, WeightPlace.RING))
        elif mode is WeightMode.DHA and self._layer.kind is not LayerKind.EMBEDDING:
            measured = self._timing(Phase.BACKWARD, WeightPlace.HOST)
            work = self._over_link(seconds, measured, self._read_nbytes())
        if gradient is GradientMode.BUFFER:
            return work
        written = self._written_nbytes()
        timing = self._find(Phase.BACKWARD, WeightPlace.DEVICE, GradientPlace.HOST)
        more = -(-written // PANEL) * self._machine.launch  # each panel of it is a product and a copy of its own
        if timing is not None:
            written = timing.seconds * self._machine.host_writes if timing.seconds > seconds else 0.0
            more = 0.0
        return Work(work.seconds + more, work.read_nbytes, written, work.panel_nbytes)

    def _seconds(self, phase: Phase) -> float:
        """With everything in device memory."""
        timing = self._find(phase)
        if timing is None and phase is Phase.RECOMPUTE:
            timing = self._find(Phase.FORWARD)
        if timing is not None:
            self._measured += 1
            return timing.seconds
        self._guessed += 1
        layer, machine = self._layer, self._machine
        times = 2 if phase is Phase.BACKWARD and not layer.frozen else 1
        computing = times * layer.flops / (machine.matmul / (8 if self._fp32 else 1))
        moving = (times * layer.traffic_nbytes + self._weight_traffic(phase)) / machine.device_memory
        return max(computing + moving, times * layer.kernels * machine.launch)

    def _weight_traffic(self, phase: Phase) -> int:
        """Bytes of device memory that weights and gradients are, beside what is fitted with a block's work."""
        if self._layer.kind is LayerKind.EMBEDDING:
            return self._layer.gradient_nbytes if phase is Phase.BACKWARD else 0
        return 0

    def _read_nbytes(self) -> float:
        """Of host memory, for one forward or backward that reads the weights there."""
        layer = self._layer
        if layer.kind is LayerKind.EMBEDDING:
            return float(min(self._tokens * self._row_nbytes(), self._nbytes))
        if layer.kind is LayerKind.NORM:
            return self._nbytes * max(1.0, NORM_READS * self._tokens)
        return self._nbytes * max(1.0, self._tokens / self._machine.read_again_tokens)

    def _written_nbytes(self) -> float:
        """Of host memory, for a gradient: of an embedding the rows used, in this step and in the one before."""
        layer = self._layer
        if layer.kind is LayerKind.EMBEDDING:
            return float(min(2 * self._tokens * self._row_nbytes(), layer.gradient_nbytes))
        return float(layer.gradient_nbytes)

    def _row_nbytes(self) -> int:
        return -(-self._layer.shapes[0][-1] * self._itemsize // LINE) * LINE

    def _over_link(self, seconds: float, measured: Timing | None, nbytes: float) -> Work:
        if measured is not None:
            nbytes = measured.seconds * self._machine.host_reads if measured.seconds > seconds else 0.0
        return Work(seconds, read_nbytes=nbytes)

    def _in_ring(self, seconds: float, measured: Timing | None) -> Work:
        """One matrix product per panel; the first panels come while the layer before computes."""
        if measured is not None:
            return Work(max(seconds, measured.seconds), panel_nbytes=float(self._nbytes))
        machine, panels = self._machine, cut_panels(self._nbytes, PANEL)
        computing = seconds + len(panels) * machine.launch
        _, ended = ring_ends(panels, PANELS, machine.to_device, computing, latency=machine.copy_latency)
        first = machine.copy_latency + panels[0] / machine.to_device
        return Work(max(computing, ended - first), panel_nbytes=float(self._nbytes))

    def _timing(self, phase: Phase, place: WeightPlace) -> Timing | None:
        timing = self._find(phase, place)
        if timing is None and phase is Phase.RECOMPUTE:
            timing = self._find(Phase.FORWARD, place)
        return timing

    def _find(
        self,
        phase: Phase,
        weights: WeightPlace = WeightPlace.DEVICE,
        gradients: GradientPlace = GradientPlace.DEVICE,
    ) -> Timing | None:
        return None if self._profile is None else self._profile.find(phase, weights, gradients)


def ring_nbytes(layer: LayerSpec) -> int:
    """Device memory of the ring through which such a layer's weights pass."""
    return PANELS * min(PANEL, layer.largest_nbytes)


def outgoing_nbytes(layer: LayerSpec) -> int:
    """Device memory of the ring in which such a layer's gradients are made panel by panel, to be written home."""
    return OUTGOING * min(PANEL, layer.largest_nbytes)


def update_nbytes(layer: LayerSpec, *, weights: bool = True) -> tuple[int, int]:
    """Bytes to the device and from it when the layer's state is streamed, with its weights if they go home too."""
    back = layer.state_nbytes + (layer.weight_nbytes if weights else 0)
    return layer.state_nbytes + layer.gradient_nbytes, back


def cpu_update_nbytes(layer: LayerSpec) -> int:
    """Host memory traffic of the layer's update by the CPU."""
    return 2 * layer.state_nbytes + layer.gradient_nbytes + layer.weight_nbytes
