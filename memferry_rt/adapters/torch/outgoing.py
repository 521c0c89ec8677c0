"""Where gradients in place are made, panel by panel: one leaves for host memory while the next is made."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memferry_allocator import Driver, Span, Stream
from memferry_transport import TransferEngine

from ...device_kernels import DeviceMoves, open_device_moves
from ...errors import DeviceKernelError
from ...staging import StagingRing
from .operators import LaneOutbox
from .tensors import TensorFactory


class Outgoing:
    """A ring of two panels, and the copy engine that carries them home.

    A kernel that writes to host memory takes a product beside it more time than the panel is worth
    (`benchmarks.dha`, *beside*); a copy engine takes it none.

    Parameters
    ----------
    engine : TransferEngine
        Whose lane out of the device carries.
    factory : TensorFactory
    ring : StagingRing
    stream : callable
        The stream on which the calling thread's kernels run.
    """

    def __init__(
        self,
        engine: TransferEngine,
        factory: TensorFactory,
        ring: StagingRing,
        stream: Callable[[], Stream],
    ) -> None:
        self._engine = engine
        self._factory = factory
        self._ring = ring
        self._stream = stream
        self._tensors: dict[Span, torch.Tensor] = {}

    def box(self, home: Span, panel_nbytes: int) -> LaneOutbox | None:
        """For one gradient, by its home's host address; None where panels do not fit."""
        if panel_nbytes > self._ring.nbytes // 2:
            return None
        return LaneOutbox(
            self._engine.driver,
            self._engine,
            self._ring,
            self._tensor,
            stream=self._stream(),
            home=home,
        )

    def close(self, stream: Stream) -> None:
        """Give the ring back; its last panel was waited for."""
        self._ring.close(stream)

    def _tensor(self, span: Span) -> torch.Tensor:
        made = self._tensors.get(span)
        if made is None:
            made = self._tensors[span] = self._factory.device(span)
        return made


def open_moves(driver: Driver, device: int) -> DeviceMoves | None:
    """The kernels that write gradients home; None where they cannot be compiled, and torch's do."""
    try:
        return open_device_moves(driver, device)
    except DeviceKernelError:
        return None
