"""Which ways can be trusted: what has been verified, what has failed, and until when it is left alone."""

from .verify import allow_peer_access, arrives
from .ways import Edge, Health, HealthReport, PathHealth

__all__ = ["Edge", "Health", "HealthReport", "PathHealth", "allow_peer_access", "arrives"]
