"""The errors of the training runtime."""

from memferry_allocator import MemFerryError, format_size


class OffloadError(MemFerryError):
    """Root of the runtime's errors."""


class UnsupportedError(OffloadError):
    """Something about a model, an optimizer or a call that offloading cannot honour."""


class CheckpointError(OffloadError):
    """A checkpoint that could not be written, is not whole, or does not belong to this model and optimizer."""


class RankError(OffloadError):
    """A rank of a process group has ended, failed, or differs from the others; training cannot go on."""


class DeviceKernelError(OffloadError):
    """The device kernels cannot be compiled on this machine; the CPU can still do their work."""


class PlanError(OffloadError):
    """A plan, or something that one is made from, that is not understood or cannot be used here."""


class UnknownLayerError(PlanError):
    """A name, or a pattern of names, that no layer has.

    Attributes
    ----------
    pattern : str
    close : tuple of str
        Some names that layers do have.
    """

    def __init__(self, pattern: str, close: tuple[str, ...]) -> None:
        known = f"layers have names such as {', '.join(close)}" if close else "the model has no layers"
        super().__init__(f"modes: no layer is called {pattern!r}; {known}")
        self.pattern = pattern
        self.close = close


class BudgetError(OffloadError):
    """A memory budget is too small.

    Attributes
    ----------
    budget : str
        ``"device_memory"`` or ``"host_memory"``.
    given, smallest : int
        Bytes given, and the fewest known to be enough.
    """

    def __init__(self, budget: str, given: int, smallest: int, reason: str) -> None:
        super().__init__(
            f"{budget}: {format_size(given)} is too small: {reason}; "
            f"the smallest that works is {format_size_up(smallest)} ({smallest} bytes)"
        )
        self.budget = budget
        self.given = given
        self.smallest = smallest


def format_size_up(nbytes: int) -> str:
    """`nbytes` as whole MiB or KiB, rounded up, so that the text is itself enough."""
    shift, unit = (20, "MiB") if nbytes >= 16 << 20 else (10, "KiB")
    return f"{-(-nbytes // (1 << shift))}{unit}"
