"""Drivers that go wrong when told to."""

from .delegating import DelegatingDriver
from .faulty import Fault, FaultKind, FaultyDriver

__all__ = ["DelegatingDriver", "Fault", "FaultKind", "FaultyDriver"]
