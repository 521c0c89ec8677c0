"""What a whole process does with the allocator; `test_process.py` runs each in an interpreter of its own.

    python -m tests.allocator.process_scripts DRIVER SCRIPT

Every script prints what it saw as JSON.  Nothing is to appear on the error stream, whatever is left open.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from memferry_allocator import (
    DevicePool,
    Driver,
    EmulatedDriver,
    EmulatedOptions,
    ForkedError,
    HostArena,
    HybridBuffer,
    MemFerryError,
    PageKind,
    PageLocation,
    open_device,
    open_driver,
    registrations,
)

from .driver_cases import in_a_child
from .machine import Machine, address, pages

N = 1 << 20
SCRIPTS: dict[str, Callable[[Driver], Any]] = {}
KEPT: list[Any] = []  # alive when the interpreter ends


def script(function: Callable[[Driver], Any]) -> Callable[[Driver], Any]:
    SCRIPTS[function.__name__] = function
    return function


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except MemFerryError as error:
        return type(error).__name__
    return "nothing"


def everything(driver: Driver) -> dict[str, Any]:
    """One of each thing that holds a part of a driver, with work under way on them."""
    stream = driver.create_stream(0)
    made: dict[str, Any] = {
        "stream": stream,
        "pool": DevicePool(driver, 0, 4 * N),
        "arena": HostArena(driver, 4 * N),
        "hybrid": HybridBuffer(driver, 0, 4 * N, resident=0.5),
        "event": driver.create_event(0),
        "ptr": driver.malloc(0, N),
        "data": pages(N),
    }
    made["block"] = made["pool"].allocate(256, stream=stream)
    driver.host_register(address(made["data"]), N)
    driver.fill(made["ptr"], 1, N, stream=stream)
    driver.fill(made["hybrid"].ptr, 1, 4 * N, stream=stream)
    made["hybrid"].record_use(stream)
    stream.record(made["event"])
    return made


def entries(driver: Driver, made: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """Every entry of a driver."""
    stream, event, ptr, start = made["stream"], made["event"], made["ptr"], address(made["data"])
    device, base = PageLocation(PageKind.DEVICE), 2 << 20
    return {
        "device_info": lambda: driver.device_info(0),
        "memory_info": lambda: driver.memory_info(0),
        "synchronize": lambda: driver.synchronize(0),
        "synchronize_all": driver.synchronize_all,
        "malloc": lambda: driver.malloc(0, N),
        "free": lambda: driver.free(0, ptr),
        "host_register": lambda: driver.host_register(start, N),
        "host_unregister": lambda: driver.host_unregister(start),
        "host_registration": lambda: driver.host_registration(start),
        "host_device_pointer": lambda: driver.host_device_pointer(start, 0),
        "host_bytes": lambda: driver.host_bytes(ptr, N),
        "create_stream": lambda: driver.create_stream(0),
        "stream_from_handle": lambda: driver.stream_from_handle(0, int(stream.handle)),
        "stream_wait": lambda: driver.stream_wait(stream, event),
        "stream_synchronize": stream.synchronize,
        "stream_query": stream.query,
        "create_event": lambda: driver.create_event(0),
        "wait for its own event": lambda: stream.wait(event),
        "event_record": lambda: stream.record(event),
        "event_query": event.query,
        "event_synchronize": event.synchronize,
        "event_elapsed": lambda: driver.event_elapsed(event, event),
        "copy": lambda: driver.copy(ptr, start, N, stream=stream),
        "copy of nothing": lambda: driver.copy(ptr, start, 0, stream=stream),
        "fill": lambda: driver.fill(ptr, 0, N, stream=stream),
        "fill of nothing": lambda: driver.fill(ptr, 0, 0, stream=stream),
        "page_granularity": lambda: driver.page_granularity(device),
        "reserve_addresses": lambda: driver.reserve_addresses(base),
        "release_addresses": lambda: driver.release_addresses(base, base),
        "create_pages": lambda: driver.create_pages(device, base),
        "release_pages": lambda: driver.release_pages(1),
        "map_pages": lambda: driver.map_pages(base, base, 1, device=0),
        "unmap_pages": lambda: driver.unmap_pages(base, base),
        "begin_capture": lambda: driver.begin_capture(stream),
        "end_capture": lambda: driver.end_capture(stream),
        "is_capturing": lambda: driver.is_capturing(stream),
        "beside_captures": lambda: driver.beside_captures().__enter__(),
        "can_access_peer": lambda: driver.can_access_peer(0, 0),
        "enable_peer_access": lambda: driver.enable_peer_access(0, 0),
        "disable_peer_access": lambda: driver.disable_peer_access(0, 0),
    }


def users(driver: Driver, made: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """What stands on a driver, by its own entries."""
    stream, pool, start = made["stream"], made["pool"], address(made["data"])
    return {
        "pool": lambda: DevicePool(driver, 0, N),
        "pool.allocate": lambda: pool.allocate(256, stream=stream),
        "pool.deallocate": lambda: pool.deallocate(made["block"], 256, stream=stream),
        "arena": lambda: HostArena(driver, N),
        "registrations.register": lambda: registrations(driver).register(start, N),
        "hybrid": lambda: HybridBuffer(driver, 0, N, resident=1),
        "hybrid.record_use": lambda: made["hybrid"].record_use(stream),
        "hybrid.repartition": lambda: made["hybrid"].repartition(1, stream=stream),
    }


def _other_than(expected: str, calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """The entries that do not answer as they should."""
    answers = {name: said(call) for name, call in calls.items()}
    return {name: answer for name, answer in answers.items() if answer != expected}


@script
def fork(driver: Driver) -> Any:
    """A child may use nothing, may end in peace, and harms nothing of its parent."""
    made = everything(driver)

    def child() -> Any:
        wrong = _other_than("ForkedError", entries(driver, made) | users(driver, made))
        for name in ("stream", "pool", "arena", "hybrid"):
            if (answer := said(made[name].close)) not in ("nothing", "ForkedError"):
                wrong[name] = answer
        driver.close()
        driver.finalise(lambda: wrong.update(finalised="in the child"))
        made.clear()
        gc.collect()
        return wrong

    wrong = in_a_child(child)
    made["stream"].synchronize()
    driver.free(0, made["ptr"])
    made["pool"].deallocate(made["block"], 256, stream=made["stream"])
    for name in ("pool", "arena", "hybrid"):
        made[name].close()
    driver.host_unregister(address(made["data"]))
    return wrong


@script
def fork_while_another_thread_is_in_the_driver(driver: Driver) -> Any:
    """The child inherits locks that nobody will ever release."""
    stop, busy = threading.Event(), threading.Event()

    def work() -> None:
        stream, ptr = driver.create_stream(0), driver.malloc(0, N)
        while not stop.is_set():
            driver.fill(ptr, 1, N, stream=stream)
            stream.synchronize()
            busy.set()
        stream.close()
        driver.free(0, ptr)

    thread = threading.Thread(target=work)
    thread.start()
    busy.wait()
    made = everything(driver)
    wrong = [in_a_child(lambda: _other_than("ForkedError", entries(driver, made))) for _ in range(5)]
    stop.set()
    thread.join()
    return [each for each in wrong if each != {}]


@script
def fork_then_exit_normally(driver: Driver) -> Any:
    """A child that ends like a program, with everything of its parent still in its hands."""
    KEPT.append(everything(driver))
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        sys.exit(0)
    return os.waitpid(child, 0)[1]


@script
def fork_then_open(driver: Driver) -> Any:
    """A child has no CUDA any more, and may emulate."""

    def child() -> Any:
        try:
            other = open_driver(driver.name)
        except ForkedError as error:
            return ["ForkedError", "spawn" in str(error)]
        ptr = other.malloc(0, N)
        other.free(0, ptr)
        return ["opened", other is not driver]

    driver.malloc(0, N)
    return in_a_child(child)


@script
def leave_everything_open(driver: Driver) -> Any:
    KEPT.append(everything(driver))
    return "left"


@script
def leave_a_cycle_open(driver: Driver) -> Any:
    """What is only found by the last garbage collection."""
    gc.disable()
    cycle: list[Any] = [everything(driver)]
    cycle.append(cycle)
    return "left"


@script
def close_the_driver_first(driver: Driver) -> Any:
    made = everything(driver)
    driver.synchronize_all()
    driver.close()
    wrong = _other_than("DriverError", {k: v for k, v in entries(driver, made).items() if k in ("malloc", "copy")})
    made["stream"].close()
    made.clear()
    gc.collect()
    return wrong


@script
def free_twice(driver: Driver) -> Any:
    ptr, stream = driver.malloc(0, N), driver.create_stream(0)
    driver.free(0, ptr)
    pool = DevicePool(driver, 0, N)
    block = pool.allocate(256, stream=stream)
    pool.deallocate(block, 256, stream=stream)
    answers = [said(lambda: driver.free(0, ptr)), said(lambda: pool.deallocate(block, 256, stream=stream))]
    arena = HostArena(driver, N)
    for thing in (pool, arena, stream, pool, arena, stream):
        thing.close()
    return answers


@script
def exit_beside_a_thread(driver: Driver) -> Any:
    """A daemon thread is in the middle of things when the interpreter ends."""
    busy = threading.Event()

    def work() -> None:
        stream, ptr = driver.create_stream(0), driver.malloc(0, N)
        while True:
            driver.fill(ptr, 1, N, stream=stream)
            stream.record().synchronize()
            busy.set()

    threading.Thread(target=work, daemon=True).start()
    busy.wait()
    KEPT.append(everything(driver))
    return "left"


@script
def capture(driver: Driver) -> Any:
    """The allocator's entries, refused or done beside a capture, which survives."""
    stream, other = driver.create_stream(0), driver.create_stream(0)
    machine = Machine(driver)
    ptr = machine.device(N)
    pool, hybrid, data = DevicePool(driver, 0, 4 * N), HybridBuffer(driver, 0, 4 * N, resident=0.5), pages(N)
    block = pool.allocate(256, stream=other)
    driver.begin_capture(stream)
    driver.fill(ptr, 1, N, stream=stream)
    refused = {
        "allocate": said(lambda: pool.allocate(256, stream=stream)),
        "deallocate": said(lambda: pool.deallocate(block, 256, stream=stream)),
        "repartition": said(lambda: hybrid.repartition(1, stream=stream)),
    }
    pool.deallocate(pool.allocate(512, stream=other), 512, stream=other)
    pool.deallocate(block, 256, stream=other)
    hybrid.repartition(0, stream=other)
    hybrid.close()
    beside = {
        "register": said(lambda: registrations(driver).register(address(data), N).close()),
        "arena": said(lambda: HostArena(driver, N).close()),
        "pool": said(lambda: DevicePool(driver, 0, N).close()),
    }
    cycle = [DevicePool(driver, 0, N), HostArena(driver, N), HybridBuffer(driver, 0, N, resident=1)]
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    gc.collect()  # what is found is released once the capture is over
    driver.end_capture(stream)
    pool.close()
    stream.close()
    other.close()
    machine.close()
    return refused, beside


@script
def lose_the_device(driver: Driver) -> Any:
    """Its handles are dead from then on, and closing and collecting them is quiet."""
    made = everything(driver)
    driver.synchronize_all()
    if isinstance(driver, EmulatedDriver):
        driver.lose(0)
    else:
        from cuda.bindings import driver as cu

        cu.cuDevicePrimaryCtxReset(0)
    calls = entries(driver, made)
    names = ("malloc", "memory_info", "synchronize", "synchronize_all", "free", "host_register", "create_stream")
    names += ("copy", "fill", "event_record", "event_query", "stream_synchronize", "begin_capture", "stream_wait")
    wrong = _other_than("DeviceLostError", {name: calls[name] for name in names})
    made["stream"].close()
    made.clear()
    gc.collect()
    driver.close()
    return wrong


if __name__ == "__main__":
    opened, _ = open_device(sys.argv[1], emulated=EmulatedOptions(device_memory=1 << 30))
    print(json.dumps(SCRIPTS[sys.argv[2]](opened)))
