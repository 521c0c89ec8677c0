"""MemFerry for C and C++: the compiled library, its header, and how to build against them.

``python -m memferry_allocator.native --cflags --libs`` prints what a compiler needs.
"""

from .library import bindings, include_path, library_path, torch_library_path

__all__ = ["bindings", "include_path", "library_path", "torch_library_path"]
