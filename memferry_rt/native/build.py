"""Builds the native kernels at installation.  Without a compiler the package installs without them."""

from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
SOURCES = Path("memferry_rt/native")  # setuptools wants sources relative to the project
DECLARED = ("adam.h", "one_state.h", "kernels.h", "words.h")
FILES = ("adam.c", "sgd.c", "adagrad.c", "lion.c", "gradients.c", "pool.c", "variants.c", "words.c")

builder = FFI()
for header in DECLARED:
    builder.cdef((HERE / header).read_text())
builder.set_source(
    "memferry_rt.native._kernels",
    "\n".join(
        f"#include {header}" for header in ("<stddef.h>", "<stdint.h>", *(f'"{name}"' for name in DECLARED))
    ),
    sources=[str(SOURCES / source) for source in FILES],
    include_dirs=[str(SOURCES)],
    depends=[str(SOURCES / path.name) for path in sorted(HERE.glob("*.h"))],
    extra_compile_args=[
        "-O3",
        "-std=c11",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-pthread",
    ],
    extra_link_args=["-pthread"],
    libraries=["m"],
    optional=True,
)
