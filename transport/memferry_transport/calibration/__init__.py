"""What the transfer engine decides by: the costs of a machine's ways, in memory, in a file and in words."""

from .costs import Calibration, Measured
from .explain import explain
from .file import calibration_path, load_calibration, save_calibration

__all__ = ["Calibration", "Measured", "calibration_path", "explain", "load_calibration", "save_calibration"]
