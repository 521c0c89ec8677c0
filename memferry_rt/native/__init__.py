"""Native kernels, where the package was installed with a C compiler."""

from .adam import AdamKernel, AdamOperands, AdamTuning, load_adam
from .coefficients import AdamCoefficients, AdamSettings, adam_coefficients
from .gradients import GradientKernels, load_gradient_kernels
from .pool import NativeBatch, NativeCalls, NativePool

__all__ = [
    "AdamCoefficients",
    "AdamKernel",
    "AdamOperands",
    "AdamSettings",
    "AdamTuning",
    "GradientKernels",
    "NativeBatch",
    "NativeCalls",
    "NativePool",
    "adam_coefficients",
    "load_adam",
    "load_gradient_kernels",
]
