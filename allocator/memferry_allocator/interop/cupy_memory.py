"""Any memory resource as cupy's allocator: ``cupy.cuda.set_allocator(cupy_allocator(pool))``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ..device.resource import MemoryResource
from ..driver import Stream
from ..errors import OutOfMemory
from .streams import BorrowedStreams


class _Block:
    """What cupy holds on to while it uses the memory."""

    def __init__(self, resource: MemoryResource, nbytes: int, stream: Stream) -> None:
        self.ptr = resource.allocate(nbytes, stream=stream)
        give_back = functools.partial(resource.deallocate, self.ptr, nbytes, stream=stream)
        weakref.finalize(self, resource.driver.finalise, give_back).atexit = False


def cupy_allocator(resource: MemoryResource) -> Callable[[int], Any]:
    """A function for ``cupy.cuda.set_allocator``: memory of `resource`, in the order of cupy's current stream.

    Memory is given back on the stream that was current when it was asked for, as cupy's own pool does.  cupy's
    error for want of memory is raised from ours, which says how much was asked for and what there is.
    """
    import cupy

    streams = BorrowedStreams(resource.driver, resource.device)

    def allocate(nbytes: int) -> Any:
        stream = streams[cupy.cuda.get_current_stream()]
        try:
            block = _Block(resource, nbytes, stream)
        except OutOfMemory as error:
            raise cupy.cuda.memory.OutOfMemoryError(error.size, error.used, error.limit) from error
        memory = cupy.cuda.UnownedMemory(block.ptr, nbytes, block, resource.device)
        return cupy.cuda.MemoryPointer(memory, 0)

    return allocate
