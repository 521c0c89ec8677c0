"""Times of layers in every mode, measured where they are to run."""

from .profile import profile_model
from .stand import Buffer, Home, Stand

__all__ = ["Buffer", "Home", "Stand", "profile_model"]
