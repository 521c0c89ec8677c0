"""The transfer engine: copies between host and devices, off the compute stream, in its order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from memferry_allocator import Direction, Driver, Span, Stream, registrations
from memferry_allocator.driver import require_stream

from . import book
from .borrowed import Borrowed, HelperUse
from .calibration import Calibration
from .errors import InvalidTransferError
from .health import Health, HealthReport
from .job import Job, QueuedTransfer
from .lane import Lane
from .multipath import MultiPath
from .options import TransferOptions
from .peers import Peers
from .pieces import Piece, host_pieces, inferred
from .planner import Planner
from .relays import Relays
from .runs import Run
from .shared_queue import SharedQueue
from .transfer import Transfer

IN, OUT = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST


class TransferEngine:
    """Moves bytes between host memory and one device, each direction on a stream of its own, and between devices.

    A transfer asked for on a consumer's stream starts after what that stream already holds, and what the
    stream gets later starts after the transfer; beside it, the stream's kernels and the other direction's
    copies go on.  Long transfers go over the links of other devices too, if a calibration says that this is
    faster.  A `memferry_allocator.Copier`.  Thread-safe.

    Parameters
    ----------
    driver : Driver
    device : int
    options : TransferOptions, optional
    calibration : Calibration, optional
        What the ways of this machine cost.  Without it, and without helpers named in the options, every transfer
        is a plain copy.
    clock : callable
        Seconds: for how long a failing way is left alone, and since when others may borrow this device's link.
    """

    def __init__(
        self,
        driver: Driver,
        device: int,
        *,
        options: TransferOptions | None = None,
        calibration: Calibration | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.driver = driver
        self.device = device
        self.options = options or TransferOptions()
        self._clock = clock
        self._health = Health(clock)
        self._planner = Planner(driver, device, self.options, calibration, self._health)
        self._require_helpers()
        size, buffers = self._planner.slice_bytes, self.options.staging_buffers
        blocks = self.options.relay_blocks
        self._relays = Relays(
            driver, device, buffers=buffers, slice_bytes=size, blocks=blocks, health=self._health
        )
        self._peers = Peers(driver, device, buffers=buffers, slice_bytes=size, health=self._health)
        self._lock = threading.Lock()
        self._inward, self._outward = self._lane_of(IN), self._lane_of(OUT)
        self._multi_path = MultiPath(
            driver, self._planner, self._relays, self._health, self.lane, timed=self.options.adaptive
        )
        self._registered = registrations(driver)
        self._between = 0
        self._borrowed = Borrowed()
        self._begin = driver.create_event(device)  # of plain copies, recorded anew for each
        self._queued = self.options.mode == "queue"
        book.enter(driver, self)

    def _require_helpers(self) -> None:
        for direction in Direction:
            for path in self._planner.paths(direction)[1:]:
                if path.helper == self.device or not 0 <= (path.helper or 0) < self.driver.device_count:
                    raise InvalidTransferError(
                        f"helpers: device {path.helper} is no other device of the {self.driver.device_count} here "
                        f"than {self.device}; name those whose links are to be used"
                    )

    def lane(self, direction: Direction) -> Stream:
        """The stream that carries a direction; a transfer asked for on it needs no events around it."""
        return (self._inward if direction is IN else self._outward).stream

    def idle_for(self, direction: Direction) -> float:
        """Seconds since a copy of a direction was asked for; infinite before the first."""
        return self._clock() - (self._inward if direction is IN else self._outward).used

    @property
    def bytes_moved(self) -> dict[Direction, int]:
        """Bytes submitted so far, by direction."""
        return {lane.direction: lane.moved for lane in (self._inward, self._outward)}

    @property
    def bytes_between_devices(self) -> int:
        """Bytes submitted so far from device to device."""
        return self._between

    def health(self) -> HealthReport:
        """What is known of each way; `str` of it is meant to be read."""
        paths = dict.fromkeys(path for direction in Direction for path in self._planner.paths(direction))
        return self._health.report(list(paths))

    def helpers(self) -> tuple[HelperUse, ...]:
        """What each device whose link may be used has carried, and what of its memory is taken for that."""
        paths = (path for direction in Direction for path in self._planner.paths(direction))
        devices = dict.fromkeys(path.helper for path in paths if path.helper is not None)
        with self._lock:
            carried, staging = self._borrowed.carried, self._relays.staging_nbytes
            return tuple(HelperUse(each, carried(each, IN), carried(each, OUT), staging(each)) for each in devices)

    def require_arrived(self) -> None:
        """Find out whether a helper was lost with bytes on their way, of any transfer so far.

        Call it when everything asked for is waited for, and before what cannot be undone is done with the bytes:
        who only orders streams behind a transfer is told by nobody else.

        Raises
        ------
        TransferFailedError
            One was, since the last call.  What it was to bring may not be there.
        """
        with self._lock:
            self._borrowed.require_arrived()

    def copy(
        self,
        dst: Span,
        src: Span,
        direction: Direction | None = None,
        *,
        stream: Stream,
        direct: bool = False,
    ) -> Transfer:
        """Copy one region.

        Parameters
        ----------
        dst, src : Span
            Of equal size; a host side's pages must be registered.
        direction : Direction, optional
            None: as the addresses say, which may be from device to device.
        stream : Stream
            Whose order the transfer joins.
        direct : bool
            Over the device's own link alone: for bytes of which there is no other copy, should a helper be lost.

        Raises
        ------
        InvalidTransferError
            Sizes differ, host pages are not registered, or source and destination overlap; nothing was copied.
        DriverError, RaceError
            The driver refused a piece, on every way there is.  Pieces before it may be under way; what `stream`
            gets later comes after them, so that both ranges may be used again in its order.
        """
        plain = self._copy_plainly(dst, src, direction, stream)
        if plain is not None:
            return plain
        return self.copy_regions([(dst, src)], direction, stream=stream, direct=direct)

    def _copy_plainly(self, dst: Span, src: Span, direction: Direction | None, stream: Stream) -> Transfer | None:
        """A small copy of one piece, as most are: what it needs no list for costs it none; None if it is none."""
        lane = self._inward if direction is IN else self._outward if direction is OUT else None
        if lane is None or stream.__class__ is not Stream or stream.device != self.device:
            return None
        (to, nbytes), (of, size) = dst, src
        host = of if direction is IN else to
        if nbytes != size or nbytes >= lane.threshold or not self._registered.is_whole(host, nbytes):
            return None
        with self._lock:
            lane.used = self._clock()
            return self._copy_directly(((to, of, nbytes),), nbytes, lane, stream)

    def copy_regions(
        self,
        regions: Sequence[tuple[Span, Span]],
        direction: Direction | None = None,
        *,
        stream: Stream,
        direct: bool = False,
    ) -> Transfer:
        """Copy many ``(dst, src)`` regions as one transfer.  Parameters and errors as for `copy`."""
        transfer = self.start(regions, direction, stream=stream, direct=direct)
        if self._queued:
            transfer.wait(stream)
        return transfer

    def start(
        self,
        regions: Sequence[tuple[Span, Span]],
        direction: Direction | None = None,
        *,
        stream: Stream,
        direct: bool = False,
    ) -> Transfer:
        """Start a transfer after what `stream` holds, without a promise about what it gets later.

        That comes after the transfer only once `Transfer.wait` was called for it.  In the mode ``"queue"`` the
        call returns at once where `copy_regions` waits, and the transfer can be cancelled meanwhile.
        Parameters and errors as for `copy_regions`.
        """
        require_stream(stream, self.device)
        if direction is None:
            direction = inferred(self.driver, self._registered, regions)
            if direction is None:
                return self._copy_between(regions, stream)
        elif not isinstance(direction, Direction):
            raise InvalidTransferError(f"copy: {direction!r} is not a Direction")
        lane = self._inward if direction is IN else self._outward
        pieces, nbytes = [], 0
        for dst, src in regions:
            pieces += host_pieces(self._registered, dst, src, direction)
            nbytes += dst.nbytes
        with self._lock:
            lane.used = self._clock()
            if nbytes >= lane.threshold and not direct:
                transfer = self._copy_over_several(pieces, nbytes, lane, stream)
                if transfer is not None:
                    return transfer
            return self._copy_directly(pieces, nbytes, lane, stream)

    def _copy_over_several(
        self, pieces: Sequence[Piece], nbytes: int, lane: Lane, stream: Stream
    ) -> Transfer | None:
        """Submit a transfer to several ways, or line it up for them; None if one is to do it."""
        ways = self._multi_path
        if not ways.suits(pieces, nbytes, lane.direction, self.device, stream):
            return None
        if self._queued:
            job = ways.job(pieces, nbytes, lane.direction, stream)
            if job is None:
                return None
            lane.queue.put(job, lane.direction)
            return QueuedTransfer(job)
        transfer = ways.carry(pieces, nbytes, lane.direction, stream)
        if transfer is not None:
            lane.moved += nbytes
            self._borrowed.note(lane.direction, transfer.ways)
        return transfer

    def _copy_directly(
        self, pieces: Sequence[tuple[int, int, int]], nbytes: int, lane: Lane, stream: Stream
    ) -> Transfer:
        begin = self._begin
        if begin.recorded[0] is None:  # it is new, or a capture has it
            begin = self._begin = self.driver.create_event(self.device)
        event = self.driver.copy_beside(pieces, stream=stream, lane=lane.stream, begin=begin)
        lane.moved += nbytes
        return Transfer(lane.direction, nbytes, len(pieces), event)

    def _lane_of(self, direction: Direction) -> Lane:
        def may_pull(job: Job, run: Run, own: int, direct: int) -> bool:
            alone = not any(other.path.direct and other.error is None for other in job.runs)
            return alone or self._planner.may_pull(direction, run.path, job.left, own, direct)

        def ended(job: Job) -> None:
            if job.error is None:
                self._multi_path.blame(job.runs)
                lane.moved += sum(share.nbytes for share in job.shares)
                self._borrowed.note(direction, job.shares)

        stream = self.driver.create_stream(self.device)
        outstanding = self.options.outstanding
        queue = SharedQueue(self._lock, stream, outstanding=outstanding, may_pull=may_pull, ended=ended)
        lane = Lane(direction, stream, self._planner.threshold(direction), queue)
        return lane

    def _copy_between(self, regions: Sequence[tuple[Span, Span]], stream: Stream) -> Transfer:
        with self._lock:
            transfer = self._peers.copy(regions, stream)
            self._between += transfer.nbytes
        return transfer

    def close(self) -> None:
        """Wait for the transfers under way and give streams and staging back; a second call does nothing."""
        book.leave(self.driver, self)
        for lane in (self._inward, self._outward):
            lane.queue.close()
            lane.stream.close()
        with self._lock:
            self._peers.close()
            self._relays.close()
