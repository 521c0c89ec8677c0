"""MemFerry's transport: bytes between hosts and devices, on the fastest way the machine has."""

from .borrowed import HelperUse
from .calibration import Calibration, Measured
from .cost import LinearCost
from .engine import TransferEngine
from .errors import (
    CalibrationError,
    InvalidTransferError,
    TopologyError,
    TransferCancelledError,
    TransferFailedError,
    TransportError,
)
from .faults import Fault, FaultKind, FaultyDriver
from .health import Edge, HealthReport
from .options import TransferOptions
from .paths import Path
from .runs import PathShare
from .transfer import Transfer, TransferStatus

__all__ = [
    "Calibration",
    "CalibrationError",
    "Edge",
    "Fault",
    "FaultKind",
    "FaultyDriver",
    "HealthReport",
    "HelperUse",
    "InvalidTransferError",
    "LinearCost",
    "Measured",
    "Path",
    "PathShare",
    "TopologyError",
    "Transfer",
    "TransferCancelledError",
    "TransferEngine",
    "TransferFailedError",
    "TransferOptions",
    "TransferStatus",
    "TransportError",
]
