"""Whether the native kernel may be used: only where it gives PyTorch's own bits, found out by trying."""

from __future__ import annotations

import functools
import warnings

import torch

from ...native import AdamKernel, AdamSettings, load_adam
from ...native.adam import VECTOR
from .torch_adam import Batch, update_batch

ELEMENTS = 4096 + 7  # whole vectors, and a tail that PyTorch rounds differently
STEPS = 3
_TRIED = (
    AdamSettings(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False),
    AdamSettings(3e-2, 0.3, 0.95, 1e-5, 0.1, decoupled=False, maximize=True),
)


@functools.cache
def trusted_kernel() -> AdamKernel | None:
    """The native kernel if it is installed and agrees with this PyTorch, else None; warns once about either."""
    kernel = load_adam()
    if kernel is None:
        warnings.warn(
            "memferry_rt was installed without its native update kernel (no C compiler?): updates run as torch "
            "operations, with the same results, but take about twice as long; install it again with gcc",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    if not all(
        agrees(kernel, settings, dtype) for settings in _TRIED for dtype in ("float32", "bfloat16", "float16")
    ):
        warnings.warn(
            f"the native update kernel ({kernel.variant}) and PyTorch {torch.__version__} differ in the last bit: "
            "updates run as torch operations, and take about twice as long",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return kernel


def agrees(kernel: AdamKernel, settings: AdamSettings, dtype: str, *, elements: int = ELEMENTS) -> bool:
    """Whether kernel and torch give the same bits for gradients over the whole range of fp32.

    Parameters
    ----------
    dtype : str
        Of gradients, ``"float32"``, ``"bfloat16"`` or ``"float16"``; with a half the rounded weights are compared
        too.
    """
    generator = torch.Generator().manual_seed(elements)
    wide = torch.device("cpu")
    master = torch.randn(elements, generator=generator, device=wide, dtype=torch.float32)
    state = [master, torch.zeros_like(master), torch.zeros_like(master)]
    mine = [tensor.clone() for tensor in state]
    half: torch.dtype = getattr(torch, dtype)
    weight_dtype = torch.bfloat16 if half is torch.float32 else half
    weights = [torch.zeros(elements, dtype=weight_dtype, device=wide) for _ in range(2)]
    for step in range(1, STEPS + 1):
        exponent = torch.randint(
            -38, 8 if half is not torch.float16 else 4, (elements,), generator=generator, device=wide
        )
        noise = torch.randn(elements, generator=generator, device=wide, dtype=torch.float32)
        gradient = (noise * 10.0**exponent).to(half)
        batch = Batch(0)
        batch.add(
            0,
            master=state[0],
            exp_avg=state[1],
            exp_avg_sq=state[2],
            gradient=gradient,
            weight=None if dtype == "float32" else weights[0],
        )
        update_batch(batch, settings, [torch.tensor(float(step), dtype=torch.float32, device=wide)], 0.7)
        kernel.update(
            kernel.prepare(settings, step, 0.7),
            parameter=mine[0].data_ptr(),
            gradient=gradient.data_ptr(),
            gradient_dtype=dtype,
            exp_avg=mine[1].data_ptr(),
            exp_avg_sq=mine[2].data_ptr(),
            weight=0 if dtype == "float32" else weights[1].data_ptr(),
            weight_dtype=str(weight_dtype).removeprefix("torch."),
            count=elements,
            tail=elements % VECTOR,
        )
    pairs = [*zip(state, mine, strict=True), (weights[0], weights[1])]
    return all(torch.equal(_bits(one), _bits(other)) for one, other in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)
