"""Who updates which layer: the CPU, or the device with state that is streamed through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

ASSUMED = 3.5e9  # parameters a second, of either, until they are measured: halves are a fair start
WEIGHT = 0.5  # of a new measurement


@dataclass(frozen=True)
class UpdateRates:
    """Parameters a second that the CPU and the streaming device update while both work.

    Attributes
    ----------
    cpu, device : float
    samples : int
        Measurements in them; 0 means that both are assumed.
    """

    cpu: float = ASSUMED
    device: float = ASSUMED
    samples: int = 0

    @property
    def device_share(self) -> float:
        """The share of the device at which both end together."""
        return self.device / (self.cpu + self.device)

    def measured(self, cpu: float | None, device: float | None) -> UpdateRates:
        """With one step's rates taken in; None is one that had nothing to do."""
        if cpu is None and device is None:
            return self
        weight = 1.0 if self.samples == 0 else WEIGHT
        return replace(
            self,
            cpu=self.cpu if cpu is None else self.cpu + weight * (cpu - self.cpu),
            device=self.device if device is None else self.device + weight * (device - self.device),
            samples=self.samples + 1,
        )


def spread(sizes: Sequence[int], share: float) -> list[bool]:
    """Which layers the device updates, so that at every point of the order it has about its share.

    Parameters
    ----------
    sizes : sequence of int
        Parameters of the layers, in the order in which they are updated.
    share : float
        Of the parameters, 0 to 1.
    """
    chosen: list[bool] = []
    behind = 0.0  # what the device lacks of its share
    for size in sizes:
        behind += share * size
        take = size > 0 and behind >= size / 2
        behind -= size if take else 0
        chosen.append(take)
    return chosen
