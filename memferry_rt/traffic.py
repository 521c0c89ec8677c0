"""Bytes by layer and by way, counted where the work is submitted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LayerTraffic:
    """What has been submitted for one layer so far, in bytes.

    Attributes
    ----------
    copied_in, copied_out : int
        By copy engines, into device memory and out of it: weights, gradients and optimizer state.
    read_in_place, written_in_place : int
        By kernels in host memory, as often as a kernel was given the bytes: weights and sums of gradients, and
        gradients.
    """

    copied_in: int = 0
    copied_out: int = 0
    read_in_place: int = 0
    written_in_place: int = 0

    def since(self, earlier: LayerTraffic) -> LayerTraffic:
        """What came after `earlier`."""
        return LayerTraffic(
            self.copied_in - earlier.copied_in,
            self.copied_out - earlier.copied_out,
            self.read_in_place - earlier.read_in_place,
            self.written_in_place - earlier.written_in_place,
        )

    def __add__(self, other: LayerTraffic) -> LayerTraffic:
        return LayerTraffic(
            self.copied_in + other.copied_in,
            self.copied_out + other.copied_out,
            self.read_in_place + other.read_in_place,
            self.written_in_place + other.written_in_place,
        )
