"""What users write to parameters between steps: other copies of a weight, and its master, follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ...errors import UnsupportedError
from .layer import LayerState

if TYPE_CHECKING:
    from .runtime import Runtime


class UserWrites:
    """Takes over weights that were written to in place, or loaded.

    Parameters
    ----------
    runtime : Runtime
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def check(self) -> None:
        """Take over every weight that was written to since."""
        for layer in self._runtime.layers:
            for index, parameter in enumerate(layer.parameters):
                if parameter._version != layer.parameter_versions[index]:
                    self.changed(layer, index)

    def changed(self, layer: LayerState, index: int) -> None:
        """A parameter was written to in place, not by a state dict that all ranks load."""
        if self._runtime.ranks is not None:
            self._runtime.ranks.refuse_write(layer.layout.slots[index].spec.name)
        self._adopt(layer, index)

    def loaded(self, module: nn.Module) -> None:
        """A state dict was loaded into a module's own parameters."""
        for parameter in module.parameters(recurse=False):
            self._adopt(*self._runtime.home[parameter])

    @torch.no_grad()
    def _adopt(self, layer: LayerState, index: int) -> None:
        """A parameter was written to in place: the host pages have the new weight, other copies get it."""
        runtime = self._runtime
        runtime.settle_home(layer)
        runtime.step_updates.settle(layer)
        runtime.stream().synchronize()
        runtime.memory.panels.forget()
        layer.parameter_versions[index] = layer.parameters[index]._version
        if not runtime.memory.cache.is_pinned(layer.index):
            runtime.memory.cache.evict(layer.index)
        elif layer.current is not None:
            layer.current.parameters[index].copy_(layer.host_weights[index])
        spec = layer.layout.slots[index].spec
        if spec.updated and spec.master:
            layer.put_state(index, "master", layer.in_shape(index, layer.cpu_weight(index)))

    def refuse_unknown_gradients(self) -> None:
        """Refuse gradients of parameters that were frozen.

        Raises
        ------
        UnsupportedError
        """
        for parameter, (layer, index) in self._runtime.home.items():
            if parameter.grad is not None and not layer.layout.slots[index].spec.trainable:
                name = layer.layout.slots[index].spec.name
                raise UnsupportedError(
                    f"{name} has a gradient but was frozen when the model was offloaded; "
                    "set requires_grad before offload()"
                )
