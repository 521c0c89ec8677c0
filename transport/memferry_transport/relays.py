"""The relays of an engine: made when first needed, verified before they carry data."""

from __future__ import annotations

from memferry_allocator import DeviceLostError, Direction, Driver, DriverError, UnsupportedError

from .carriers import KernelRelay, Relay, device_relay
from .health import Edge, Health, allow_peer_access, arrives
from .paths import Path


class Relays:
    """Relays over helpers, one for each path and direction.  The engine's lock is held round every call.

    Parameters
    ----------
    driver : Driver
    device : int
        The engine's own.
    buffers, slice_bytes : int
        Of each relay that stages.
    blocks : int
        Of each kernel.
    health : Health
    """

    def __init__(
        self, driver: Driver, device: int, *, buffers: int, slice_bytes: int, blocks: int, health: Health
    ) -> None:
        self._driver, self._device = driver, device
        self._buffers, self._slice_bytes, self._blocks = buffers, slice_bytes, blocks
        self._health = health
        self._relays: dict[tuple[Path, Direction], Relay | KernelRelay] = {}

    def get(self, path: Path, direction: Direction) -> Relay | KernelRelay | None:
        """The relay of a path; None if it cannot be used now, which `Health` knows then."""
        helper = path.helper
        assert helper is not None
        try:
            verified = self._kernel_verified if path.by_kernel else self._verified
            if not verified(path, helper, direction):
                return None
            relay = self._relays.get((path, direction))
            if relay is None:
                relay = self._relays[path, direction] = self._made(path, helper, direction)
            return relay
        except (DeviceLostError, UnsupportedError) as error:
            self._health.lost(path, str(error))
        except DriverError as error:
            self._health.suspend(path, str(error))
        return None

    def staging_nbytes(self, helper: int) -> int:
        """Memory of a helper that is taken now."""
        staged = sum(path.helper == helper and not path.by_kernel for path, _ in self._relays)
        return staged * self._buffers * self._slice_bytes

    def _made(self, path: Path, helper: int, direction: Direction) -> Relay | KernelRelay:
        if path.by_kernel:
            return KernelRelay(self._driver, helper, direction, self._blocks)
        return device_relay(self._driver, helper, self._buffers, self._slice_bytes)

    def _verified(self, path: Path, helper: int, direction: Direction) -> bool:
        """Whether both hops carry bytes as they are; looked at once, and again after trouble."""
        device = self._device
        inward = direction is Direction.HOST_TO_DEVICE
        stops = [helper, device] if inward else [device, helper]
        hops = Edge(*stops), Edge(None, helper) if inward else Edge(helper, None)
        if self._health.is_verified(*hops):
            return True
        if not self._may_look(path, helper):
            return False
        if not arrives(self._driver, [helper], on=helper):
            self._health.suspend(path, f"a pattern came back changed from device {helper}")
            return False
        if not arrives(self._driver, stops, on=helper):
            self._health.suspend(path, f"a pattern came changed over {Edge(*stops)}")
            return False
        self._health.verified(Edge(None, helper), Edge(helper, None), *hops)
        return True

    def _kernel_verified(self, path: Path, helper: int, direction: Direction) -> bool:
        """Whether the helper's kernel carries bytes as they are; looked at as often."""
        inward = direction is Direction.HOST_TO_DEVICE
        edge = Edge(None, self._device, helper) if inward else Edge(self._device, None, helper)
        if self._health.is_verified(edge):
            return True
        if not self._may_look(path, helper):
            return False
        self._driver.prepare_kernel_copy(helper)
        if not arrives(self._driver, [self._device], on=helper, kernel=direction):
            self._health.suspend(path, f"a pattern came changed over {edge}")
            return False
        self._health.verified(edge)
        return True

    def _may_look(self, path: Path, helper: int) -> bool:
        """Let the two devices reach each other; False if they cannot, or nothing may wait for a device now."""
        device = self._device
        if self._driver.capture_under_way():  # waiting for a device would break it
            return False
        if not (self._driver.can_access_peer(helper, device) and self._driver.can_access_peer(device, helper)):
            self._health.lost(path, f"devices {helper} and {device} cannot reach each other's memory")
            return False
        allow_peer_access(self._driver, helper, device)
        allow_peer_access(self._driver, device, helper)
        return True

    def close(self) -> None:
        """Wait for what is under way and give everything back; a second call does nothing."""
        while self._relays:
            _, relay = self._relays.popitem()
            relay.close()
