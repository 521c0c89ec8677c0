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

from dataclasses import dataclass

from torch import nn

from ...plan.modes import WeightMode

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
    kind = type(module)
    if isinstance(module, nn.Embedding) and kind.forward is nn.Embedding.forward:
        if module.max_norm is not None:  # forward writes to the weight
            return Support(_LOADED, in_place=False, operator=False)
        return Support(_LOADED | _EMBEDDING, in_place=True, operator=not module.sparse)
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return Support(_LOADED | _LINEAR, in_place=True, operator=True)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if own and all(parameter.dim() <= 1 for parameter in own):
        return Support(_LOADED | _VECTORS, in_place=True, operator=False)
    return Support(_LOADED, in_place=False, operator=False)
