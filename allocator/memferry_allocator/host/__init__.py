"""Host memory that accelerators reach."""

from .adopt import AdoptedRange, adopt
from .arena import ArenaOptions, HostArena
from .describe import PinnedMemory, PinnedRange, describe
from .handle import Registration
from .ledger import Foreign
from .registration import RegistrationMap, registrations
from .shared import SharedArena, SharedHandle

__all__ = [
    "AdoptedRange",
    "ArenaOptions",
    "Foreign",
    "HostArena",
    "PinnedMemory",
    "PinnedRange",
    "Registration",
    "RegistrationMap",
    "SharedArena",
    "SharedHandle",
    "adopt",
    "describe",
    "registrations",
]
