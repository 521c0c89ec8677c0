import sys
from pathlib import Path

from setuptools import Extension, setup

sys.path.insert(0, str(Path(__file__).parent / "allocator" / "memferry_allocator" / "native"))
from build import BuildPlainLibraries, extensions

dlpack = Extension(
    "memferry_allocator.interop._dlpack",
    ["allocator/memferry_allocator/interop/_dlpack.c"],
    extra_compile_args=["-std=c11"],
    py_limited_api=True,
    optional=True,  # a machine without a compiler installs without it
)

setup(
    cffi_modules=["memferry_rt/native/build.py:builder"],
    ext_modules=[dlpack, *extensions()],
    cmdclass={"build_ext": BuildPlainLibraries},
)
