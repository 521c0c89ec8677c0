"""Native kernels, where the package was installed with a C compiler."""

from .adam import AdamKernel, AdamSettings, load_adam

__all__ = ["AdamKernel", "AdamSettings", "load_adam"]
