"""MemFerry's transport: bytes between hosts and devices, on the fastest way the machine has."""

from .calibration import Calibration, Measured
from .engine import TransferEngine
from .errors import CalibrationError, InvalidTransferError, TopologyError, TransportError
from .transfer import Transfer

__all__ = [
    "Calibration",
    "CalibrationError",
    "InvalidTransferError",
    "Measured",
    "TopologyError",
    "Transfer",
    "TransferEngine",
    "TransportError",
]
