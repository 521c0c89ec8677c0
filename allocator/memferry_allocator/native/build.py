"""Builds libmemferry at installation, the functions for torch on top of it, and what the CUDA driver calls in one
piece; plain libraries without Python.

Without a compiler the package installs without them.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

SOURCES = "allocator/memferry_allocator/native"  # setuptools wants sources relative to the project
PACKAGE = "memferry_allocator.native"
BESIDE = "memferry_allocator.driver.cuda.libbeside"
CORE, TORCH = f"{PACKAGE}.libmemferry", f"{PACKAGE}.libmemferry_torch"
PARTS = ("arena", "device", "driver", "error", "pool", "ranges", "registration", "stream", "users")
HEADERS = [f"{SOURCES}/{name}.h" for name in ("driver", "internal", "memferry", "ranges", "users")]


def extensions() -> list[Extension]:
    """What ``setup.py`` hands to setuptools, beside `BuildPlainLibraries`."""
    warnings = ["-Wall", "-Wextra", "-fvisibility=hidden", "-O2"]
    return [
        Extension(
            CORE,
            [f"{SOURCES}/{name}.c" for name in PARTS],
            depends=HEADERS,
            extra_compile_args=["-std=c11", "-pthread", *warnings],
            extra_link_args=["-pthread", "-Wl,-soname,libmemferry.so"],
            libraries=["dl"],
            optional=True,
        ),
        Extension(
            BESIDE,
            ["allocator/memferry_allocator/driver/cuda/beside.c"],
            extra_compile_args=["-std=c11", *warnings],
            extra_link_args=["-Wl,-soname,libbeside.so"],
            optional=True,
        ),
        Extension(
            TORCH,
            [f"{SOURCES}/torch_shim.cpp"],
            depends=HEADERS,
            language="c++",
            extra_compile_args=["-std=c++17", *warnings],
            extra_link_args=["-Wl,-rpath,$ORIGIN"],
            libraries=["dl"],
            optional=True,
        ),
    ]


class BuildPlainLibraries(build_ext):
    """Gives the libraries their plain names, and links the one for torch with the core."""

    def get_ext_filename(self, fullname: str) -> str:
        for name in (CORE, TORCH, BESIDE):
            if fullname in (name, name.rpartition(".")[2]):
                return str(Path(*fullname.split("."))) + ".so"
        return str(super().get_ext_filename(fullname))  # type: ignore[no-untyped-call]

    def build_extension(self, ext: Extension) -> None:
        if ext.name == TORCH:
            ext.extra_objects = [self.get_ext_fullpath(CORE)]
        super().build_extension(ext)
