"""Machines that come with the package, and what the link model says of figures published of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path as File

from ..cost import finish_time
from ..errors import TopologyError
from .document import load
from .model import Topology
from .parts import Published
from .ways import together

_FILES = File(__file__).parent / "machines"


def machine_names() -> tuple[str, ...]:
    """The machines that come with the package."""
    return tuple(sorted(file.stem for file in _FILES.glob("*.json")))


def machine(name: str) -> Topology:
    """A machine that comes with the package.

    Raises
    ------
    TopologyError
        There is none of that name.
    """
    if name not in machine_names():
        raise TopologyError("name", f"no machine {name!r}; there are {', '.join(machine_names())}")
    return load(_FILES / f"{name}.json")


@dataclass(frozen=True)
class Comparison:
    """A published rate and what the link model predicts, in bytes per second."""

    machine: str
    figure: Published
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over published: above 1, the links promise more than was reached."""
        return self.predicted / self.figure.bytes_per_second

    def __str__(self) -> str:
        ways = "+".join("direct" if path.direct else str(path.helper) for path in self.figure.paths)
        return (
            f"{self.machine}: {self.figure.nbytes} bytes {self.figure.direction.value} over {ways}: "
            f"{self.predicted / 1e9:.1f} GB/s predicted, {self.figure.bytes_per_second / 1e9:.1f} published "
            f"({self.figure.source}), ratio {self.ratio:.2f}"
        )


def predicted_over_published(topologies: Iterable[Topology] | None = None) -> tuple[Comparison, ...]:
    """The link model against every published figure; of the package's machines by default.

    A figure to which a topology's costs were fitted tests nothing but the fit.
    """
    if topologies is None:
        topologies = map(machine, machine_names())
    return tuple(
        Comparison(topology.name, figure, _predict(topology, figure))
        for topology in topologies
        for figure in topology.published
    )


def _predict(topology: Topology, figure: Published) -> float:
    costs = [cost for _, cost in together(topology, figure.paths, figure.direction, figure.slice_bytes)]
    return figure.nbytes / finish_time(figure.nbytes, costs)
