"""A calibration as text: what the transfer engine decides by, and where it comes from."""

from __future__ import annotations

from statistics import median

from memferry_allocator import format_size

from .costs import Calibration, Measured

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
    for (device, direction), seconds in calibration.join_s.items():
        lines.append(f"device {device}, {direction.value}: joining ways takes {seconds * 1e6:.1f} us")
    for device, share in calibration.duplex.items():
        lines.append(f"device {device}: both directions at once reach {share:.1%} of the sum of each alone")
    return "\n".join(lines)


def _evidence(measured: Measured) -> str:
    """How many samples there are, and how far the fit is from their medians."""
    medians = {
        size: median(seconds) for size, seconds in measured.samples.items() if seconds and median(seconds) > 0
    }
    if not medians:
        return ""
    errors = [abs(measured.cost.seconds(size) / seconds - 1) for size, seconds in medians.items()]
    count = sum(len(seconds) for seconds in measured.samples.values())
    return (
        f" ({count} samples of {len(medians)} sizes, {format_size(min(medians))} to {format_size(max(medians))}; "
        f"off by {median(errors):.1%}, at most {max(errors):.1%})"
    )
