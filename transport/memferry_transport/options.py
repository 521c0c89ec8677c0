"""How a transfer engine goes about its work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memferry_allocator.driver import COPY_BLOCKS

from .errors import InvalidTransferError

SLICE_BYTES = 8 << 20
MAX_HELPERS = 6
HELPER_IDLE_S = 0.5


@dataclass(frozen=True)
class TransferOptions:
    """Options of a `TransferEngine`.

    Attributes
    ----------
    helpers : "auto" or tuple of int
        Devices whose host links may be used beside the engine's own.  ``"auto"`` takes those that the calibration
        knows, the fastest first, as long as they load or unload nothing themselves (see `helper_idle_s`); without
        a calibration, none.
        Devices named in a tuple are used even while they are busy.
    slice_bytes : int, optional
        Of what goes over a helper; None: what the calibration was measured with, else 8 MiB.
    staging_buffers : int
        Buffers of `slice_bytes` on each helper in each direction, and streams that use them; at least 2.
    relay : "auto", "kernel" or "staging"
        How helpers do it: see `Path`.  ``"auto"`` takes, for each helper and size, what the calibration says ends
        sooner, and staging where it knows nothing of kernels.
    relay_blocks : int
        Thread blocks of a helper's kernel.
    mode : "quota" or "queue"
        ``"quota"`` submits everything at once, shared out by the calibration.  ``"queue"`` lets each way take the
        next slice when it has room; a thread of the engine's own then keeps the links busy, and a transfer
        returns when its bytes are there.
    adaptive : bool
        Move shares between the ways by what earlier transfers took.
    break_even_bytes : int, optional
        Smallest transfer that goes over several ways; None: as calibrated, else two slices.
    max_helpers : int
        Of ``"auto"``.
    outstanding : int
        Slices under way at once on each way of ``"queue"``.
    helper_idle_s : float
        How long an engine of this process must not have copied in the same direction on a device before ``"auto"``
        borrows its link.  What is borrowed is submitted at once and cannot be taken back: two devices that load by
        turns would hold one another up.
    """

    helpers: Literal["auto"] | tuple[int, ...] = "auto"
    slice_bytes: int | None = None
    staging_buffers: int = 2
    relay: Literal["auto", "kernel", "staging"] = "auto"
    relay_blocks: int = COPY_BLOCKS
    mode: Literal["quota", "queue"] = "quota"
    adaptive: bool = True
    break_even_bytes: int | None = None
    max_helpers: int = MAX_HELPERS
    outstanding: int = 2
    helper_idle_s: float = HELPER_IDLE_S

    def __post_init__(self) -> None:
        helpers = self.helpers
        if helpers != "auto" and not (isinstance(helpers, tuple) and all(_whole(device, 0) for device in helpers)):
            raise InvalidTransferError(f"helpers: {helpers!r} is neither 'auto' nor a tuple of device ordinals")
        if helpers != "auto" and len(set(helpers)) < len(helpers):
            raise InvalidTransferError(f"helpers: {helpers!r} names a device twice")
        if self.mode not in ("quota", "queue"):
            raise InvalidTransferError(f"mode: {self.mode!r} is neither 'quota' nor 'queue'")
        if self.relay not in ("auto", "kernel", "staging"):
            raise InvalidTransferError(f"relay: {self.relay!r} is neither 'auto', 'kernel' nor 'staging'")
        if not isinstance(self.adaptive, bool):
            raise InvalidTransferError(f"adaptive: {self.adaptive!r} is neither True nor False")
        if isinstance(self.helper_idle_s, bool) or not isinstance(self.helper_idle_s, (int, float)):
            raise InvalidTransferError(f"helper_idle_s: {self.helper_idle_s!r} is not a number of seconds")
        if not self.helper_idle_s >= 0:
            raise InvalidTransferError(f"helper_idle_s: {self.helper_idle_s!r} is not zero seconds or more")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not (_whole(value, least) or (value is None and name in _OPTIONAL)):
                raise InvalidTransferError(f"{name}: {value!r} is not an integer of at least {least}")


_LEAST = {
    "slice_bytes": 1,
    "staging_buffers": 2,
    "relay_blocks": 1,
    "break_even_bytes": 0,
    "max_helpers": 0,
    "outstanding": 1,
}
_OPTIONAL = ("slice_bytes", "break_even_bytes")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
