"""How much is measured, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from memferry_allocator import InvalidRequestError

SWEEP = tuple(1 << power for power in range(12, 31))  # 4 KiB … 1 GiB


@dataclass(frozen=True)
class MeasureOptions:
    """Settings of a measurement.

    Attributes
    ----------
    nbytes : int
        Size of a copy where a case has one size.  Cases by size go up to twice as much.
    samples : int
        Times that each value is measured; the median counts.
    copies : int
        Copies in a row that make one sample.
    verify : bool
        Compare the bytes afterwards.
    """

    nbytes: int = 512 << 20
    samples: int = 3
    copies: int = 16
    verify: bool = True

    def __post_init__(self) -> None:
        if self.nbytes < 4096 or self.nbytes % 4096:
            raise InvalidRequestError(
                f"size: {self.nbytes} bytes are no multiple of 4096; write for example '512MiB'"
            )
        for name in ("samples", "copies"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name}: {getattr(self, name)} is less than 1")

    @property
    def largest(self) -> int:
        """Bytes of the largest copy of any case."""
        return 2 * self.nbytes

    def sizes(self, *, least: int = SWEEP[0], coarse: bool = False) -> tuple[int, ...]:
        """The sweep from `least` to `largest`; coarse: the powers of four, and the last."""
        sizes = [size for size in SWEEP if least <= size <= self.largest]
        return tuple(size for size in sizes if not coarse or size.bit_length() % 2 or size == sizes[-1])

    def copies_of(self, nbytes: int) -> int:
        """Copies in a sample of this size: of small ones more, so that the device's clock can tell them."""
        return self.copies if nbytes >= 16 << 20 else max(self.copies, min(64, self.copies * 4))
