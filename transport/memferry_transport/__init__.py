"""MemFerry's transport: bytes between hosts and devices, on the fastest way the machine has."""

from .engine import TransferEngine
from .errors import InvalidTransferError, TopologyError, TransportError
from .transfer import Transfer

__all__ = ["InvalidTransferError", "TopologyError", "Transfer", "TransferEngine", "TransportError"]
