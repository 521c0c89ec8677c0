"""Optimizer state in host memory for the benchmarks: filled, and cut into calls."""

from __future__ import annotations

import torch

from memferry_allocator import ArenaOptions, Driver, HostArena, Span
from memferry_rt.native import AdamOperands, AdamSettings

SETTINGS = AdamSettings(1e-4, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
BYTES = 28  # an update reads and writes by count: fp32 state twice, and 4 of gradient and rounded weight
PATTERN = 1 << 20  # elements of random state, repeated
ALIGNMENT = 1 << 21
STATE = ("parameter", "exp_avg", "exp_avg_sq")


class Slabs:
    """State, gradients and rounded weights in registered host memory, in huge pages where the system has them.

    Parameters
    ----------
    driver : Driver
    numel : int
        Elements of everything.
    dtypes : sequence of str
        Of gradients and of the weights that are made of them; fp32 weights are the parameters themselves.
    spare : bool
        Have room for state that is not updated in place.

    Attributes
    ----------
    arena : HostArena
    """

    def __init__(self, driver: Driver, numel: int, dtypes: list[str], *, spare: bool = False) -> None:
        self.numel = numel
        sizes = dict.fromkeys((*STATE, *(f"spare {name}" for name in STATE if spare)), 4)
        for dtype in dtypes:
            itemsize = getattr(torch, dtype).itemsize
            sizes |= {f"gradient {dtype}": itemsize, f"zeros {dtype}": itemsize}
            if dtype != "float32":
                sizes[f"weight {dtype}"] = itemsize
        rounded = {name: -(-numel * itemsize // ALIGNMENT) * ALIGNMENT for name, itemsize in sizes.items()}
        self._dtypes = dtypes
        self.arena = HostArena(driver, sum(rounded.values()), ArenaOptions())
        self._parts = {name: self.arena.cut(nbytes) for name, nbytes in rounded.items()}

    def tensor(self, name: str, dtype: str = "float32") -> torch.Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        span = Span(self._parts[name].ptr, self.numel * kind.itemsize)
        return torch.frombuffer(self.arena.array(span), dtype=kind)

    def fill(self, scale: float = 1e-3) -> None:
        """State as it is after some steps, of gradients of size `scale`; the ``zeros`` stay what they are."""
        generator = torch.Generator().manual_seed(1)
        gradient = torch.randn(PATTERN, generator=generator) * scale
        values = (torch.randn(PATTERN, generator=generator), gradient, gradient.square())
        for name, one in zip(STATE, values, strict=True):
            _repeat(self.tensor(name), one)
        for dtype in self._dtypes:
            _repeat(self.tensor(f"gradient {dtype}", dtype), gradient.to(getattr(torch, dtype)))

    def operands(
        self, dtype: str, start: int, count: int, *, spare: bool = False, zeros: bool = False
    ) -> AdamOperands:
        """An update of some elements; with `zeros` of a gradient that leaves state as it is, if it is carried."""
        itemsize = getattr(torch, dtype).itemsize

        def at(name: str, size: int = 4) -> int:
            return self._parts[name].ptr + size * start

        return AdamOperands(
            parameter=at("parameter"),
            exp_avg=at("exp_avg"),
            exp_avg_sq=at("exp_avg_sq"),
            out_parameter=at("spare parameter") if spare else None,
            out_exp_avg=at("spare exp_avg") if spare else None,
            out_exp_avg_sq=at("spare exp_avg_sq") if spare else None,
            gradient=at(f"{'zeros' if zeros else 'gradient'} {dtype}", itemsize),
            gradient_dtype=dtype,
            weight=0 if dtype == "float32" else at(f"weight {dtype}", itemsize),
            weight_dtype="bfloat16" if dtype == "float32" else dtype,
            count=count,
        )

    def pieces(
        self, dtype: str, start: int, count: int, piece: int, *, spare: bool = False, zeros: bool = False
    ) -> list[AdamOperands]:
        """The same, cut in pieces."""
        end = start + count
        return [
            self.operands(dtype, at, min(piece, end - at), spare=spare, zeros=zeros)
            for at in range(start, end, piece)
        ]


def _repeat(target: torch.Tensor, values: torch.Tensor) -> None:
    whole = target.numel() // PATTERN * PATTERN
    target[:whole].view(-1, PATTERN).copy_(values.expand(whole // PATTERN, PATTERN))
    target[whole:].copy_(values[: target.numel() - whole])
