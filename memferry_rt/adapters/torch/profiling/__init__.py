"""Times of layers in every mode, measured where they are to run."""

from .stand import Buffer, Home, Stand

__all__ = ["Buffer", "Home", "Stand"]
