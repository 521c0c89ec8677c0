"""Who belongs to which parameter group: fixed when the model is offloaded, with a place for everybody's state."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...errors import UnsupportedError


class GroupMembers:
    """Remembers an optimizer's groups, and refuses what would silently not be trained.

    Parameters
    ----------
    optimizer : Optimizer
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._ids = self._now()

    def check(self) -> None:
        """Refuse a step if somebody has moved parameters between the groups.

        Raises
        ------
        UnsupportedError
        """
        if self._now() != self._ids:
            raise UnsupportedError(
                "optimizer.param_groups has other members than when the model was offloaded; change settings "
                "only, or call memferry_rt.restore(model) first and offload again"
            )

    def _now(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self._optimizer.param_groups]


def why_no_group(group: dict[str, Any], home: Container[nn.Parameter]) -> str:
    """Why parameters cannot be added to an offloaded optimizer, and what to do.

    Parameters
    ----------
    group : dict
        As `add_param_group` takes it.
    home : container of Parameter
        The parameters of the offloaded model.
    """
    members = group["params"]
    members = [members] if isinstance(members, nn.Parameter) else list(members)
    parameters = [member[1] if isinstance(member, tuple) else member for member in members]
    if any(parameter not in home for parameter in parameters):
        reason = "a parameter is not of the offloaded model"
    else:
        reason = "the state of its parameters has no place in host memory, which is laid out by offload()"
    return (
        f"add_param_group on an offloaded optimizer: {reason}; give the optimizer every parameter that will be "
        "trained before offload(), or call memferry_rt.restore(model), add the group, and offload again"
    )
