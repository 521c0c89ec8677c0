"""What users do to models: passed through where it is right, refused with a reason where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import UnsupportedError


class ModelGuards:
    """Stands before the methods of a model that would move, copy, load or save its weights.

    Parameters
    ----------
    settle : callable
        Blocks until all updates under way are done.
    loaded : callable
        Told when weights of a module were loaded.
    """

    def __init__(self, settle: Callable[[], None], loaded: Callable[[nn.Module], None]) -> None:
        self._settle = settle
        self._loaded = loaded
        self._guarded: list[tuple[nn.Module, str]] = []
        self._handles: list[RemovableHandle] = []

    def attach(self, module: nn.Module) -> None:
        for name, guard in (
            ("_apply", _guard_apply(module)),
            ("share_memory", _refuse("share_memory()", "its weights are the runtime's")),
            (
                "__deepcopy__",
                _refuse("copy.deepcopy", "the copy would drive the same runtime; use state_dict()"),
            ),
            ("__reduce_ex__", _refuse("pickling", "save its state_dict() instead")),
            ("zero_grad", self._zero_grad(module)),
        ):
            self._set(module, name, guard)
        self._handles += [
            module.register_state_dict_pre_hook(lambda *_: self._settle()),
            module.register_load_state_dict_pre_hook(self._before_load),
            module.register_load_state_dict_post_hook(lambda module, _: self._loaded(module)),
        ]

    def attach_root(self, model: nn.Module) -> None:
        self._set(
            model,
            "compile",
            _refuse("compile() of the whole model", "compile its blocks instead, before or after offload()"),
        )

    def detach(self) -> None:
        for module, name in self._guarded:
            module.__dict__.pop(name, None)
        for handle in self._handles:
            handle.remove()
        self._guarded.clear()
        self._handles.clear()

    def _set(self, module: nn.Module, name: str, guard: Callable[..., Any]) -> None:
        module.__dict__[name] = guard
        self._guarded.append((module, name))

    def _zero_grad(self, module: nn.Module) -> Callable[..., None]:
        def zero_grad(set_to_none: bool = True) -> None:
            if not set_to_none:
                self._settle()
            type(module).zero_grad(module, set_to_none)

        return zero_grad

    def _before_load(self, module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise UnsupportedError(
                "load_state_dict(assign=True) would replace the parameters of an offloaded model; leave assign out"
            )
        self._settle()


def _refuse(what: str, why: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(f"{what} of an offloaded model: {why}, or call memferry_rt.restore(model) first")

    return refuse


def _guard_apply(module: nn.Module) -> Callable[..., nn.Module]:
    """`_apply` is under `.to()`, `.half()`, `.cuda()` and their like: allowed where it changes no parameter."""

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for name, parameter in module.named_parameters():
            before = parameter.data
            after = fn(before)
            if after.dtype != before.dtype or after.device != before.device:
                raise UnsupportedError(
                    f"{name} of an offloaded model cannot go from {before.dtype} on {before.device} to "
                    f"{after.dtype} on {after.device}; convert the model before offload(), or call "
                    "memferry_rt.restore(model) first"
                )
        for owner in module.modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[key] = fn(buffer)
        return module

    return apply
