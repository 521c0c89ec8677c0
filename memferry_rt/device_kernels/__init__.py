"""Kernels of the device, with the bits of those of the CPU; cuda-python is imported only where they are opened."""

from .adam import MAPPED_BLOCKS, DeviceAdam, open_device_adam
from .gradients import DeviceGradients, open_device_gradients
from .moves import READ_BLOCKS, WRITE_BLOCKS, DeviceMoves, open_device_moves

__all__ = [
    "MAPPED_BLOCKS",
    "READ_BLOCKS",
    "WRITE_BLOCKS",
    "DeviceAdam",
    "DeviceGradients",
    "DeviceMoves",
    "open_device_adam",
    "open_device_gradients",
    "open_device_moves",
]
