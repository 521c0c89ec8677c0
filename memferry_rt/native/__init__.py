"""Native kernels, where the package was installed with a C compiler."""

from .adagrad import AdagradCoefficients, AdagradSettings, adagrad_coefficients
from .adam import AdamKernel, AdamOperands, AdamTuning, load_adam
from .coefficients import AdamCoefficients, AdamSettings, adam_coefficients
from .gradients import GradientKernels, load_gradient_kernels
from .lion import LionCoefficients, LionSettings, lion_coefficients
from .one_state import OneStateKernel, OneStateOperands, load_one_state
from .pool import NativeBatch, NativeCalls, NativePool
from .sgd import SgdCoefficients, SgdSettings, sgd_coefficients

__all__ = [
    "AdagradCoefficients",
    "AdagradSettings",
    "AdamCoefficients",
    "AdamKernel",
    "AdamOperands",
    "AdamSettings",
    "AdamTuning",
    "GradientKernels",
    "LionCoefficients",
    "LionSettings",
    "NativeBatch",
    "NativeCalls",
    "NativePool",
    "OneStateKernel",
    "OneStateOperands",
    "SgdCoefficients",
    "SgdSettings",
    "adagrad_coefficients",
    "adam_coefficients",
    "lion_coefficients",
    "load_adam",
    "load_gradient_kernels",
    "load_one_state",
    "sgd_coefficients",
]
