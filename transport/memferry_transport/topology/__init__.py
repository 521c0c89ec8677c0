"""The machine that bytes move in: its devices and links, found, read, written and reasoned about."""

from .assign import Assignment, assign
from .discover import discover
from .document import dump, dumps, load, loads
from .emulated import emulated_options
from .model import Topology
from .parts import (
    Device,
    FittedCosts,
    HostLink,
    Pcie,
    PeerKind,
    PeerLink,
    Published,
    Uplink,
    UplinkKind,
)
from .published import Comparison, machine, machine_names, predicted_over_published
from .render import describe, render_matrix
from .ways import candidates, link_costs, prior_calibration

__all__ = [
    "Assignment",
    "Comparison",
    "Device",
    "FittedCosts",
    "HostLink",
    "Pcie",
    "PeerKind",
    "PeerLink",
    "Published",
    "Topology",
    "Uplink",
    "UplinkKind",
    "assign",
    "candidates",
    "describe",
    "discover",
    "dump",
    "dumps",
    "emulated_options",
    "link_costs",
    "load",
    "loads",
    "machine",
    "machine_names",
    "predicted_over_published",
    "prior_calibration",
    "render_matrix",
]
