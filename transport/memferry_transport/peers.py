"""Copies from one device's memory to another's: over their own link, or by way of the host."""

from __future__ import annotations

from collections.abc import Sequence

from memferry_allocator import DeviceLostError, Driver, DriverError, Event, HostArena, Span, Stream

from .carriers import Carrier, DirectLink, Relay
from .errors import InvalidTransferError
from .health import Edge, Health, allow_peer_access, arrives
from .paths import Path
from .pieces import Piece, require_apart, require_same_size
from .runs import Run
from .transfer import Transfer


class Peers:
    """The ways between an engine's device and others.  The engine's lock is held round every call.

    Parameters
    ----------
    driver : Driver
    device : int
    buffers, slice_bytes : int
        Of the staging in host memory, where two devices do not reach each other.
    health : Health
    """

    def __init__(self, driver: Driver, device: int, *, buffers: int, slice_bytes: int, health: Health) -> None:
        self._driver, self._device = driver, device
        self._buffers, self._slice_bytes = buffers, slice_bytes
        self._health = health
        self._lane: Stream | None = None
        self._bounces: dict[Edge, Relay] = {}

    def copy(self, regions: Sequence[tuple[Span, Span]], stream: Stream) -> Transfer:
        """Copy regions as one transfer, in the order of `stream`.

        Raises
        ------
        InvalidTransferError
            Sizes differ, a range is on no device, both are on others, or ranges overlap; nothing was copied.
        DriverError, RaceError
            As for `TransferEngine.copy`.
        """
        hands: dict[Edge, list[Piece]] = {}
        for dst, src in regions:
            require_same_size(dst, src, "d2d")
            if dst.nbytes:
                hands.setdefault(self._edge(dst, src), []).append(Piece(dst.ptr, src.ptr, dst.nbytes))
        require_apart(regions)
        begin = stream.record()
        runs: list[Run] = []
        try:
            for edge, pieces in hands.items():
                with self._driver.beside_captures():
                    carrier = self._carrier(edge)
                runs.append(self._run(carrier, begin, pieces))
                self._submit(edge, runs)
        finally:
            for run in runs:
                for event in run.end():
                    stream.wait(event)
        shares = [run.share() for run in runs]
        nbytes, copies = sum(share.nbytes for share in shares), sum(share.copies for share in shares)
        staged = any(isinstance(run.carrier, Relay) and run.sent for run in runs)
        over = "peer path by way of the host" if staged else "peer path"
        return Transfer(None, nbytes, copies, stream.record(), over=over)

    def _run(self, carrier: Carrier, begin: Event, pieces: Sequence[Piece]) -> Run:
        run = Run(Path(self._device), carrier, begin, timed=False)
        run.take(pieces)
        return run

    def _submit(self, edge: Edge, runs: list[Run]) -> None:
        """Submit the last of `runs`; if its link fails, by way of the host instead."""
        run, begin = runs[-1], runs[-1].begin
        try:
            while run.todo:
                run.step()
        except DriverError as error:
            left = run.fail(error)
            if edge.source == edge.target or isinstance(run.carrier, Relay):
                raise
            heir = self._run(self._host(edge), begin, left)
            heir.follow(run.end())
            runs.append(heir)
            while heir.todo:
                heir.step()
            if isinstance(error, DeviceLostError):
                self._health.lost(edge, str(error))
            else:
                self._health.failed(edge, str(error))

    def _edge(self, dst: Span, src: Span) -> Edge:
        ends = []
        for span in (src, dst):
            device = self._driver.device_of(span.ptr)
            if device is None:
                raise InvalidTransferError(
                    f"d2d copy: the {span.nbytes} bytes at {span.ptr:#x} are not an allocation of a device; "
                    "give regions of one direction"
                )
            ends.append(device)
        if self._device not in ends:
            raise InvalidTransferError(
                f"d2d copy: {src.nbytes} bytes from {src.ptr:#x} on device {ends[0]} to {dst.ptr:#x} on device "
                f"{ends[1]}: neither is device {self._device}; take an engine of one of the two"
            )
        return Edge(*ends)

    @property
    def lane(self) -> Stream:
        """The stream of copies that take the devices' own link."""
        if self._lane is None:
            self._lane = self._driver.create_stream(self._device)
        return self._lane

    def _carrier(self, edge: Edge) -> Carrier:
        """What carries bytes between two devices now."""
        if edge.source == edge.target or self._reached(edge):
            return DirectLink(self._driver, self.lane)
        return self._host(edge)

    def _reached(self, edge: Edge) -> bool:
        """Whether the link between two devices carries bytes as they are."""
        if self._health.is_verified(edge):
            return self._health.usable(edge)
        if not self._health.usable(edge) or self._driver.capture_under_way():
            return False
        source, target = edge.source, edge.target
        assert source is not None
        assert target is not None
        if not (self._driver.can_access_peer(source, target) and self._driver.can_access_peer(target, source)):
            return False
        try:
            allow_peer_access(self._driver, source, target)
            allow_peer_access(self._driver, target, source)
            arrived = arrives(self._driver, [source, target], on=self._device)
        except DriverError as error:
            self._health.suspend(edge, str(error))
            return False
        if not arrived:
            self._health.suspend(edge, f"a pattern came changed over {edge}")
            return False
        self._health.verified(edge)
        return True

    def _host(self, edge: Edge) -> Relay:
        """Staging in host memory; each hop on streams of the device whose memory it is about."""
        bounce = self._bounces.get(edge)
        if bounce is None:
            assert edge.source is not None
            arena = HostArena(self._driver, self._buffers * -(-self._slice_bytes // 4096) * 4096)
            buffers = [arena.cut(self._slice_bytes).ptr for _ in range(self._buffers)]
            bounce = Relay(self._driver, edge.source, buffers, self._slice_bytes, arena.close, last=edge.target)
            self._bounces[edge] = bounce
        return bounce

    def close(self) -> None:
        """Wait for what is under way and give everything back; a second call does nothing."""
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.close()
        while self._bounces:
            _, bounce = self._bounces.popitem()
            bounce.close()
