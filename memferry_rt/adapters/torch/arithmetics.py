"""Optimizers with a native kernel beside Adam: what their classes keep, and what a step hands the kernel."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Optimizer

from ...errors import UnsupportedError
from ...native import (
    AdagradSettings,
    LionSettings,
    SgdSettings,
    adagrad_coefficients,
    lion_coefficients,
    sgd_coefficients,
)
from .entries import Held
from .lion import Lion

Room = Callable[[], torch.Tensor]
Fill = Callable[[torch.Tensor, float], None]


class Arithmetic(abc.ABC):
    """An optimizer as its native kernel computes it.

    Attributes
    ----------
    name : str
        The kernel's.
    state : str
        The name that its state has in ``optimizer.state``.
    """

    name: str
    state: str

    @abc.abstractmethod
    def keeps_state(self, group: dict[str, Any]) -> bool:
        """Whether parameters of a group have the state."""

    @abc.abstractmethod
    def settings(self, group: dict[str, Any]) -> Any:
        """A group's captured settings, for `begin`."""

    @abc.abstractmethod
    def begin(
        self, settings: Any, held: Held, scale: float, room: Room, fill: Fill
    ) -> tuple[Any, torch.Tensor | None]:
        """A parameter's coefficients in this step, and its state, with the entry as the class would have it.

        Parameters
        ----------
        held : Held
        scale : float
            Multiplied into the gradient.
        room : callable
            Memory for state that has no room in a slab.
        fill : callable
            Gives state its first value, as far as it is updated here: other ranks may have begun theirs.
        """

    def _place(self, held: Held, room: Room) -> torch.Tensor:
        """Where the state lies; put into the entry if there is none, to be filled."""
        value = held.entry.get(self.state)
        place = held.room.get(self.state)
        if place is None:
            fits = isinstance(value, torch.Tensor) and _alike(value, room())
            place = value if fits and value is not None else room()
            if value is not None and place is not value:
                place.copy_(value)
        held.entry[self.state] = place
        return place


class SgdArithmetic(Arithmetic):
    """``torch.optim.SGD``, whose ways of computing it all have the same bits."""

    name = "sgd"
    state = "momentum_buffer"

    def keeps_state(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"] != 0)

    def settings(self, group: dict[str, Any]) -> SgdSettings:
        return SgdSettings(
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
        )

    def begin(
        self, settings: SgdSettings, held: Held, scale: float, room: Room, fill: Fill
    ) -> tuple[Any, torch.Tensor | None]:
        if settings.momentum == 0:
            return sgd_coefficients(settings, scale, first=False), None
        first = held.entry.get(self.state) is None
        return sgd_coefficients(settings, scale, first=first), self._place(held, room)


class AdagradArithmetic(Arithmetic):
    """``torch.optim.Adagrad(fused=True)``: the root of the others is not rounded correctly everywhere."""

    name = "adagrad"
    state = "sum"

    def __init__(self, initial: float) -> None:
        self._initial = initial  # what a sum begins with

    def keeps_state(self, group: dict[str, Any]) -> bool:
        return True

    def settings(self, group: dict[str, Any]) -> AdagradSettings:
        if not group["fused"]:
            raise UnsupportedError(
                "optimizer: fused=True was changed since the model was offloaded, and other Adagrads have other "
                "bits; set it again, or call memferry_rt.restore(model) first and offload again"
            )
        return AdagradSettings(
            lr=float(group["lr"]),
            lr_decay=float(group["lr_decay"]),
            weight_decay=float(group["weight_decay"]),
            eps=float(group["eps"]),
            maximize=bool(group["maximize"]),
        )

    def begin(
        self, settings: AdagradSettings, held: Held, scale: float, room: Room, fill: Fill
    ) -> tuple[Any, torch.Tensor | None]:
        entry = held.entry
        if not entry:
            entry["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            fill(self._place(held, room), self._initial)
        entry["step"] += 1
        return adagrad_coefficients(settings, float(entry["step"]), scale), self._place(held, room)


class LionArithmetic(Arithmetic):
    """`Lion`."""

    name = "lion"
    state = "exp_avg"

    def keeps_state(self, group: dict[str, Any]) -> bool:
        return True

    def settings(self, group: dict[str, Any]) -> LionSettings:
        beta1, beta2 = group["betas"]
        return LionSettings(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            weight_decay=float(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )

    def begin(
        self, settings: LionSettings, held: Held, scale: float, room: Room, fill: Fill
    ) -> tuple[Any, torch.Tensor | None]:
        first = held.entry.get(self.state) is None
        place = self._place(held, room)
        if first:
            fill(place, 0.0)
        return lion_coefficients(settings, scale), place


def arithmetic_of(optimizer: Optimizer) -> Arithmetic | None:
    """How an optimizer is computed natively; None where there is no kernel that would have its bits."""
    if type(optimizer) is SGD:
        return SgdArithmetic()
    if type(optimizer) is Lion:
        return LionArithmetic()
    if type(optimizer) is Adagrad and all(group.get("fused") for group in optimizer.param_groups):
        return AdagradArithmetic(float(optimizer.defaults["initial_accumulator_value"]))
    return None


def fill_whole(state: torch.Tensor, value: float) -> None:
    """See `Arithmetic.begin`, where nobody else updates a part."""
    state.fill_(value)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.device, one.shape, one.stride()) == (
        *(other.dtype, other.device, other.shape),
        other.stride(),
    )
