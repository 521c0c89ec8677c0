"""Updates by the user's own class, one parameter at a time: what serves any optimizer without a native kernel.

Slower than the kernels, and the same bits as that class on the CPU with fp32 parameters and ``foreach=False``.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import UnsupportedError

# What was put on the user's object by a user, a scheduler, a scaler or the runtime.
_OF_THE_USER = (
    *("step", "zero_grad", "load_state_dict", "add_param_group", "grad_scale", "found_inf"),
    *("grad_norm", "skipped_steps", "_step_supports_amp_scaling", "_opt_called"),
)
_NOT_HERE = ("capturable", "differentiable")


def bare(optimizer: Optimizer) -> Optimizer:
    """An object of the optimizer's class with none of its parameters, state, hooks and patches."""
    mine: Optimizer = object.__new__(type(optimizer))
    mine.__dict__.update(optimizer.__dict__)
    for name in _OF_THE_USER:
        mine.__dict__.pop(name, None)
    for name in [name for name in mine.__dict__ if name.endswith("_hooks")]:
        mine.__dict__[name] = collections.OrderedDict()
    mine.state = collections.defaultdict(dict)
    mine.param_groups = []
    return mine


def capture(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings as they are now, for an update that runs later.

    Raises
    ------
    UnsupportedError
        One has no counterpart.
    """
    for flag in _NOT_HERE:
        if group.get(flag):
            raise UnsupportedError(f"optimizer: {flag}=True is not supported; build the optimizer without it")
    captured = {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
    if "foreach" in captured:
        captured["foreach"] = False
    return captured


def step_alone(optimizer: Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """A step of a `bare` object over these groups, without anybody's hooks."""
    optimizer.param_groups = list(groups)
    step: Callable[[Optimizer], Any] = type(optimizer).step
    if getattr(step, "hooked", False):  # torch wraps it to run hooks, also those for all optimizers
        step = getattr(step, "__wrapped__", step)
    step(optimizer)


class ParameterUpdate:
    """The updates of one parameter.

    Parameters
    ----------
    optimizer : Optimizer
        Its class updates each parameter from that parameter's gradient and state alone, without a closure.  It is
        not changed, and not stepped.
    master : Tensor
        fp32, in the parameter's form; updated in place.
    """

    def __init__(self, optimizer: Optimizer, master: torch.Tensor) -> None:
        self._optimizer = bare(optimizer)
        self._parameter = nn.Parameter(master)

    @torch.no_grad()
    def run(
        self,
        gradient: torch.Tensor,
        settings: dict[str, Any],
        scale: float,
        weight: torch.Tensor | None,
        state: dict[str, Any],
        room: Mapping[str, torch.Tensor],
    ) -> None:
        """Update in place; may be called from any thread, but one at a time.

        Parameters
        ----------
        gradient : Tensor
            Of the parameter's shape and any floating dtype; only read.
        settings : dict
            Of `capture`.
        scale : float
            Multiplied into the gradient, in fp32.
        weight : Tensor or None
            Gets the new parameter rounded.
        state : dict
            The parameter's entry in ``optimizer.state``; the class makes what it lacks in its first step.
        room : mapping of str to Tensor
            fp32 tensors where state of these names goes; other state has memory of its own.
        """
        widened = gradient.to(torch.float32, copy=True)
        self._parameter.grad = widened if scale == 1.0 else widened.mul_(scale)
        self._optimizer.state[self._parameter] = state
        try:
            step_alone(self._optimizer, [{**settings, "params": [self._parameter]}])
        finally:
            self._parameter.grad = None
        for key, place in room.items():
            value = state.get(key)
            if value is not None and value is not place:
                place.copy_(value.detach())
                state[key] = place
        if weight is not None:
            weight.copy_(self._parameter)


def state_keys(optimizer: Optimizer, group: Mapping[str, Any], ndim: int) -> tuple[str, ...]:
    """The state that a parameter of so many dimensions has in its own form, and that needs room in a slab.

    Found by trying: steps of small parameters, from state like what there is already.

    Raises
    ------
    UnsupportedError
        The class cannot be stepped one parameter at a time, or not without arguments.
    """
    name = type(optimizer).__name__
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        try:
            together, apart = _Trial(optimizer, group, ndim), _Trial(optimizer, group, ndim)
            together.step(2)
            for number in range(2):
                apart.step(2, only=number)
        except UnsupportedError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"optimizer: {name} could not make a step of a parameter of {ndim} dimensions with a dense "
                f"gradient and without arguments ({type(error).__name__}: {error}); offloading needs an optimizer "
                "that can"
            ) from error
    if not together.same(apart):
        raise UnsupportedError(
            f"optimizer: {name} updates a parameter otherwise when others are updated with it, or at random; "
            "offloading needs one that updates each from its own gradient and state alone"
        )
    return together.keys()


class _Trial:
    """Two small parameters with state like that of a group's, and an object that steps them."""

    def __init__(self, optimizer: Optimizer, group: Mapping[str, Any], ndim: int) -> None:
        shape = (2, 3, *[1] * ndim)[: max(ndim, 1)]  # a scalar's state all has its form
        self._settings = capture(group)
        self._optimizer = bare(optimizer)
        self._optimizer.__dict__.update(_as_they_are(self._optimizer.__dict__))  # the user's are not to change
        generator = torch.Generator().manual_seed(1)
        draw = functools.partial(torch.randn, shape, generator=generator, dtype=torch.float32)
        self._parameters = [nn.Parameter(draw()) for _ in range(2)]
        for parameter in self._parameters:
            self._optimizer.state[parameter] = _example(optimizer, group, ndim, parameter)
        self._gradients = [[draw() for _ in range(2)] for _ in range(2)]

    def step(self, count: int, only: int | None = None) -> None:
        members = self._parameters if only is None else [self._parameters[only]]
        for number in range(count):
            for parameter, gradient in zip(self._parameters, self._gradients[number], strict=True):
                parameter.grad = gradient.clone()
            settings = {**self._settings, "params": members}
            before = _as_they_are(settings), _as_they_are(self._optimizer.__dict__)
            step_alone(self._optimizer, [settings])
            self._refuse_changes(settings, before[0], "its parameter groups")
            self._refuse_changes(self._optimizer.__dict__, before[1], "attributes of its own")

    def _refuse_changes(self, now: Mapping[str, Any], before: Mapping[str, Any], where: str) -> None:
        for key, value in _as_they_are(now).items():
            if key not in before or not _same(value, before[key]):
                raise UnsupportedError(
                    f"optimizer: {type(self._optimizer).__name__} keeps {key!r}, which changes with every step, "
                    f"in {where}; offloading needs one that keeps what it needs in the state of each parameter"
                )

    def same(self, other: _Trial) -> bool:
        return all(
            torch.equal(one.view(torch.int32), another.view(torch.int32))
            for one, another in zip(self._parameters, other._parameters, strict=True)
        )

    def keys(self) -> tuple[str, ...]:
        parameter = self._parameters[0]
        state = self._optimizer.state[parameter].items()
        return tuple(sorted(key for key, value in state if _in_the_form_of(parameter, value)))


def _example(optimizer: Optimizer, group: Mapping[str, Any], ndim: int, probe: torch.Tensor) -> dict[str, Any]:
    """State like that of a parameter that has some."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter)
        if state and parameter.ndim and parameter.ndim == max(ndim, 1):
            if any(isinstance(value, torch.Tensor) and value.is_meta for value in state.values()):
                continue
            return {
                key: torch.ones_like(probe) if _in_the_form_of(parameter, value) else copy.deepcopy(value)
                for key, value in state.items()
            }
    return {}


def _as_they_are(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What may not change in a step, for a comparison after it."""
    return {
        key: copy.copy(value) if isinstance(value, (list, dict, set)) else _unshared(value)
        for key, value in attributes.items()
        if key not in ("params", "param_groups", "state") and not key.startswith("_need_device")
    }


def _unshared(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)


def _in_the_form_of(parameter: torch.Tensor, value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape
