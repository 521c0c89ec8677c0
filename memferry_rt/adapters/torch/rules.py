"""Updates by optimizers without a native kernel: the user's own class, one parameter at a time, on slab views.

Slower than the kernels, and the same bits as that class on the CPU with fp32 parameters and ``foreach=False``.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import UnsupportedError

_OF_THE_USER = ("step", "zero_grad", "load_state_dict", "add_param_group")  # what was replaced on the object
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_NOT_HERE = ("capturable", "differentiable")


class UpdateRule:
    """How an optimizer updates one parameter.

    Parameters
    ----------
    optimizer : Optimizer
        Its class updates each parameter from that parameter's gradient and state alone, without a closure.  It is
        not changed, and not stepped.

    Raises
    ------
    UnsupportedError
        A step of it fails, or has a setting without a counterpart.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        for group in optimizer.param_groups:
            for flag in _NOT_HERE:
                if group.get(flag):
                    raise UnsupportedError(
                        f"optimizer: {flag}=True is not supported; build the optimizer without it"
                    )

    def state_keys(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The state that a parameter of `group` has in its own form, and that needs room in a slab.

        Found by one step of a parameter of four elements, from state like what there is already.
        """
        probe = nn.Parameter(torch.ones(2, 2, device="cpu", dtype=torch.float32))
        update = ParameterUpdate(self, probe.detach(), {}, self._example(group, probe))
        update.run(torch.ones_like(probe), self.capture(group), 1.0, None)
        keys = (key for key, value in update.state.items() if _in_the_form_of(probe, value))
        return tuple(sorted(keys))

    def _example(self, group: Mapping[str, Any], probe: torch.Tensor) -> dict[str, Any]:
        for parameter in group["params"]:
            if parameter.ndim and parameter in self._optimizer.state:  # a scalar's state all has its form
                return {
                    key: torch.ones_like(probe) if _in_the_form_of(parameter, value) else copy.deepcopy(value)
                    for key, value in self._optimizer.state[parameter].items()
                }
        return {}

    @staticmethod
    def capture(group: Mapping[str, Any]) -> dict[str, Any]:
        """A group's settings as they are now, for an update that runs later."""
        captured = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        captured.update({flag: False for flag in ("foreach", "fused") if flag in captured})
        return captured

    def bare(self) -> Optimizer:
        """An object of the optimizer's class with none of its parameters, state, hooks and patches."""
        mine: Optimizer = object.__new__(type(self._optimizer))
        mine.__dict__.update(self._optimizer.__dict__)
        for name in _OF_THE_USER:
            mine.__dict__.pop(name, None)
        for name in _HOOKS:
            mine.__dict__[name] = collections.OrderedDict()
        mine.state = collections.defaultdict(dict)
        mine.param_groups = []
        return mine


class ParameterUpdate:
    """The updates of one parameter.

    Parameters
    ----------
    rule : UpdateRule
    master : Tensor
        fp32, in the parameter's form; updated in place.
    room : mapping of str to Tensor
        fp32 tensors where the state of `UpdateRule.state_keys` goes; other state gets memory of its own.
    state : mapping, optional
        What the user's optimizer has of the parameter already; copied.

    Attributes
    ----------
    state : dict
        The optimizer's own, with tensors in `room`; the class makes what it lacks in its first step.
    """

    def __init__(
        self,
        rule: UpdateRule,
        master: torch.Tensor,
        room: Mapping[str, torch.Tensor],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._optimizer = rule.bare()
        self._parameter = nn.Parameter(master)
        self._room = room
        self.state: dict[str, Any] = self._optimizer.state[self._parameter]
        self.state.update(copy.deepcopy(dict(state or {})))
        self._settle()

    @torch.no_grad()
    def run(
        self, gradient: torch.Tensor, settings: dict[str, Any], scale: float, weight: torch.Tensor | None
    ) -> None:
        """Update in place; may be called from any thread, but one at a time.

        Parameters
        ----------
        gradient : Tensor
            Of the parameter's shape and any floating dtype; only read.
        settings : dict
            Of `UpdateRule.capture`.
        scale : float
            Multiplied into the gradient, in fp32.
        weight : Tensor or None
            Gets the new parameter rounded.
        """
        widened = gradient.to(torch.float32, copy=True)
        self._parameter.grad = widened if scale == 1.0 else widened.mul_(scale)
        self._optimizer.param_groups = [{**settings, "params": [self._parameter]}]
        try:
            type(self._optimizer).step(self._optimizer)
        except TypeError as error:
            raise UnsupportedError(
                f"optimizer: {type(self._optimizer).__name__} cannot be stepped without arguments ({error}); "
                "use one of torch.optim that needs no closure"
            ) from error
        finally:
            self._parameter.grad = None
        self._settle()
        if weight is not None:
            weight.copy_(self._parameter)

    def _settle(self) -> None:
        """Move state that the step has made anew into its room."""
        for key, room in self._room.items():
            value = self.state.get(key)
            if value is not None and value is not room:
                room.copy_(value.detach())
                self.state[key] = room


def _in_the_form_of(parameter: torch.Tensor, value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape
