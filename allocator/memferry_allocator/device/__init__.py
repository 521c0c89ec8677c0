"""Device memory by budget."""

from .pool import DevicePool

__all__ = ["DevicePool"]
