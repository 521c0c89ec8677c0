"""Memory and streams, shared with other libraries: each file is one of them, and loads it only when called.

What needs no library is here; for torch, cupy, numba and rmm import the file of that name.
"""

from .array import Array, as_device, as_host, as_pinned
from .cuda_array import cuda_array_interface
from .dlpack import DeviceType, Imported, from_dlpack
from .dtypes import element_type
from .streams import BorrowedStreams, borrow_stream

__all__ = [
    "Array",
    "BorrowedStreams",
    "DeviceType",
    "Imported",
    "as_device",
    "as_host",
    "as_pinned",
    "borrow_stream",
    "cuda_array_interface",
    "element_type",
    "from_dlpack",
]
