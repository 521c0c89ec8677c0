from setuptools import setup

setup(cffi_modules=["memferry_rt/native/build.py:builder"])
