"""Device memory by budget."""

from .pool import ALIGNMENT, DevicePool

__all__ = ["ALIGNMENT", "DevicePool"]
