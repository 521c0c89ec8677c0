"""What each type of module can do: the modes in which it reads its weights and writes its gradients.

| module | makes a layer for | under a layer's mode it reads | gradient in place |
|---|---|---|---|
| `nn.Embedding` without `max_norm` | DHA | at home, the rows it is asked for | rows that it has used |
| `nn.Linear` | DHA, DHA_THEN_LOAD, RING | at home, or panel by panel | panel by panel |
| modules with vectors only: norms, scales, biases | DHA | at home | as autograd makes it |
| anything else | | loaded, as for STREAM | as autograd makes it |

Every module can do RESIDENT and STREAM.  What autograd makes in device memory is written home by a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ...plan.modes import WeightMode
from .cut import find_owners

F = TypeVar("F", bound=Callable[..., Any])

_LOADED = frozenset({WeightMode.RESIDENT, WeightMode.STREAM})
_EMBEDDING = frozenset({WeightMode.DHA})
_LINEAR = frozenset({WeightMode.DHA, WeightMode.DHA_THEN_LOAD, WeightMode.RING})
_VECTORS = frozenset({WeightMode.DHA})


@dataclass(frozen=True)
class Support:
    """What a module can do.

    Attributes
    ----------
    weight : frozenset of WeightMode
        What a layer of such modules can be told.
    in_place : bool
        Whether it may read its parameters in host memory.
    operator : bool
        Whether MemFerry has an operator for it: panels, and gradients that never are in device memory whole.
    """

    weight: frozenset[WeightMode]
    in_place: bool
    operator: bool


def support_of(module: nn.Module) -> Support:
    """What a module can do with the parameters that it reads itself."""
    kind, foreign = type(module), _has_foreign_forward(module)
    if isinstance(module, nn.Embedding) and kind.forward is nn.Embedding.forward:
        if module.max_norm is not None:  # forward writes to the weight
            return Support(_LOADED, in_place=False, operator=False)
        return Support(_LOADED | _EMBEDDING, in_place=True, operator=not module.sparse and not foreign)
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        weight = _LOADED | _LINEAR - {WeightMode.RING} if foreign else _LOADED | _LINEAR
        return Support(weight, in_place=True, operator=not foreign)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if own and all(parameter.dim() <= 1 for parameter in own):
        return Support(_LOADED | _VECTORS, in_place=True, operator=False)
    return Support(_LOADED, in_place=False, operator=False)


def with_operators(model: nn.Module) -> list[nn.Embedding | nn.Linear]:
    """The modules whose forward MemFerry may exchange: nobody else reads their weights.

    Of the gradient of a weight that several read, autograd alone knows the order of the sum.
    """
    readers: dict[torch.Tensor, int] = {}
    owners = find_owners(model)
    for owner in owners:
        for parameter in owner.parameters:
            readers[parameter] = readers.get(parameter, 0) + 1
    return [
        owner.module
        for owner in owners
        if isinstance(owner.module, (nn.Embedding, nn.Linear))
        and support_of(owner.module).operator
        and readers.get(owner.module.weight) == 1
    ]


def mark_own(forward: F) -> F:
    """A forward that MemFerry has given a module."""
    forward._of_memferry = True  # type: ignore[attr-defined]
    return forward


def has_own_forward(module: nn.Module) -> bool:
    """Whether MemFerry has exchanged this very module's forward."""
    return hasattr(module.__dict__.get("forward"), "_of_memferry")


def _has_foreign_forward(module: nn.Module) -> bool:
    return "forward" in module.__dict__ and not has_own_forward(module)
