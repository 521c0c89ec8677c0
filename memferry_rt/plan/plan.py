"""A plan: what every layer does, how both memories are shared, and the iteration that is predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

from memferry_allocator import format_size

from ..errors import PlanError
from .choice import Choice, LayerChoice
from .cost import Source
from .model import Workload, fingerprint_of
from .modes import GradientMode, LayerModes, StateMode, WeightMode
from .profile import LayerKind

SCHEMA, VERSION = "memferry.plan", 2

NEW = {"ranks": 2}  # fields that the first version had not


@dataclass(frozen=True)
class LayerPlan:
    """One layer: what is decided, and what that is predicted to take.  Times are seconds, each alone.

    Attributes
    ----------
    recompute : bool
        Whether backward repeats its forward.
    resident_nbytes : int
        Of streamed weights, the first partitions that stay on the device.
    device_nbytes : int
        Device memory that it has for itself: weights, state and gradients that stay.
    forward_seconds, backward_seconds : float
        Backward has the forward that it repeats.
    load_seconds : float
        Of one copy of its weights to the device; 0 where they are not copied.
    update_seconds : float
        From the end of backward until its weights are new, in the predicted iteration.
    source : Source
        Where these times are from.
    """

    name: str
    kind: LayerKind
    parameters: int
    weight_nbytes: int
    gradient_nbytes: int
    state_nbytes: int
    weight: WeightMode
    gradient: GradientMode
    state: StateMode
    recompute: bool
    resident_nbytes: int
    device_nbytes: int
    forward_seconds: float
    backward_seconds: float
    load_seconds: float
    update_seconds: float
    source: Source

    @property
    def modes(self) -> LayerModes:
        return LayerModes(self.weight, self.gradient, self.state)


@dataclass(frozen=True)
class Plan:
    """Every layer's modes, how both memories are shared, and the predicted iteration.

    Attributes
    ----------
    model, fingerprint : str
        The model's name, and what its layers must be like.
    device : str
        The device that times are predicted for.
    device_memory, host_memory : int
        The budgets in bytes; 0 is no limit of host memory.
    torch_nbytes, pool_nbytes : int
        What torch is left, and what the runtime has.
    ring_nbytes, stream_nbytes, panel_nbytes, pinned_nbytes, resident_nbytes, slab_nbytes : int
        Parts of the pool: for gradients that leave, state that streams through, weights in panels, weights that
        stay, state and gradients that stay, and weights that come and go.
    spare_slabs : int
    host_nbytes : int
        Host memory that is registered.
    seconds : float
        Of the predicted iteration.
    device_peak_nbytes : int
        The most device memory at any moment of it, torch's live bytes in place of what it reserves.
    arms : mapping of str to float
        Predicted seconds of other plans, by what they are.
    notes : tuple of str
        What the planner found that its user should know.
    ranks : int
        That train together; every one follows the same plan.  Since version 2.
    """

    model: str
    fingerprint: str
    device: str
    dtype: str
    micro_batch: int
    sequence: int
    numerics: str
    device_memory: int
    host_memory: int
    layers: tuple[LayerPlan, ...]
    torch_nbytes: int
    pool_nbytes: int
    ring_nbytes: int
    stream_nbytes: int
    panel_nbytes: int
    pinned_nbytes: int
    resident_nbytes: int
    slab_nbytes: int
    spare_slabs: int
    host_nbytes: int
    seconds: float
    device_peak_nbytes: int
    arms: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise PlanError(f"ranks: {self.ranks} is not 1 or more")
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, (int, float)) and value < 0:
                raise PlanError(f"{each.name}: {value} is less than 0")
        if not self.layers:
            raise PlanError("layers: a plan has at least one")
        names = Counter(layer.name for layer in self.layers)
        name, times = names.most_common(1)[0]
        if times > 1:
            raise PlanError(f"layers: {name!r} is there {times} times")
        if not self.seconds:
            raise PlanError("seconds: an iteration takes more than 0")
        for layer in self.layers:
            if layer.state is StateMode.RESIDENT and layer.weight is not WeightMode.RESIDENT:
                raise PlanError(
                    f"layers: the state of {layer.name} is resident and its weights are {layer.weight.value}; "
                    "state that stays on the device needs weights that do"
                )
        if self.device_peak_nbytes > self.device_memory:
            raise PlanError(
                f"device_peak_nbytes: {format_size(self.device_peak_nbytes)} is more than device_memory, "
                f"{format_size(self.device_memory)}"
            )

    @cached_property
    def _by_name(self) -> dict[str, LayerPlan]:
        return {layer.name: layer for layer in self.layers}

    def layer(self, name: str) -> LayerPlan:
        """The layer of this name.

        Raises
        ------
        PlanError
            There is none.
        """
        if name not in self._by_name:
            raise PlanError(
                f"the plan has no layer {name!r}; it has {', '.join(list(self._by_name)[:4])} and so on"
            )
        return self._by_name[name]

    @property
    def modes(self) -> dict[str, LayerModes]:
        """The modes of every layer that has weights of its own, as the runtime takes them."""
        return {layer.name: layer.modes for layer in self.layers if layer.parameters}

    @property
    def choice(self) -> Choice:
        """What is decided, for the simulator."""
        return Choice(
            tuple(
                LayerChoice(each.weight, each.gradient, each.state, each.recompute, each.resident_nbytes)
                for each in self.layers
            ),
            self.spare_slabs,
        )

    def check(self, workload: Workload | None = None, *, device: str | None = None) -> None:
        """Refuse it for another model or device.

        Raises
        ------
        PlanError
            It is for another one; plans do not carry over.
        """
        if workload is not None:
            self.check_model(workload.dtype, workload.sizes, workload.name)
        if workload is not None and workload.tokens != self.micro_batch * self.sequence:
            raise PlanError(
                f"the plan is for micro-batches of {self.micro_batch} x {self.sequence} tokens, and these have "
                f"{workload.micro_batch} x {workload.sequence}; make a plan for them"
            )
        if device is not None and device != self.device:
            raise PlanError(f"the plan is for {self.device}, and this is {device}; make a plan for it")

    def check_ranks(self, ranks: int) -> None:
        """Refuse it for another number of ranks: what each loads and updates would be something else.

        Raises
        ------
        PlanError
        """
        if ranks != self.ranks:
            raise PlanError(
                f"the plan is for {_ranks(self.ranks)}, and here {_ranks(ranks)} trains; make one with "
                f"--ranks {ranks}"
            )

    def check_model(self, dtype: str, sizes: Mapping[str, Sequence[int]], name: str = "another model") -> None:
        """Refuse it for a model whose layers have parameters of other sizes, in elements, or another dtype.

        Raises
        ------
        PlanError
            It says what differs first.
        """
        if fingerprint_of(dtype, sizes) == self.fingerprint:
            return
        found = self._difference(dtype, sizes)
        raise PlanError(
            f"the plan is for {self.model} ({self.fingerprint}), and this is {name}: {found}; make a plan for "
            "this model"
        )

    def _difference(self, dtype: str, sizes: Mapping[str, Sequence[int]]) -> str:
        if dtype != self.dtype:
            return f"the plan's dtype is {self.dtype}, and this is {dtype}"
        mine = {layer.name: layer.parameters for layer in self.layers if layer.parameters}
        alone = [layer for layer in (*mine, *sizes) if layer not in mine or layer not in sizes]
        if alone:
            layer = alone[0]
            return f"layer {layer!r} is in {'the plan' if layer in mine else 'the model'} alone"
        for layer, parameters in mine.items():
            if parameters != sum(sizes[layer]):
                return f"layer {layer!r} has {parameters} parameters in the plan, and {sum(sizes[layer])} here"
        return "other shapes of parameters"


def _ranks(count: int) -> str:
    return "one rank" if count == 1 else f"a group of {count} ranks"
