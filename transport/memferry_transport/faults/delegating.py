"""A driver that passes every call on: the base of those that change a few."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from memferry_allocator import CaptureMode, Driver, Event, PageLocation, Span, Stream, registrations
from memferry_allocator.driver import COPY_BLOCKS, Bracket, DeviceInfo, MemoryInfo


class DelegatingDriver(Driver):
    """Everything as the driver behind it does it.

    Streams and events are that driver's own: what is asked of them directly does not come by here.  Host memory
    registered with either is known to both.  What else the driver offers, such as the emulated device's virtual
    clock, is reached as its own attribute.

    Parameters
    ----------
    driver : Driver
        Closed with this one.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.__dict__["name"] = driver.name  # errors name the driver that is meant
        super().__init__()
        registrations(driver)

    def __getattr__(self, name: str) -> Any:
        if name == "driver":
            raise AttributeError(name)
        return getattr(self.driver, name)

    @property
    def device_count(self) -> int:
        return self.driver.device_count

    def close(self) -> None:
        self.driver.close()

    def device_info(self, device: int) -> DeviceInfo:
        return self.driver.device_info(device)

    def memory_info(self, device: int) -> MemoryInfo:
        return self.driver.memory_info(device)

    def synchronize(self, device: int) -> None:
        self.driver.synchronize(device)

    def synchronize_all(self) -> None:
        self.driver.synchronize_all()

    def several_calls(self, device: int) -> AbstractContextManager[None]:
        return self.driver.several_calls(device)

    def malloc(self, device: int, nbytes: int) -> int:
        return self.driver.malloc(device, nbytes)

    def free(self, device: int, ptr: int) -> None:
        self.driver.free(device, ptr)

    def host_register(self, address: int, nbytes: int, *, read_only: bool = False) -> None:
        self.driver.host_register(address, nbytes, read_only=read_only)

    def host_unregister(self, address: int) -> None:
        self.driver.host_unregister(address)

    def host_registration(self, address: int) -> Span | None:
        return self.driver.host_registration(address)

    def host_device_pointer(self, address: int, device: int) -> int:
        return self.driver.host_device_pointer(address, device)

    def host_bytes(self, ptr: int, nbytes: int) -> memoryview | None:
        return self.driver.host_bytes(ptr, nbytes)

    def device_of(self, ptr: int) -> int | None:
        return self.driver.device_of(ptr)

    def create_stream(self, device: int, *, priority: int = 0) -> Stream:
        return self.driver.create_stream(device, priority=priority)

    def stream_from_handle(self, device: int, handle: int) -> Stream:
        return self.driver.stream_from_handle(device, handle)

    def destroy_stream(self, stream: Stream) -> None:
        self.driver.destroy_stream(stream)

    def stream_wait(self, stream: Stream, event: Event) -> None:
        self.driver.stream_wait(stream, event)

    def stream_synchronize(self, stream: Stream) -> None:
        self.driver.stream_synchronize(stream)

    def stream_query(self, stream: Stream) -> bool:
        return self.driver.stream_query(stream)

    def create_event(self, device: int, *, timing: bool = False) -> Event:
        return self.driver.create_event(device, timing=timing)

    def event_record(self, event: Event, stream: Stream) -> None:
        self.driver.event_record(event, stream)

    def event_query(self, event: Event) -> bool:
        return self.driver.event_query(event)

    def event_synchronize(self, event: Event) -> None:
        self.driver.event_synchronize(event)

    def event_elapsed(self, start: Event, end: Event) -> float:
        return self.driver.event_elapsed(start, end)

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        self.driver.copy(dst, src, nbytes, stream=stream)

    def prepare_kernel_copy(self, device: int) -> None:
        self.driver.prepare_kernel_copy(device)

    def kernel_copy(self, dst: int, src: int, nbytes: int, *, stream: Stream, blocks: int = COPY_BLOCKS) -> None:
        self.driver.kernel_copy(dst, src, nbytes, stream=stream, blocks=blocks)

    def fill(self, ptr: int, value: int, nbytes: int, *, stream: Stream) -> None:
        self.driver.fill(ptr, value, nbytes, stream=stream)

    def malloc_async(self, device: int, nbytes: int, *, stream: Stream) -> int:
        return self.driver.malloc_async(device, nbytes, stream=stream)

    def free_async(self, device: int, ptr: int, *, stream: Stream) -> None:
        self.driver.free_async(device, ptr, stream=stream)

    def trim_pool(self, device: int, keep: int = 0) -> None:
        self.driver.trim_pool(device, keep)

    def page_granularity(self, location: PageLocation) -> int:
        return self.driver.page_granularity(location)

    def reserve_addresses(self, nbytes: int, *, alignment: int = 0) -> int:
        return self.driver.reserve_addresses(nbytes, alignment=alignment)

    def release_addresses(self, address: int, nbytes: int) -> None:
        self.driver.release_addresses(address, nbytes)

    def create_pages(self, location: PageLocation, nbytes: int) -> int:
        return self.driver.create_pages(location, nbytes)

    def release_pages(self, handle: int) -> None:
        self.driver.release_pages(handle)

    def map_pages(self, address: int, nbytes: int, handle: int, *, device: int) -> None:
        self.driver.map_pages(address, nbytes, handle, device=device)

    def unmap_pages(self, address: int, nbytes: int) -> None:
        self.driver.unmap_pages(address, nbytes)

    def begin_capture(self, stream: Stream, mode: CaptureMode = CaptureMode.GLOBAL) -> None:
        self.driver.begin_capture(stream, mode)

    def end_capture(self, stream: Stream) -> None:
        self.driver.end_capture(stream)

    def is_capturing(self, stream: Stream) -> bool:
        return self.driver.is_capturing(stream)

    def capture_under_way(self) -> bool:
        return self.driver.capture_under_way()

    def beside_captures(self) -> AbstractContextManager[None]:
        return self.driver.beside_captures()

    def can_access_peer(self, device: int, peer: int) -> bool:
        return self.driver.can_access_peer(device, peer)

    def enable_peer_access(self, device: int, peer: int) -> None:
        self.driver.enable_peer_access(device, peer)

    def disable_peer_access(self, device: int, peer: int) -> None:
        self.driver.disable_peer_access(device, peer)

    def launch(
        self, stream: Stream, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), label: str = ""
    ) -> Bracket:
        return self.driver.launch(stream, reads=reads, writes=writes, label=label)

    def host_access(self, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), label: str = "") -> Bracket:
        return self.driver.host_access(reads=reads, writes=writes, label=label)

    def publish(self) -> Any:
        return self.driver.publish()

    def observe(self, token: Any) -> None:
        self.driver.observe(token)

    def finalise(self, action: Callable[[], None]) -> None:
        self.driver.finalise(action)
