"""Kernels of the device, with the bits of those of the CPU; cuda-python is imported only where they are opened."""

from .adam import MAPPED_BLOCKS, DeviceAdam, open_device_adam
from .gradients import DeviceGradients, open_device_gradients

__all__ = ["MAPPED_BLOCKS", "DeviceAdam", "DeviceGradients", "open_device_adam", "open_device_gradients"]
