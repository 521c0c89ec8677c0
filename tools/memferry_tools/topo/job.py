"""One run of ``memferry topo``, from its options to its exit status."""

from __future__ import annotations

from memferry_allocator import DriverError, open_driver
from memferry_transport import TopologyError
from memferry_transport.measure import has_virtual_clock
from memferry_transport.topology import Topology, describe, discover, dumps, load, machine

from ..errors import ToolError
from ..files import check_writable, write_whole
from ..screen import Screen
from ..version import version
from . import picture
from .options import TopoOptions


def run(options: TopoOptions) -> int:
    """Find a machine's devices and links, show them, and keep them."""
    check_writable(options.json, "--json")
    check_writable(options.picture, "--picture")
    if options.picture is not None:
        picture.check_drawable()
    topology, emulated = _find(options)
    screen = Screen()
    screen.title(f"memferry {version()}: topo{', EMULATED' if emulated else ''}")
    screen.lines(describe(topology))
    if options.json is not None:
        write_whole(options.json, dumps(topology) + "\n", "--json")
        screen.rows([("written", str(options.json))])
    if options.picture is not None:
        write_whole(options.picture, picture.draw(topology, emulated=emulated), "--picture")
        screen.rows([("written", str(options.picture))])
    return 0


def _find(options: TopoOptions) -> tuple[Topology, bool]:
    """The topology that is wanted, and whether its devices are emulated here."""
    if options.fixture is not None:
        return machine(options.fixture), False
    if options.file is not None:
        try:
            return load(options.file), False
        except OSError as error:
            raise ToolError(f"--from: {options.file} cannot be read: {error.strerror}") from None
        except TopologyError as error:
            raise ToolError(f"--from: {options.file}: {error}") from None
    try:
        driver = open_driver(options.device)
    except DriverError as error:
        raise ToolError(f"--device {options.device}: {error}") from error
    return discover(driver), has_virtual_clock(driver)
