"""The version of this installation."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


def version() -> str:
    """The version of the installed distribution, or ``"unknown"`` in a source tree that was never installed."""
    try:
        return installed("memferry-rt")
    except PackageNotFoundError:
        return "unknown"
