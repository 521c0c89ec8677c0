"""Any memory resource under numba: an external memory manager plug-in, interface version 1.

``numba.cuda.set_memory_manager(numba_memory_manager(pool))`` before the first use of the device.
"""

from __future__ import annotations

from typing import Any

from ..device.resource import MemoryResource
from ..errors import OutOfMemory, UnsupportedError
from .streams import BorrowedStreams

_LEGACY_DEFAULT = 1
INTERFACE_VERSION = 1


def numba_memory_manager(resource: MemoryResource) -> type[Any]:
    """A manager class whose device memory is `resource`'s; host memory stays numba's own.

    numba names no stream: memory is taken and given back in the order of the legacy default stream, and given
    back only once numba's own deferral has run.
    """
    from ctypes import c_void_p

    from numba import cuda
    from numba.cuda import HostOnlyCUDAMemoryManager, MemoryInfo, MemoryPointer

    stream = BorrowedStreams(resource.driver, resource.device)[_LEGACY_DEFAULT]

    class Manager(HostOnlyCUDAMemoryManager):  # type: ignore[misc]  # numba has no types
        def initialize(self) -> None:
            super().initialize()

        def memalloc(self, size: int) -> Any:
            try:
                ptr = resource.allocate(size, stream=stream)
            except OutOfMemory as error:
                raise MemoryError(str(error)) from error

            def give_back() -> None:
                resource.deallocate(ptr, size, stream=stream)

            return MemoryPointer(cuda.current_context(), c_void_p(ptr), size, finalizer=give_back)

        def get_memory_info(self) -> Any:
            return MemoryInfo(*resource.driver.memory_info(resource.device))

        def get_ipc_handle(self, memory: Any) -> Any:
            raise UnsupportedError("numba: memory of this resource has no handles for other processes")

        @property
        def interface_version(self) -> int:
            return INTERFACE_VERSION

    return Manager
