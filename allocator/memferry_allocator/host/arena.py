"""Host pages for state that an accelerator reaches: huge, resident, registered once, of the exact size."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..driver import Driver, Event, Span, Stream
from ..errors import ClosedError, InvalidRequestError, OutOfMemory
from ..sizes import align_up, format_size
from . import libc, numa
from .checks import require_driver, require_int, require_span, require_uses
from .handle import Registration
from .limits import require_memory
from .lock import FinaliserLock
from .pages import HostPages, as_array
from .registration import MAX_CHUNK, registrations
from .suballocator import SubAllocator, Taken, uses_of

SLICE_ALIGNMENT = 256


@dataclass(frozen=True)
class ArenaOptions:
    """How a host arena comes to be.

    Attributes
    ----------
    huge_pages : bool
        Ask for 2 MiB pages: they are touched and registered several times faster.
    touch : bool
        Make every page resident at once, in parallel, instead of one fault at a time later.
    register : bool
        Pin the pages and map them into every device.
    threads : int
        Threads that touch pages; 0 takes the processors this process may use.
    numa_node : int or None
        Take the pages from this NUMA node.  `HostArena.notes` says where that could not be done.
    max_chunk : int
        Most bytes that are registered in one driver call, at least a page.
    """

    huge_pages: bool = True
    touch: bool = True
    register: bool = True
    threads: int = 0
    numa_node: int | None = None
    max_chunk: int = MAX_CHUNK

    def __post_init__(self) -> None:
        if require_int(self.threads, "arena: threads") < 0:
            raise InvalidRequestError(f"arena: {self.threads} threads; 0 takes all processors")
        if self.numa_node is not None and require_int(self.numa_node, "arena: numa_node") < 0:
            raise InvalidRequestError(f"arena: numa_node {self.numa_node} is not a node; None takes any")
        if require_int(self.max_chunk, "arena: max_chunk") < mmap.PAGESIZE:
            raise InvalidRequestError(
                f"arena: max_chunk {self.max_chunk} is less than a page of {mmap.PAGESIZE} bytes"
            )


class HostArena:
    """One range of host pages, parts of which are cut off for good or allocated and given back.

    The arena owns its pages, and whoever holds a slice's array keeps the arena: pages are unmapped only
    when no array of them is left, and after the work of every device.  Sizes are rounded up to whole pages
    (4 KiB), never further.  Thread-safe.  A finaliser may give back at any time; what else it asks for in the
    middle of another call of its thread is refused.

    Parameters
    ----------
    driver : Driver
    nbytes : int
        Size in bytes.
    options : ArenaOptions, optional

    Attributes
    ----------
    address, nbytes : int
        Where the pages are, and their size in bytes.
    huge_pages : bool
        Whether the kernel has agreed to huge pages.
    notes : tuple of str
        What was asked for and could not be had, in words.
    registration : Registration or None

    Raises
    ------
    OutOfMemory
        The operating system has no such range, or not the pages to touch.
    RegistrationError
        The pages could not be registered; nothing is left mapped.
    ForkedError
        This process is a child of the one that opened the driver.
    """

    def __init__(self, driver: Driver, nbytes: int, options: ArenaOptions | None = None) -> None:
        require_driver(driver, "arena").require_usable()
        size = require_int(nbytes, "arena")
        if size <= 0:
            raise InvalidRequestError(f"arena: {format_size(size)} is not more than zero bytes")
        if not isinstance(options, ArenaOptions | None):
            raise InvalidRequestError(f"arena: options={options!r} are not ArenaOptions")
        self.driver = driver
        self.options = options or ArenaOptions()
        self.nbytes = align_up(size, mmap.PAGESIZE)
        if self.options.touch:
            require_memory(self.nbytes, "host arena")
        self._pages = HostPages.anonymous(self.nbytes)
        self.address = self._pages.address
        self.registration: Registration | None = None
        self._closed = False
        self._lock = FinaliserLock()  # guards the parts
        self._parts = SubAllocator(self.address, self.nbytes)
        self._live: set[Span] = set()  # adding and removing one is a single step of the interpreter
        self._peak = 0
        try:
            self._prepare()
        except BaseException:
            if registrations(driver).is_clear(self.address, self.nbytes):
                self._pages.unmap()
            raise

    def _prepare(self) -> None:
        options = self.options
        self.huge_pages = options.huge_pages and libc.advise_huge(self.address, self.nbytes)
        notes = [] if self.huge_pages == options.huge_pages else ["no huge pages: the kernel has none to give"]
        if options.numa_node is not None:
            notes.append(numa.bind(self.address, self.nbytes, options.numa_node))
        self.notes = tuple(note for note in notes if note)
        if options.touch:
            self._pages.touch(options.threads)
        if options.register:
            self.registration = registrations(self.driver).register(
                self.address, self.nbytes, owner=self._pages, name="HostArena", max_chunk=options.max_chunk
            )

    @property
    def used(self) -> int:
        """Bytes cut off and allocated now, and what the alignment of cuts has left out."""
        self.driver.require_usable()
        with self._lock:
            self._settle()
            return self.nbytes - self._parts.free

    @property
    def peak(self) -> int:
        """Most bytes used at once so far."""
        return self._peak

    @property
    def largest_free(self) -> int:
        """Bytes of the largest part that could be allocated now."""
        self.driver.require_usable()
        with self._lock:
            self._settle()
            return self._parts.largest

    @property
    def closed(self) -> bool:
        return self._closed

    def cut(self, nbytes: int, *, alignment: int = SLICE_ALIGNMENT) -> Span:
        """The next `nbytes` bytes of the arena, aligned to a power of two; 0 is a valid empty slice.

        A slice stays cut off as long as the arena lives: slices follow one another in the order of the calls.

        Raises
        ------
        OutOfMemory
            The rest of the arena is smaller.
        """
        nbytes, alignment = self._require_request("cut", nbytes, alignment)
        if nbytes == 0:
            return Span(self.address, 0)
        with self._lock:
            self._settle()
            taken = self._parts.take_next(nbytes, alignment)
            if taken is None:
                raise self._out_of_memory(nbytes, alignment, self._parts.tail)
            self._count()
        self._await(taken)
        return taken.span

    def allocate(self, nbytes: int, *, alignment: int = SLICE_ALIGNMENT) -> Span:
        """`nbytes` bytes, aligned to a power of two, until `deallocate`; 0 bytes are a valid empty span.

        Best fit.  Blocks the calling thread until the work named by `deallocate` on these very bytes is
        done.  Contents are undefined.

        Raises
        ------
        OutOfMemory
            No free part is large enough; nothing was changed.
        """
        nbytes, alignment = self._require_request("allocate", nbytes, alignment)
        if nbytes == 0:
            return Span(self.address, 0)
        with self._lock:
            self._settle()
            taken = self._parts.take(nbytes, alignment)
            if taken is None:
                raise self._out_of_memory(nbytes, alignment, self._parts.largest)
            self._count()
        self._await(taken)
        self._live.add(taken.span)  # only now: nobody can give back what was not handed out
        return taken.span

    def deallocate(self, span: Span, *, uses: Mapping[Stream, Event] | None = None) -> None:
        """Give back what `allocate` returned.  It never waits: a finaliser may call it, whatever it interrupts.

        Parameters
        ----------
        span : Span
        uses : mapping of Stream to Event, optional
            After which events the last use on each stream is over.  None or an empty one says that every
            use is over already.

        Raises
        ------
        InvalidRequestError
            Not a span that is allocated here: given back twice, a part of one, a cut, or another arena's.
            Or `uses` has what is no stream and event of this driver, or an event of a graph capture.
            Nothing was changed.
        """
        self._require_open()
        span = require_span(span, "arena")
        after = uses_of(span, require_uses(uses, self.driver, "arena"))
        if span.nbytes == 0 and span.ptr == self.address:
            return
        try:
            self._live.remove(span)
        except KeyError:
            raise InvalidRequestError(
                f"host arena: {span.nbytes} bytes at {span.ptr:#x} are not allocated here; they were given "
                "back twice, are a part of an allocation, were cut, or are another arena's"
            ) from None
        self._give(Taken(span, after))

    def array(self, span: Span) -> npt.NDArray[np.uint8]:
        """The bytes of a slice as a NumPy array that keeps the arena mapped.

        Raises
        ------
        InvalidRequestError
            `span` is not inside the arena.
        """
        self._require_open()
        span = require_span(span, "arena")
        if span.nbytes < 0 or span.ptr < self.address or span.ptr + span.nbytes > self.address + self.nbytes:
            raise InvalidRequestError(
                f"arena: {span.nbytes} bytes at {span.ptr:#x} are not inside its {self.nbytes} bytes at "
                f"{self.address:#x}"
            )
        return as_array(span, self)

    def close(self) -> None:
        """Unregister now: no device may use the pages any more.  A second call does nothing.

        Arrays of the pages stay valid for the host; the pages are unmapped with the last of them.

        Raises
        ------
        DriverError, RaceError
            Work on the pages is not over; they stay registered until a later call succeeds.
        """
        self._closed = True
        if self.registration is not None:
            self.registration.close()

    def _require_open(self) -> None:
        self.driver.require_usable()
        if self._closed:
            raise ClosedError("arena: it was closed; make a new HostArena")

    def _settle(self) -> None:
        """Take in what was given back meanwhile, for who has just taken the lock."""
        if not self._lock.settle():
            raise InvalidRequestError(
                "arena: a finaliser asks for this in the middle of another call of its thread; there it may only "
                "give back"
            )

    def _give(self, taken: Taken) -> None:
        self._lock.finalise(functools.partial(self._parts.give, taken.span, taken.uses))

    def _require_request(self, call: str, nbytes: int, alignment: int) -> tuple[int, int]:
        self._require_open()
        size, alignment = require_int(nbytes, "arena: bytes"), require_int(alignment, "arena: alignment")
        if size < 0 or alignment <= 0 or alignment & (alignment - 1) or alignment.bit_length() > 64:
            raise InvalidRequestError(
                f"arena: cannot {call} {format_size(size)} aligned to {format_size(alignment)}"
            )
        return size, alignment

    def _await(self, taken: Taken) -> None:
        """Wait, outside the lock, until nobody uses a part any more; give it back if that fails."""
        try:
            for event in {use.event for use in taken.uses}:
                event.synchronize()
        except BaseException:
            self._give(taken)
            raise

    def _count(self) -> None:
        self._peak = max(self._peak, self.nbytes - self._parts.free)

    def _out_of_memory(self, nbytes: int, alignment: int, left: int) -> OutOfMemory:
        used = self.nbytes - self._parts.free
        return OutOfMemory(
            f"host arena: asked for {format_size(nbytes)} aligned to {alignment}, at most {format_size(left)} in "
            f"one piece of {format_size(self.nbytes)} left; give something back, or make the arena larger",
            size=nbytes,
            used=used,
            limit=self.nbytes,
            budget="host arena",
        )
