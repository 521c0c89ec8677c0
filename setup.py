import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "allocator" / "memferry_allocator" / "native"))
from build import BuildPlainLibraries, extensions

setup(
    cffi_modules=["memferry_rt/native/build.py:builder"],
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildPlainLibraries},
)
