"""Random updates by Adam, made in many ways that must have the same bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from memferry_rt.native import AdamOperands, AdamSettings, load_adam
from memferry_rt.native.adam import VECTOR

PLAIN = AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
HALVES = {"float32": torch.bfloat16, "bfloat16": torch.bfloat16, "float16": torch.float16}  # of rounded weights
OUTPUTS = ("out_parameter", "out_exp_avg", "out_exp_avg_sq")

rates = st.floats(0.0, 0.9999) | st.sampled_from([0.0, 0.5, 0.9, 0.999])
settings_of_adam = st.builds(
    AdamSettings,
    lr=st.floats(1e-6, 1.0),
    beta1=rates,
    beta2=rates,
    eps=st.floats(1e-12, 1e-2),
    weight_decay=st.just(0.0) | st.floats(2.0**-149, 0.5),  # a smaller one is none: docs/numerics.md
    decoupled=st.booleans(),
    maximize=st.booleans(),
)
dtypes = st.sampled_from(["float32", "bfloat16", "float16"])
lengths = st.integers(1, 40) | st.integers(1, 5000)


@dataclass
class State:
    """One parameter's state and rounded weight."""

    parameter: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def random(cls, numel: int, dtype: str, generator: torch.Generator) -> State:
        """Over the whole range of fp32, subnormals among it."""
        squares = wide_range(numel, "float32", generator).square() * 1e-3
        return cls(
            torch.randn(numel, generator=generator),
            wide_range(numel, "float32", generator),
            squares,
            torch.zeros(numel, dtype=HALVES[dtype]),
        )

    def tensors(self) -> list[torch.Tensor]:
        return [self.parameter, self.exp_avg, self.exp_avg_sq, self.weight]

    def clone(self) -> State:
        return State(*(tensor.clone() for tensor in self.tensors()))

    def blank(self) -> State:
        """Of the same form, with other contents."""
        return State(*(torch.full_like(tensor, -3.0) for tensor in self.tensors()))

    def operands(
        self, gradient: torch.Tensor, out: State | None = None, start: int = 0, end: int | None = None
    ) -> AdamOperands:
        """Of the elements from `start` to `end`; new state goes to `out`, by default in place."""
        numel = self.parameter.numel()
        end = numel if end is None else end
        into = self if out is None else out
        return AdamOperands(
            parameter=self.parameter[start:].data_ptr(),
            exp_avg=self.exp_avg[start:].data_ptr(),
            exp_avg_sq=self.exp_avg_sq[start:].data_ptr(),
            out_parameter=into.parameter[start:].data_ptr(),
            out_exp_avg=into.exp_avg[start:].data_ptr(),
            out_exp_avg_sq=into.exp_avg_sq[start:].data_ptr(),
            gradient=gradient[start:].data_ptr(),
            gradient_dtype=name_of(gradient.dtype),
            weight=into.weight[start:].data_ptr(),
            weight_dtype=name_of(into.weight.dtype),
            count=end - start,
            tail=numel % VECTOR if end == numel else 0,
        )


def where_tails_differ(numel: int) -> tuple[State, torch.Tensor]:
    """State and gradient whose every element would get another bit if it were, or were not, of the tail."""
    kernel = load_adam()
    assert kernel is not None
    generator = torch.Generator().manual_seed(11)
    drawn, gradient = State.random(4096, "float32", generator), torch.randn(4096, generator=generator)
    drawn.exp_avg_sq.uniform_(generator=generator)
    body, tail = drawn.clone(), drawn.clone()
    prepared = kernel.prepare(PLAIN, 1.0, 1.0)
    kernel.run(prepared, replace(body.operands(gradient), tail=0))
    kernel.run(prepared, replace(tail.operands(gradient), tail=4096))
    chosen = (body.exp_avg_sq != tail.exp_avg_sq).nonzero().flatten()
    chosen = chosen[torch.arange(numel) % len(chosen)]
    return State(*(tensor[chosen] for tensor in drawn.tensors())), gradient[chosen]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def wide_range(numel: int, dtype: str, generator: torch.Generator) -> torch.Tensor:
    """Numbers of all magnitudes that do not overflow when they are squared."""
    largest = 3 if dtype == "float16" else 15
    exponent = torch.randint(-45, largest, (numel,), generator=generator)
    noise = torch.randn(numel, generator=generator, dtype=torch.float64)
    return (noise * 10.0**exponent).to(getattr(torch, dtype))


def torch_update(state: State, gradient: torch.Tensor, settings: AdamSettings, step: float, scale: float) -> None:
    """By PyTorch's fused kernel alone, from a gradient that is widened and scaled before."""
    kernel = torch._fused_adamw_ if settings.decoupled else torch._fused_adam_
    widened = gradient.float() * scale
    kernel(
        [state.parameter], [widened], [state.exp_avg], [state.exp_avg_sq], [], [torch.tensor(step)],
        lr=settings.lr, beta1=settings.beta1, beta2=settings.beta2, weight_decay=settings.weight_decay,
        eps=settings.eps, amsgrad=False, maximize=settings.maximize,
    )  # fmt: skip
    state.weight.copy_(state.parameter)


def assert_same_bits(expected: State, got: State, what: str = "") -> None:
    """Equal to the bit; of NaNs only that they are NaNs."""
    for name, one, other in zip(expected.__annotations__, expected.tensors(), got.tensors(), strict=True):
        integers = torch.int32 if one.dtype is torch.float32 else torch.int16
        same = (one.view(integers) == other.view(integers)) | (one.isnan() & other.isnan())
        wrong = (~same).nonzero().flatten()
        assert not len(wrong), (
            f"{what}: {name} differs in {len(wrong)} of {same.numel()} elements, first {int(wrong[0])}: "
            f"{one[wrong[0]].item()!r} and {other[wrong[0]].item()!r}"
        )
