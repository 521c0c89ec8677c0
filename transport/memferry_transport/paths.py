"""The ways between host memory and a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

By = Literal["staging", "kernel"]


@dataclass(frozen=True, order=True)
class Path:
    """One way between host memory and a device, for either direction.

    Attributes
    ----------
    device : int
        The device that is loaded or unloaded.
    helper : int, optional
        The device whose host link is used, and that passes the bytes on to, or takes them from, `device` over
        their own link.  None: the device's own link to the host.
    by : {"staging", "kernel"}
        How a helper does it: its copy engines in two hops, slice by slice by way of staging buffers in its memory;
        or a kernel of its own in one, which reads at one end what it writes at the other.
    """

    device: int
    helper: int | None = None
    by: By = "staging"

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.device, self.helper, self.by)))

    def __hash__(self) -> int:  # asked a dozen times a transfer
        return self._hash  # type: ignore[attr-defined, no-any-return]

    @property
    def direct(self) -> bool:
        return self.helper is None

    @property
    def by_kernel(self) -> bool:
        return self.by == "kernel"

    def __str__(self) -> str:
        if self.helper is None:
            return "direct"
        return f"via device {self.helper}" + (" by its kernel" if self.by_kernel else "")
