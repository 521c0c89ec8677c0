"""How an optimizer's parameters are updated: one rule for each arithmetic, chosen when a model is offloaded."""

from __future__ import annotations

import abc
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ...errors import UnsupportedError
from ...layout import MOMENTS
from ...native import AdamKernel, OneStateKernel
from ...parallel import Part
from .adam_state import AdamPatch, check_adam
from .arithmetics import Arithmetic, arithmetic_of
from .entries import EntriesPatch
from .generic import capture, state_keys
from .layer import LayerState
from .native_adam import trusted_kernel
from .native_one_state import trusted_one_state
from .optimizer import OptimizerPatch
from .state import is_adam
from .update import AdamUpdate, ClassUpdate, LayerUpdate, OneStateUpdate

Home = Mapping[nn.Parameter, tuple[LayerState, int]]


class UpdateRule(abc.ABC):
    """What the runtime must know of an optimizer's arithmetic.

    Parameters
    ----------
    optimizer : Optimizer

    Attributes
    ----------
    shared : bool
        The device may make updates too, and the CPU may make them during backward.
    in_parts : bool
        Elements of a parameter are updated by themselves, so that ranks can share them.
    """

    shared = False
    in_parts = True

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    @abc.abstractmethod
    def native(self) -> bool:
        """Whether its calls are native ones."""

    @abc.abstractmethod
    def state_keys(self, group: dict[str, Any], parameter: nn.Parameter) -> tuple[str, ...]:
        """What is kept for each element of a parameter, in fp32, by the names of ``optimizer.state``."""

    @abc.abstractmethod
    def patch(self, home: Home, *, step: Callable[[], None], settle: Callable[[], None]) -> OptimizerPatch:
        """See `OptimizerPatch`."""

    @abc.abstractmethod
    def plan(
        self, layer: LayerState, groups: Mapping[int, int], parts: Sequence[Part] | None = None
    ) -> LayerUpdate:
        """See `LayerUpdate`; not every rule can update parts."""


class AdamRule(UpdateRule):
    """``torch.optim.AdamW`` and ``Adam``: native, or torch operations of the same bits."""

    shared = True

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        check_adam(optimizer)

    @functools.cached_property
    def kernel(self) -> AdamKernel | None:
        """The native kernel, if it is installed and trusted."""
        return trusted_kernel()

    @property
    def native(self) -> bool:
        return self.kernel is not None

    def state_keys(self, group: dict[str, Any], parameter: nn.Parameter) -> tuple[str, ...]:
        return MOMENTS

    def patch(self, home: Home, *, step: Callable[[], None], settle: Callable[[], None]) -> AdamPatch:
        return AdamPatch(self.optimizer, home, step=step, settle=settle)

    def plan(
        self, layer: LayerState, groups: Mapping[int, int], parts: Sequence[Part] | None = None
    ) -> LayerUpdate:
        return AdamUpdate(layer, groups, kernel=self.kernel, parts=parts)


class OneStateRule(UpdateRule):
    """SGD, Adagrad and Lion: native.

    Parameters
    ----------
    optimizer : Optimizer
    arithmetic : Arithmetic
    kernel : OneStateKernel
    """

    native = True

    def __init__(self, optimizer: Optimizer, arithmetic: Arithmetic, kernel: OneStateKernel) -> None:
        super().__init__(optimizer)
        self._arithmetic = arithmetic
        self._kernel = kernel
        for group in optimizer.param_groups:
            self._adapt(capture(group))

    def _adapt(self, settings: dict[str, Any]) -> Any:
        return self._arithmetic.settings(settings)

    def state_keys(self, group: dict[str, Any], parameter: nn.Parameter) -> tuple[str, ...]:
        begun = self._arithmetic.state in self.optimizer.state.get(parameter, {})
        return (self._arithmetic.state,) if begun or self._arithmetic.keeps_state(group) else ()

    def patch(self, home: Home, *, step: Callable[[], None], settle: Callable[[], None]) -> EntriesPatch:
        return EntriesPatch(self.optimizer, home, step=step, settle=settle, adapt=self._adapt)

    def plan(
        self, layer: LayerState, groups: Mapping[int, int], parts: Sequence[Part] | None = None
    ) -> LayerUpdate:
        return OneStateUpdate(layer, groups, self._kernel, self._arithmetic, parts=parts)


class ClassRule(UpdateRule):
    """Any other optimizer: its own class makes the updates, of whole parameters."""

    native = False
    in_parts = False

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._keys: dict[tuple[int, int], tuple[str, ...]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for ndim in {parameter.ndim for parameter in group["params"]}:
                self._keys[number, ndim] = state_keys(optimizer, group, ndim)
        warnings.warn(
            f"{type(optimizer).__name__} has no native update kernel: its own class makes the updates on the CPU, "
            "one parameter at a time; they are exact, but slower, the device takes no share of them, and none is "
            "made during backward",
            RuntimeWarning,
            stacklevel=5,
        )

    def state_keys(self, group: dict[str, Any], parameter: nn.Parameter) -> tuple[str, ...]:
        number = next(n for n, other in enumerate(self.optimizer.param_groups) if other is group)
        return self._keys[number, parameter.ndim]

    def patch(self, home: Home, *, step: Callable[[], None], settle: Callable[[], None]) -> EntriesPatch:
        return EntriesPatch(self.optimizer, home, step=step, settle=settle, adapt=lambda settings: settings)

    def plan(
        self, layer: LayerState, groups: Mapping[int, int], parts: Sequence[Part] | None = None
    ) -> LayerUpdate:
        assert parts is None, "a class updates whole parameters"
        return ClassUpdate(layer, groups, self.optimizer)


def choose_rule(optimizer: Optimizer, model: nn.Module) -> UpdateRule:
    """The rule for an optimizer.

    Raises
    ------
    UnsupportedError
        It cannot be honoured, a setting has no counterpart, or its parameters are of another model.
    """
    known = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        if not known.issuperset(group["params"]):
            raise UnsupportedError(f"optimizer: a parameter of group {number} does not belong to the model")
    if is_adam(optimizer):
        return AdamRule(optimizer)
    arithmetic = arithmetic_of(optimizer)
    kernel = None if arithmetic is None else trusted_one_state(arithmetic.name)
    if arithmetic is None or kernel is None:
        return ClassRule(optimizer)
    return OneStateRule(optimizer, arithmetic, kernel)


def refuse_sharing(optimizer: Optimizer, split: str | float, spare_slabs: int | None) -> None:
    """Refuse what only Adam can do, where it was asked for.

    Raises
    ------
    UnsupportedError
    """
    name = type(optimizer).__name__
    if isinstance(split, float) and split > 0:
        raise UnsupportedError(
            f"optimizer_split={split}: the device updates for Adam and AdamW only, not for {name}; "
            "use 'auto' or 'cpu'"
        )
    if spare_slabs:
        raise UnsupportedError(
            f"spare_slabs={spare_slabs}: updates are made during backward for Adam and AdamW only, not for "
            f"{name}; leave it out"
        )
