"""A calibration as text: what the transfer engine decides by, and where it comes from."""

from __future__ import annotations

from statistics import median

from memferry_allocator import format_size

from .calibration import Calibration, Measured

_NEVER = 1 << 60


def explain(calibration: Calibration) -> str:
    """One line on the whole, one for each way, and one for each figure that follows from them."""
    lines = [
        f"{calibration.machine}: {calibration.source}, {calibration.date}, slices of "
        f"{format_size(calibration.slice_bytes)}"
    ]
    for (path, direction), measured in sorted(
        calibration.ways.items(), key=lambda item: (item[0][0].device, str(item))
    ):
        cost = measured.cost
        lines.append(
            f"device {path.device}, {direction.value}, {path}: {cost.alpha_s * 1e6:.1f} us + bytes / "
            f"{cost.bytes_per_second / 1e9:.1f} GB/s{_evidence(measured)}"
        )
    for (device, direction), nbytes in calibration.break_even_bytes.items():
        pays = "never pay" if nbytes >= _NEVER else f"pay from {format_size(nbytes)} on"
        lines.append(f"device {device}, {direction.value}: several ways {pays}")
    for device, share in calibration.duplex.items():
        lines.append(f"device {device}: both directions at once reach {share:.1%} of the sum of each alone")
    return "\n".join(lines)


def _evidence(measured: Measured) -> str:
    """How many samples there are, and how far the fit is from their medians."""
    if not measured.samples:
        return ""
    errors = [
        abs(measured.cost.seconds(size) / median(seconds) - 1)
        for size, seconds in measured.samples.items()
        if seconds
    ]
    count = sum(len(seconds) for seconds in measured.samples.values())
    low, high = min(measured.samples), max(measured.samples)
    return (
        f" ({count} samples of {len(measured.samples)} sizes, {format_size(low)} to {format_size(high)}; off by "
        f"{median(errors):.1%}, at most {max(errors, default=0.0):.1%})"
    )
