"""Kernels of the device, with the bits of those of the CPU; cuda-python is imported only where they are opened."""

from .adam import MAPPED_BLOCKS, DeviceAdam, open_device_adam
from .gradients import DeviceGradients, open_device_gradients
from .moves import READS, WRITES, DeviceMoves, Spread, open_device_moves

__all__ = [
    "MAPPED_BLOCKS",
    "READS",
    "WRITES",
    "DeviceAdam",
    "DeviceGradients",
    "DeviceMoves",
    "Spread",
    "open_device_adam",
    "open_device_gradients",
    "open_device_moves",
]
