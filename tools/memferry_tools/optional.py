"""Packages that are needed by some commands only."""

from __future__ import annotations

import importlib
from types import ModuleType

from .errors import ToolError


def require(module: str, *, what: str, install: str) -> ModuleType:
    """Import a package that this installation may lack.

    Parameters
    ----------
    module : str
        Its import name.
    what : str
        What needs it, for the message.
    install : str
        What ``pip install`` must be given to get it.

    Raises
    ------
    ToolError
        It is not installed, or does not load.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            raise ToolError(f"{what} needs {module}; install it with: pip install {install}") from None
        raise ToolError(f"{what} needs {module}, which does not load: {error}; install it again") from error
