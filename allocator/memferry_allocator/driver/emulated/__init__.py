"""Accelerators emulated in host memory, for machines without one and for tests."""

from .driver import EmulatedDriver
from .options import EmulatedOptions, LinkModel

__all__ = ["EmulatedDriver", "EmulatedOptions", "LinkModel"]
