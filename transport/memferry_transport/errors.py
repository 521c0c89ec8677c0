"""The errors of the transport."""

from memferry_allocator import MemFerryError


class TransportError(MemFerryError):
    """Root of the transport's errors."""


class InvalidTransferError(TransportError, ValueError):
    """A transfer that cannot be carried out as asked; nothing was copied."""


class CalibrationError(TransportError):
    """A calibration that cannot be made, read or written, or that is of another machine."""


class TopologyError(TransportError, ValueError):
    """A machine's description that is malformed or contradicts itself.

    Attributes
    ----------
    field : str
        Where, as in ``peer_links[3].between``.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class TransferFailedError(TransportError):
    """A transfer whose bytes are not all there.  Nothing writes to its destination any more."""


class TransferCancelledError(TransportError):
    """A transfer that was cancelled before all its bytes were under way.  Nothing writes there any more."""
