"""The errors of the transport."""

from memferry_allocator import MemFerryError


class TransportError(MemFerryError):
    """Root of the transport's errors."""


class InvalidTransferError(TransportError, ValueError):
    """A transfer that cannot be carried out as asked; nothing was copied."""


class TransferFailedError(TransportError):
    """A transfer whose bytes are not all there.  Nothing writes to its destination any more."""


class TransferCancelledError(TransportError):
    """A transfer that was cancelled before all its bytes were under way.  Nothing writes there any more."""
