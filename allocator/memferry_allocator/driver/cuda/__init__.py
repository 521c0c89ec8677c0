"""NVIDIA devices."""

from .driver import CudaDriver, cuda_driver

__all__ = ["CudaDriver", "cuda_driver"]
