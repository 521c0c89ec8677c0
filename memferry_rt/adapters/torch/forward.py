"""Forward hooks: while a module that owns weights runs, its parameters are views of device memory.

At every other time a parameter is a view of the host pages, so that whoever reads it unplanned reads what is
right, only more slowly.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.utils.hooks import RemovableHandle

from ...errors import UnsupportedError
from ...plan.modes import WeightMode
from .layer import DeviceViews, LayerState
from .saved import SavedWeights
from .support import Support, has_own_forward, support_of

R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Scope:
    """What a module's forward needs: parameters, the layers they lie in, and how the module may read them."""

    parameters: tuple[tuple[nn.Parameter, LayerState, int], ...]
    layers: tuple[LayerState, ...]
    support: Support

    def nbytes_in(self, layer: LayerState, module: nn.Module, args: Any) -> int:
        """Bytes of a layer that a call of the module reads, each as often as it is asked for."""
        own = [(p, index) for p, owner, index in self.parameters if owner is layer]
        if layer.plan.weight is WeightMode.RING and isinstance(module, nn.Linear) and has_own_forward(module):
            own = [(p, index) for p, index in own if p is not module.weight]  # the operator counts it
        if isinstance(module, nn.Embedding) and args and isinstance(args[0], torch.Tensor):
            return args[0].numel() * module.embedding_dim * module.weight.element_size()
        return sum(layer.layout.slots[index].spec.nbytes for _, index in own)


@dataclass(frozen=True, eq=False)
class _Open:
    """A scope whose forward runs: whether it has pushed hooks, and the layers that it has loaded."""

    scope: Scope
    pushed: bool
    loaded: tuple[LayerState, ...]


class ForwardScopes:
    """Opens a module's scope when its forward begins and closes it when that ends, however it ends.

    Parameters
    ----------
    load : callable
        Brings a layer into device memory for the current stream, pins it, and gives its views; or None where such
        a module reads it in host memory, which is the current stream's to read then.
    unpin : callable
        Ends the pin of a layer.
    settle : callable
        Blocks until a layer's update is over.
    changed : callable
        Told which parameter was written to in place since it was last seen.
    saved : SavedWeights
    """

    def __init__(
        self,
        *,
        load: Callable[[LayerState, Support], DeviceViews | None],
        unpin: Callable[[LayerState], None],
        settle: Callable[[LayerState], None],
        changed: Callable[[LayerState, int], None],
        saved: SavedWeights,
    ) -> None:
        self._load = load
        self._unpin = unpin
        self._settle = settle
        self._changed = changed
        self._saved = saved
        self._open: list[_Open] = []
        self._handles: list[RemovableHandle] = []

    def attach(self, module: nn.Module, scope: Scope) -> None:
        @not_compiled
        def before(module: nn.Module, args: Any) -> None:
            self._enter(scope, module, args)

        @not_compiled
        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._exit(scope)

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after, always_call=True))

    def attach_in_place(self, module: nn.Module, scope: Scope) -> None:
        """A module that reads its parameters where they are at home only waits until they are new."""

        @not_compiled
        def before(module: nn.Module, args: Any) -> None:
            for layer in scope.layers:
                self._settle(layer)
                layer.traffic.read_in_place += scope.nbytes_in(layer, module, args)
            self._notice(scope)

        self._handles.append(module.register_forward_pre_hook(before))

    def attach_root(self, model: nn.Module, begin: Callable[[], None]) -> None:
        """A new forward of the whole model clears what an interrupted one has left open, and tells `begin`."""

        @not_compiled
        def before(module: nn.Module, args: Any) -> None:
            _let_compiler_see_hooks()
            self.reset()
            begin()

        self._handles.append(model.register_forward_pre_hook(before, prepend=True))

    def reset(self) -> None:
        """Close every scope that is still open: their forwards are over."""
        while self._open:
            self._close(self._open.pop())

    def detach(self) -> None:
        self.reset()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, scope: Scope, module: nn.Module, args: Any) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UnsupportedError(
                "torch.func transforms (grad, vmap, jvp, ...) of an offloaded model are not supported: weights "
                "move under them; use backward(), or call memferry_rt.restore(model) first"
            )
        self._notice(scope)
        loaded: dict[LayerState, DeviceViews] = {}
        try:
            for layer in scope.layers:
                views = self._load(layer, scope.support)
                if views is None:
                    layer.traffic.read_in_place += scope.nbytes_in(layer, module, args)
                else:
                    loaded[layer] = views
            pushed = torch.is_grad_enabled() and self._saved.push()
        except BaseException:
            for layer in loaded:
                self._unpin(layer)
            raise
        for parameter, layer, index in scope.parameters:
            places = loaded[layer].parameters if layer in loaded else layer.host_weights
            parameter.data = places[index]
        self._open.append(_Open(scope, pushed, tuple(loaded)))

    def _notice(self, scope: Scope) -> None:
        """Weights that the user has written to in place since they were last seen."""
        for parameter, layer, index in scope.parameters:
            if parameter._version != layer.parameter_versions[index]:
                self._changed(layer, index)

    def _exit(self, scope: Scope) -> None:
        if any(entry.scope is scope for entry in self._open):
            while True:
                entry = self._open.pop()
                self._close(entry)
                if entry.scope is scope:
                    return

    def _close(self, entry: _Open) -> None:
        if entry.pushed:
            self._saved.pop()
        for parameter, layer, index in entry.scope.parameters:
            if parameter._version != layer.parameter_versions[index]:  # its own forward has written to it
                layer.host_weights[index].copy_(parameter.data)
                self._changed(layer, index)
            parameter.data = layer.host_weights[index]
        for layer in entry.loaded:
            self._unpin(layer)


def scope_of(
    module: nn.Module, parameters: Iterable[nn.Parameter], home: dict[nn.Parameter, tuple[LayerState, int]]
) -> Scope:
    """The scope of a module that reads these parameters."""
    places = tuple((parameter, *home[parameter]) for parameter in parameters)
    return Scope(places, tuple(dict.fromkeys(layer for _, layer, _ in places)), support_of(module))


def _let_compiler_see_hooks() -> None:
    """What was compiled for a module without hooks must not run for one of the same class that has ours.

    It would read weights at home, and perhaps before they are new.  By default `torch.compile` does not look.
    """
    compiler: Any = sys.modules.get("torch._dynamo")  # not imported here: that takes seconds
    if compiler is not None and compiler.config.skip_nnmodule_hook_guards:
        compiler.config.skip_nnmodule_hook_guards = False
        compiler.reset_code_caches()


def not_compiled(hook: Callable[..., R]) -> Callable[..., R]:
    """Keep `torch.compile` out of a hook or a forward and all that it calls, as `torch.compiler.disable` does.

    Without importing the compiler, which takes seconds.
    """

    @functools.wraps(hook)
    def alone(*args: Any, **named: Any) -> R:
        before = set_eval_frame(None)
        try:
            return hook(*args, **named)
        finally:
            set_eval_frame(before)

    alone._torchdynamo_disable = True  # type: ignore[attr-defined]
    return alone
