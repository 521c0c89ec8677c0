"""Where the compiled library is, and its functions for Python."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from cffi import FFI

from ..errors import UnsupportedError

_FOLDER = Path(__file__).parent


def include_path() -> Path:
    """The folder of ``memferry.h``."""
    return _FOLDER


def library_path() -> Path:
    """The shared library ``libmemferry.so``.

    Raises
    ------
    UnsupportedError
        The package was installed without a C compiler.
    """
    return _built("libmemferry.so", "C compiler (gcc)")


def torch_library_path() -> Path:
    """The shared library with the functions that `torch.cuda.memory.CUDAPluggableAllocator` wants.

    Raises
    ------
    UnsupportedError
        The package was installed without a C++ compiler.
    """
    return _built("libmemferry_torch.so", "C++ compiler (g++)")


def _built(name: str, tool: str) -> Path:
    path = _FOLDER / name
    if not path.is_file():
        raise UnsupportedError(
            f"{name}: it is not beside {_FOLDER}, because the package was installed without a {tool}; "
            "install one, then install memferry-rt again from source"
        )
    return path


@functools.cache
def bindings() -> tuple[Any, Any]:
    """A cffi ``(ffi, lib)`` pair of the functions in ``memferry.h``.

    Raises
    ------
    UnsupportedError
        The package was installed without a C compiler.
    """
    ffi = FFI()
    ffi.cdef(declarations())
    return ffi, ffi.dlopen(str(library_path()))


def declarations() -> str:
    """The declarations of ``memferry.h`` without anything for the preprocessor."""
    header = (_FOLDER / "memferry.h").read_text()
    found = re.search(r"/\* -- declarations -- \*/(.*)/\* -- end of declarations -- \*/", header, re.DOTALL)
    assert found is not None, "memferry.h has lost its marks"
    return found[1].replace("MEMFERRY_API ", "")
