"""Host memory that accelerators reach."""

from .arena import ArenaOptions, HostArena
from .registration import Registration, RegistrationMap, registrations

__all__ = ["ArenaOptions", "HostArena", "Registration", "RegistrationMap", "registrations"]
