"""The end of a runtime: model and optimizer are ordinary objects again, and nothing is held any more."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .parallel import WholeState
    from .runtime import Runtime


def close(runtime: Runtime) -> None:
    """Release every part of a runtime, even if another fails; the first failure is raised at the end."""
    if runtime.autopilot is not None:
        runtime.autopilot.stop("the model was restored")
    with contextlib.ExitStack() as last_to_first:
        if runtime.ranks is not None:
            last_to_first.callback(runtime.ranks.close)
        if runtime.own_stream is not None:
            last_to_first.callback(runtime.own_stream.close)
        last_to_first.callback(runtime.arena.close)
        last_to_first.callback(runtime.memory.budget.release)
        last_to_first.callback(runtime.memory.engine.close)
        last_to_first.callback(runtime.memory.space.close)
        if runtime.ranks is not None:
            last_to_first.callback(_own_state, runtime)
        last_to_first.callback(runtime.patch.restore)
        if runtime.whole is not None:
            last_to_first.callback(_gather_state, runtime, runtime.whole)
        last_to_first.callback(_hand_back, runtime)
        last_to_first.callback(runtime.drop_device_copies)
        last_to_first.callback(runtime.drain)
        last_to_first.callback(runtime.guards.detach)
        last_to_first.callback(runtime.gradients.detach)
        last_to_first.callback(runtime.dispatch.restore)
        last_to_first.callback(runtime.stream().synchronize)
        last_to_first.callback(runtime.gradients.end_use)
        last_to_first.callback(runtime.scopes.detach)
        last_to_first.callback(runtime.updates.close)
        last_to_first.callback(runtime.step_updates.skip)
        last_to_first.callback(runtime.patch.adopt_replaced)
        last_to_first.callback(runtime.synchronize)


@torch.no_grad()
def _hand_back(runtime: Runtime) -> None:
    """Make the parameters tensors over their host pages, which live on as long as any of them does."""
    for parameter, (layer, index) in runtime.home.items():
        gradient, parameter.grad = parameter.grad, None
        parameter.data = _unshared(runtime, layer.on_host("weight", index, runtime.arena))
        if gradient is not None:
            at_home = gradient is layer.gradients[index]
            plain = layer.on_host("gradient", index, runtime.arena) if at_home else gradient.to("cpu")
            parameter.grad = _unshared(runtime, plain).to(parameter.dtype)


def _unshared(runtime: Runtime, tensor: torch.Tensor) -> torch.Tensor:
    """Memory of this process alone, where other ranks have the tensor's too."""
    return tensor if runtime.ranks is None else tensor.clone()


def _gather_state(runtime: Runtime, whole: WholeState) -> None:
    whole.begin("restore()")
    runtime.patch.gather(whole.whole)
    whole.begin("the end of restore()")  # nobody leaves before all have what they came for


def _own_state(runtime: Runtime) -> None:
    for state in runtime.patch.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                state[key] = _unshared(runtime, value)
