"""Resources on top of others: one file each."""

from .base import Adaptor
from .counted import CountedMemory, Counts
from .limited import LimitedMemory
from .logged import LoggedMemory
from .retrying import RetryingMemory
from .tracked import Allocation, TrackedMemory

__all__ = [
    "Adaptor",
    "Allocation",
    "CountedMemory",
    "Counts",
    "LimitedMemory",
    "LoggedMemory",
    "RetryingMemory",
    "TrackedMemory",
]
