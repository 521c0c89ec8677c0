"""What every row of the benchmark uses: results with their samples, and checks in the same run."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memferry_allocator import Stream
from memferry_rt.adapters.torch.profiling import Home, Stand
from memferry_rt.device_kernels import DeviceMoves, open_device_moves

from .sizes import Sizes

Entry = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Bench:
    """Where rows are measured, and with which sizes."""

    stand: Stand
    sizes: Sizes
    moves: DeviceMoves
    random: torch.Generator
    other: Stream

    @classmethod
    def on(cls, stand: Stand, sizes: Sizes) -> Bench:
        random = torch.Generator(stand.torch_device).manual_seed(0)
        moves = open_device_moves(stand.driver, stand.device)
        return cls(stand, sizes, moves, random, stand.driver.create_stream(stand.device))

    def normal(self, *size: int) -> torch.Tensor:
        """Random values on the device."""
        drawn = torch.randn(size, generator=self.random, device=self.stand.torch_device)
        return drawn.to(self.sizes.dtype)

    def ids(self, count: int) -> torch.Tensor:
        rows = self.sizes.table[0]
        return torch.randint(rows, (count,), generator=self.random, device=self.stand.torch_device)

    def far(self, values: torch.Tensor) -> Home:
        """A copy in mapped host memory."""
        home = self.stand.home(tuple(values.shape), values.dtype)
        home.host.copy_(values.cpu())
        return home

    @contextlib.contextmanager
    def beside(self) -> Iterator[Stream]:
        """Torch computes on another stream, after what the stand's holds by now."""
        self.other.wait(self.stand.stream.record())
        with self.stand.computing(self.other):
            yield self.other

    def measure(self, work: Callable[[], object], *, times: int = 1, **options: Any) -> Entry:
        """An entry with all samples and their median, of one of `times` that the work does."""
        samples = self.stand.seconds(work, samples=self.sizes.samples, **options)
        return entry([sample / times for sample in samples])


def entry(samples: Sequence[float]) -> Entry:
    """Samples and their median."""
    return {"median_s": statistics.median(samples), "samples_s": list(samples)}


def check_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> float:
    """Compare with a float64 result: the largest error over the largest value, refused beyond rounding.

    Raises
    ------
    RuntimeError
        Something else was computed; poison is something else.
    """
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    limit = max(4 * torch.finfo(found.dtype).eps, 1e-5)
    if not error <= limit:
        raise RuntimeError(f"{what}: {error:.3g} off float64, more than {limit:.3g}")
    return error


def check_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare bytes.

    Raises
    ------
    RuntimeError
        They differ.
    """
    if not torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)):
        raise RuntimeError(f"{what}: other bytes than the plain way's")
