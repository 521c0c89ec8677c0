"""The ways between host memory and a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Path:
    """One way between host memory and a device, for either direction.

    Attributes
    ----------
    device : int
        The device that is loaded or unloaded.
    helper : int, optional
        The device whose host link and staging buffers are used, and that passes the bytes on to, or takes them
        from, `device` over their own link.  None: the device's own link to the host.
    """

    device: int
    helper: int | None = None

    @property
    def direct(self) -> bool:
        return self.helper is None

    def __str__(self) -> str:
        return "direct" if self.helper is None else f"via device {self.helper}"
