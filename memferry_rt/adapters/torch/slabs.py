"""Training state in a runtime's slabs, on either side, opened for whoever saves or loads it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from memferry_allocator import Driver, Mode, Place, ShadowBuffer, Stream

from .layer import LayerState
from .optimizer import Whole
from .state import OptimizerState, ParameterState, plain_name


@dataclass(frozen=True)
class HeldState:
    """See `PartialState`; of one parameter.

    Attributes
    ----------
    reader : callable
        Puts state of this layer, index and name together.
    """

    layer: LayerState
    index: int
    reader: Whole

    @property
    def names(self) -> frozenset[str]:
        slot = self.layer.layout.slots[self.index]
        return frozenset(slot.state) | ({"master"} if slot.master >= 0 else frozenset())

    def whole(self, name: str) -> torch.Tensor:
        return self.reader(self.layer, self.index, name)

    def put(self, name: str, value: torch.Tensor) -> None:
        self.layer.put_state(self.index, name, value)


class SlabAccess:
    """Opens all training state where it is at home.

    Parameters
    ----------
    model : nn.Module
    layers : sequence of LayerState
    home : mapping of Parameter to (LayerState, index)
    weights : ShadowBuffer
        One partition for every layer.
    driver : Driver
    stream : callable
        The stream on which the calling thread's kernels run.
    state_of : callable
        A parameter's part of the optimizer's state, live.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[LayerState],
        home: Mapping[nn.Parameter, tuple[LayerState, int]],
        weights: ShadowBuffer,
        driver: Driver,
        *,
        stream: Callable[[], Stream],
        state_of: Callable[[nn.Parameter], OptimizerState],
    ) -> None:
        self._model = model
        self._layers = layers
        self._home = home
        self._weights = weights
        self._driver = driver
        self._stream = stream
        self._optimizer_state = state_of

    @contextlib.contextmanager
    def open(self, *, write: bool, whole: Whole | None) -> Iterator[list[ParameterState]]:
        """All state as live tensors, in the order of ``model.named_parameters()``.

        What `whole` puts together is not all on this host; None where everything is.  Optimizer state that is
        resident is device memory, in the order of the calling thread's stream.

        No update may be under way, and with `write` no layer may have a device copy in use.
        """
        with contextlib.ExitStack() as views:
            for layer in self._layers:
                self._acquire(layer, views, write=write)
            try:
                parameters = self._model.named_parameters()
                yield [self._state_of(name, parameter, whole) for name, parameter in parameters]
            finally:
                if write:
                    for layer in self._layers:
                        layer.touch(range(len(layer.parameters)))

    def _acquire(self, layer: LayerState, views: contextlib.ExitStack, *, write: bool) -> None:
        view = self._weights[layer.index].acquire(Place.HOST, Mode.READ_WRITE if write else Mode.READ)
        views.callback(view.release)
        label = f"state of {layer.name}"
        if layer.residence is not None:
            spans = [layer.residence.state.span]
            state = self._driver.launch(self._stream(), reads=spans, writes=spans if write else [], label=label)
        elif layer.state_span.nbytes:
            spans = [layer.state_span]
            state = self._driver.host_access(reads=spans, writes=spans if write else [], label=label)
        else:
            return
        views.callback(state.end)

    def _state_of(self, name: str, parameter: nn.Parameter, whole: Whole | None) -> ParameterState:
        layer, index = self._home[parameter]
        spec = layer.layout.slots[index].spec
        weight = layer.in_shape(index, layer.cpu_weight(index))
        if not spec.updated:
            return ParameterState(plain_name(name), parameter, weight, None, None)
        master = layer.in_shape(index, layer.state(index, "master")) if spec.master else None
        partial = None if whole is None else HeldState(layer, index, whole)
        return ParameterState(
            plain_name(name), parameter, weight, master, self._optimizer_state(parameter), partial
        )
