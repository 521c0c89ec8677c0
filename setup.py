from setuptools import Extension, setup

dlpack = Extension(
    "memferry_allocator.interop._dlpack",
    ["allocator/memferry_allocator/interop/_dlpack.c"],
    extra_compile_args=["-std=c11"],
    py_limited_api=True,
    optional=True,  # a machine without a compiler installs without it
)

setup(cffi_modules=["memferry_rt/native/build.py:builder"], ext_modules=[dlpack])
