"""Accelerators emulated in host memory, for machines without one and for tests."""

from .driver import EmulatedDriver
from .options import EmulatedOptions, LinkModel, Route, Wiring

__all__ = ["EmulatedDriver", "EmulatedOptions", "LinkModel", "Route", "Wiring"]
