"""One parameter's gradient: where it is at home, and what is known of it in this iteration."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memferry_allocator import Event, Span

from ...errors import UnsupportedError
from .contributions import Contribution
from .layer import LayerState

_ANY_DTYPE = hasattr(
    torch.Tensor, "grad_dtype"
)  # whether a parameter may be told that its `grad` has another dtype


@dataclass(eq=False)
class GradientSlot:
    """One parameter's gradient.

    Attributes
    ----------
    home : Tensor
        Over the memory where the gradient belongs: host pages, or the device's where the layer keeps them there.
    span : Span
        That memory: a host address, or a device pointer.
    arriving : bool
        Whether autograd is putting a new gradient into ``parameter.grad``.
    partial : Tensor or None
        What earlier micro-steps have summed, meanwhile.
    micro_steps : int
        How many gradients `home` is the sum of; 0 after a step.
    leaving : Event or None
        Until when its copy home is under way.
    norm : Tensor or None
        The fp64 2-norms of its pieces, on the device.
    version : int
        The version of `home` that `norm` belongs to.
    delivered : int
        The version of `home` that host memory has, where `home` is the device's.
    pending : list of Contribution
        What backwards have found out of the gradient and not yet computed.
    mixed : bool
        Whether autograd itself makes an addition since the last step: it alone knows the order of the sum then.
    written_rows : (int, Tensor) or None
        The rows of a table at home that may be other than zero, and the version of `home` that this is true of.
    """

    name: str
    parameter: nn.Parameter
    layer: LayerState
    index: int
    home: torch.Tensor = field(init=False)
    span: Span = field(init=False)
    arriving: bool = False
    partial: torch.Tensor | None = None
    micro_steps: int = 0
    leaving: Event | None = None
    norm: torch.Tensor | None = None
    version: int = -1
    delivered: int = -1
    pending: list[Contribution] = field(default_factory=list)
    mixed: bool = False
    written_rows: tuple[int, torch.Tensor] | None = None

    _own_references: tuple[int, int] = (0, 0)

    def rehome(self, span: Span) -> None:
        """The gradient belongs where its layer says now."""
        self.home = self.layer.gradient_home(self.index)  # in no local variable, which would count
        self.span, self.version, self.delivered, self.written_rows = span, -1, -1, None
        self._own_references = self._references()

    @property
    def is_alone(self) -> bool:
        """Whether nobody else sees the gradient as autograd makes it, and its home is as a kernel writes it."""
        parameter = self.parameter
        return (
            not self.mixed
            and not parameter._backward_hooks
            and len(parameter._post_accumulate_grad_hooks or ()) == 1
            and self.home.dtype is parameter.dtype
            and self.home.is_contiguous()
            and self.home.numel() > 0
        )

    @property
    def held(self) -> bool:
        """Whether somebody outside holds `home`, be it as the ``grad`` of a parameter."""
        counts = zip(self._references(), self._own_references, strict=True)
        return any(now > own for now, own in counts)

    def _references(self) -> tuple[int, int]:
        """References to `home` as a Python object, and from within PyTorch."""
        return sys.getrefcount(self.home), self.home._use_count()  # type: ignore[attr-defined]

    @property
    def on_device(self) -> bool:
        """Whether its home is device memory."""
        return self.span != self.host_span

    @property
    def host_span(self) -> Span:
        """Where an update on the CPU finds it."""
        return self.layer.gradient_place(self.layer.layout.slots[self.index])

    def widened(self, gradient: torch.Tensor) -> torch.Tensor:
        """What autograd has made, in the dtype of the sum."""
        return gradient.to(self.home.dtype)

    def show(self, tensor: torch.Tensor) -> None:
        """Make a tensor of the home's dtype the parameter's ``grad``."""
        parameter = self.parameter
        if tensor.dtype is parameter.dtype:
            parameter.grad = tensor
            return
        # The dtype is looked at when a gradient is assigned, and only then.  `Parameter.grad_dtype`, which newer
        # versions of torch have, would change what autograd itself rounds within a backward.
        real = tensor.data
        tensor.data = parameter.data
        parameter.grad = tensor
        tensor.data = real

    def take_pending(self) -> list[Contribution]:
        """What this backward has found out of the gradient; one around it, or one that failed, keeps its own."""
        task, every = torch._C._current_graph_task_id(), self.pending
        self.pending = [contribution for contribution in every if contribution.task != task]
        return [contribution for contribution in every if contribution.task == task]

    def in_form(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient with its elements in the order in which its home holds them."""
        form = self.layer.geometry[self.index]
        if gradient.stride() == form.stride:
            return gradient
        return self.flat(gradient).as_strided(form.shape, form.stride)

    def flat(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient's elements in the order in which its home holds them."""
        form = self.layer.geometry[self.index]
        if gradient.stride() != form.stride or gradient.dtype != form.gradient_dtype:
            fitting = torch.empty_strided(
                form.shape, form.stride, dtype=form.gradient_dtype, device=gradient.device
            )
            gradient = fitting.copy_(gradient)
        return gradient.as_strided((gradient.numel(),), (1,))

    def refuse_odd(self, gradient: torch.Tensor) -> None:
        """Refuse a gradient that has no place in host memory.

        Raises
        ------
        UnsupportedError
        """
        if gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"{self.name}: its gradient is {gradient.layout}; sparse gradients are not supported, "
                "build the embedding with sparse=False"
            )
        if gradient.requires_grad:
            raise UnsupportedError(
                f"{self.name}: its gradient requires a gradient itself; backward(create_graph=True) is not "
                "supported by an offloaded model"
            )


def accumulation(parameter: nn.Parameter) -> Any:
    """The node with which autograd accumulates into a parameter's ``grad``."""
    with torch.inference_mode(False), torch.enable_grad():
        made = parameter.expand_as(parameter).grad_fn
    assert made is not None
    return made.next_functions[0][0]


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def lies_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    forms = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (one, other)]
    return forms[0] == forms[1]
