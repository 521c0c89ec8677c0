"""Builds the native kernels at installation.  Without a compiler the package installs without them."""

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
SOURCES = Path("memferry_rt/native")  # setuptools wants sources relative to the project

builder = FFI()
builder.cdef((HERE / "adam.h").read_text())
builder.set_source(
    "memferry_rt.native._adam",
    '#include <stddef.h>\n#include "adam.h"',
    sources=[str(SOURCES / "adam.c")],
    include_dirs=[str(SOURCES)],
    depends=[str(SOURCES / "adam.h")],
    extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
    libraries=["m"],
    optional=True,
)
