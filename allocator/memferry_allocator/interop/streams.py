"""Other libraries' streams, borrowed: by the ``__cuda_stream__`` protocol, or as torch and cupy have them."""

from __future__ import annotations

from ..driver import Driver, Stream
from ..errors import InvalidRequestError, UnsupportedError

_KNOWN_VERSION = 0
_ATTRIBUTES = ("cuda_stream", "ptr")  # torch.cuda.Stream, cupy.cuda.Stream


def borrow_stream(driver: Driver, device: int, stream: object) -> Stream:
    """`stream` as a `Stream` of ours; its owner keeps it alive and closes it.

    Parameters
    ----------
    stream
        A `Stream`, anything with ``__cuda_stream__``, a ``torch.cuda.Stream``, or a ``cupy.cuda.Stream``.

    Raises
    ------
    InvalidRequestError
        None of these, or of another device.  None is refused: the default stream is an explicit choice.
    UnsupportedError
        A newer version of the protocol.
    """
    if isinstance(stream, Stream):
        if stream.driver is not driver or stream.device != device:
            raise InvalidRequestError(
                f"stream: it belongs to another device or driver ({stream.driver.name}:{stream.device}); make one "
                "for this device"
            )
        return stream
    owner_device = getattr(getattr(stream, "device", None), "index", device)
    if owner_device not in (device, None):
        raise InvalidRequestError(f"stream: it is on device {owner_device}, not on {device}")
    return driver.stream_from_handle(device, _handle_of(stream))


def _handle_of(stream: object) -> int:
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != _KNOWN_VERSION:
            raise UnsupportedError(
                f"stream: __cuda_stream__ version {version} is not known, only {_KNOWN_VERSION}"
            )
        return int(handle)
    for name in _ATTRIBUTES:
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    raise InvalidRequestError(
        f"stream: {stream!r} is no stream; pass a Stream, an object with __cuda_stream__, or a torch or cupy "
        "stream (the default stream too is named, for example torch.cuda.default_stream())"
    )


class BorrowedStreams:
    """One `Stream` for each stream of somebody else's, however often it is asked for.

    Memory that was used on a stream is reused there without waiting only if both are the same object.  What was
    borrowed is kept alive, so that its handle cannot come to mean another stream.

    Parameters
    ----------
    driver : Driver
    device : int
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self._known: dict[int, tuple[Stream, object]] = {}

    def __getitem__(self, stream: object) -> Stream:
        handle = stream if isinstance(stream, int) else _handle_of(stream)
        found = self._known.get(handle)
        if found is None:
            found = self._known.setdefault(handle, (self.driver.stream_from_handle(self.device, handle), stream))
        return found[0]
