"""What a layer is measured with: a way to compute it, rings and kernels, and its tensors in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....device_kernels import open_device_moves
from ....panels import PANEL, SLOTS, PanelRing
from ....plan.profile import GradientPlace, WeightPlace
from ....staging import StagingRing
from .rehearsal import Subject
from .stand import Home, Stand


@dataclass(frozen=True)
class Way:
    """Where weights are read, and gradients written."""

    weights: WeightPlace = WeightPlace.DEVICE
    gradients: GradientPlace = GradientPlace.DEVICE

    @property
    def plain(self) -> bool:
        return self == Way()


class Kit:
    """Rings in device memory, and kernels; and what passed through host memory in place since `reset`.

    Attributes
    ----------
    in_place_nbytes : int
        As often as a kernel was given the bytes.
    pool_nbytes : int
        Of the rings that were used.
    """

    def __init__(self, stand: Stand, panel: int = PANEL) -> None:
        self.stand = stand
        self.moves = open_device_moves(stand.driver, stand.device)
        self._pool = stand.pool((SLOTS + 2) * panel)
        self.ring = PanelRing(stand.driver, stand.engine, self._pool, stand.stream, nbytes=panel)
        self.slabs = StagingRing(self._pool, 2 * panel, stand.stream)
        self.panel = panel
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.in_place_nbytes = 0
        self._used: set[int] = set()
        self._before = self._copied()

    @property
    def copied_nbytes(self) -> int:
        """Bytes by copy engines, both ways, since `reset`."""
        return self._copied() - self._before

    @property
    def pool_nbytes(self) -> int:
        return sum(ring.nbytes for ring in (self.ring, self.slabs) if id(ring) in self._used)

    def use(self, ring: PanelRing | StagingRing) -> None:
        """Count a ring's memory."""
        self._used.add(id(ring))

    def touch(self, *tensors: torch.Tensor) -> None:
        """Count tensors in host memory that a kernel is given."""
        self.in_place_nbytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def close(self) -> None:
        """Give the rings back; everything enqueued is done."""
        self.ring.close(self.stand.stream)
        self.slabs.close(self.stand.stream)

    def _copied(self) -> int:
        return sum(self.stand.engine.bytes_moved.values()) + self.ring.strided_bytes_in


class Homes:
    """A layer's weights and gradients in mapped host memory."""

    def __init__(self, stand: Stand, subject: Subject) -> None:
        self.weights: dict[torch.Tensor, Home] = {}
        self.gradients: dict[torch.Tensor, Home] = {}
        for parameter in subject.parameters:
            home = self.weights[parameter] = stand.home(tuple(parameter.shape), parameter.dtype)
            home.host.copy_(parameter.detach().cpu())
            if parameter.requires_grad:
                self.gradients[parameter] = stand.home(tuple(parameter.shape), parameter.dtype)
                self.gradients[parameter].host.zero_()

    def close(self) -> None:
        """Give the pages back; nothing enqueued uses them."""
        for home in (*self.weights.values(), *self.gradients.values()):
            home.close()
