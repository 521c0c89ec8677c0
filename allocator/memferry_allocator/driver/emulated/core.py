"""What every part of the emulated driver stands on: the machine, its lock, and who may still use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from ...errors import DeviceLostError, DriverError
from ..api import Driver
from ..handles import Event, Stream, require_stream
from ..integers import integer
from ..types import DeviceInfo, MemoryInfo
from .addressing import Memory
from .captures import Captures
from .engine import Engine
from .memory import Kind, Place
from .monitor import Monitor
from .options import EmulatedOptions
from .order import join
from .state import EventState, StreamState


class EmulatedCore(Driver):
    """Devices, life and the checks at every entry; the calls themselves are in the classes derived from it."""

    name: ClassVar[str] = "emulated"

    def __init__(self, options: EmulatedOptions | None = None) -> None:
        super().__init__()
        self.options = options or EmulatedOptions()
        self._lock = Monitor(self.require_usable)
        self._closed = False
        self._lost: set[int] = set()
        self._memory = Memory(self.options.device_count, self.options.device_memory)
        self._engine = Engine(self.options)
        self._captures = Captures(self._engine.threads)
        self._streams: dict[int, StreamState] = {}
        self._peers: set[tuple[int, int]] = set()

    # -- devices ------------------------------------------------------------------------------------
    @property
    def device_count(self) -> int:
        return self.options.device_count

    def device_info(self, device: int) -> DeviceInfo:
        self._device(device)
        return DeviceInfo(
            ordinal=device,
            name="Emulated accelerator",
            uuid=f"emulated-{device}",
            capacity=self.options.device_memory,
            pci_address=None,
            numa_node=None,
            compute_capability=None,
            capabilities={"HOST_REGISTER_SUPPORTED": 1, "READ_ONLY_HOST_REGISTER_SUPPORTED": 1},
        )

    def memory_info(self, device: int) -> MemoryInfo:
        memory = self._memory.devices[self._device(device)]
        return MemoryInfo(memory.capacity - memory.used, memory.capacity)

    def synchronize(self, device: int) -> None:
        with self._lock:
            self._captures.forbid_device(self._device(device), "synchronize")
            for state in self._on(device):
                self._engine.reach(state.queue.last, state.clock)

    # -- end ----------------------------------------------------------------------------------------
    def _run_finaliser(self, action: Callable[[], None]) -> None:
        self._lock.finalise(action)

    def close(self) -> None:
        if self._forked:
            return
        with self._lock:
            for state in self._streams.values():
                self._engine.scheduler.force(state.queue.last)
            self._closed = True

    # -- the emulated machine itself --------------------------------------------------------------------
    @property
    def now(self) -> float:
        """The virtual clock: seconds that the host has waited for devices."""
        return self._engine.clock.now

    @property
    def registered(self) -> int:
        """Bytes of host memory registered now."""
        return self._memory.host.total

    def lose(self, device: int) -> None:
        """Do to a device what a reset does: its work never runs, its memory is gone, its handles are dead."""
        with self._lock:
            self._lost.add(self._device(device))
            for state in self._on(device):
                self._engine.scheduler.drop(state.queue)
            self._engine.log.lose(state.actor for state in self._on(device))
            self._captures.drop(device)
            self._memory.devices[device].spoil()

    # -- inside -------------------------------------------------------------------------------------
    def _on(self, device: int) -> list[StreamState]:
        return [state for state in self._streams.values() if state.device == device]

    def _alive(self) -> None:
        self.require_usable()
        if self._closed:
            raise DriverError("CUDA_ERROR_DEINITIALIZED", "driver", "this driver object was closed")
        if len(self._lost) == self.options.device_count:
            raise _lost("driver", 0)

    def _device(self, device: int) -> int:
        device = integer("device", device)
        self._alive()
        if not 0 <= device < self.options.device_count:
            raise DriverError(
                "CUDA_ERROR_INVALID_DEVICE",
                "device",
                f"{device} of {self.options.device_count} emulated devices",
            )
        if device in self._lost:
            raise _lost("device", device)
        return device

    def _state(self, stream: Stream) -> StreamState:
        self._alive()
        state = require_stream(stream).handle
        if stream.driver is not self or not isinstance(state, StreamState) or state.closed:
            if stream.driver is self and isinstance(state, StreamState):
                join(self._engine.threads.clock, state.clock)  # who is told so knows that its work is done
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "stream", "closed, or of another driver")
        if state.device in self._lost:
            raise _lost("stream", state.device)
        return state

    def _event(self, event: Event) -> EventState:
        self._alive()
        if event.driver is not self or not isinstance(event.handle, EventState):
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", "event", "of another driver")
        if event.device in self._lost:
            raise _lost("event", event.device)
        return event.handle

    def _locate(self, ptr: int, nbytes: int, call: str) -> Place:
        self._alive()
        place = self._memory.locate(ptr, nbytes, call)
        if place.kind is Kind.DEVICE and place.device in self._lost:
            raise _lost(call, place.device)
        return place


def _lost(call: str, device: int) -> DeviceLostError:
    return DeviceLostError("CUDA_ERROR_CONTEXT_IS_DESTROYED", call, f"device {device} is lost")
