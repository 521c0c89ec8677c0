"""What graph capture must do on every driver that has it; mixed into the classes of `test_driver_contract.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from memferry_allocator import CaptureMode, Driver, DriverError, Stream

from ..threads import in_threads
from .machine import Machine, address, pages, refused

STRICT = [CaptureMode.GLOBAL, CaptureMode.THREAD_LOCAL]


class CaptureContract:
    """The laws of a capture, and of working beside it."""

    @pytest.mark.parametrize("mode", CaptureMode)
    def test_what_is_captured_does_not_run(self, machine: Machine, mode: CaptureMode) -> None:
        driver, stream, ptr = machine.driver, machine.stream(), machine.device(256)
        driver.fill(ptr, 1, 256, stream=stream)
        stream.synchronize()
        driver.begin_capture(stream, mode)
        driver.fill(ptr, 2, 256, stream=stream)
        driver.copy(ptr, ptr + 128, 64, stream=stream)
        driver.end_capture(stream)
        assert set(machine.read(ptr, 256)) == {1}
        driver.fill(ptr, 3, 256, stream=stream)
        assert set(machine.read(ptr, 256)) == {3}

    def test_who_is_captured(self, machine: Machine) -> None:
        driver, stream, other = machine.driver, machine.stream(), machine.stream()
        borrowed = driver.stream_from_handle(0, int(stream.handle))
        assert not driver.is_capturing(stream)
        driver.begin_capture(stream)
        seen = [driver.is_capturing(each) for each in (stream, borrowed, other)]
        driver.end_capture(stream)
        assert seen == [True, True, False]
        assert not driver.is_capturing(stream)

    @pytest.mark.parametrize("mode", STRICT)
    @pytest.mark.parametrize("name", ["malloc", "free", "register", "query", "synchronize", "device"])
    def test_a_forbidden_call_breaks_the_capture(self, machine: Machine, mode: CaptureMode, name: str) -> None:
        driver, stream = machine.driver, machine.stream()
        call = _forbidden(machine, stream)[name]
        driver.begin_capture(stream, mode)
        with pytest.raises(DriverError) as caught:
            call()
        assert "STREAM_CAPTURE" in caught.value.code
        with refused("STREAM_CAPTURE_INVALIDATED"):
            driver.end_capture(stream)
        assert not driver.is_capturing(stream)
        call()

    def test_a_relaxed_capture_forbids_nothing(self, machine: Machine) -> None:
        driver, stream = machine.driver, machine.stream()
        calls = _forbidden(machine, stream)
        driver.begin_capture(stream, CaptureMode.RELAXED)
        for name in ("malloc", "free", "register", "query"):
            calls[name]()
        driver.end_capture(stream)

    @pytest.mark.parametrize("mode", CaptureMode)
    def test_calls_beside_a_capture_leave_it_unharmed(self, machine: Machine, mode: CaptureMode) -> None:
        driver, stream = machine.driver, machine.stream()
        calls = _forbidden(machine, stream)
        driver.begin_capture(stream, mode)
        with driver.beside_captures():
            calls["malloc"]()
            with driver.beside_captures():
                calls["register"]()
            calls["free"]()
            calls["query"]()
        driver.end_capture(stream)

    def test_after_working_beside_a_capture_it_forbids_again(self, machine: Machine) -> None:
        driver, stream = machine.driver, machine.stream()
        driver.begin_capture(stream)
        with driver.beside_captures():
            pass
        with refused("STREAM_CAPTURE_UNSUPPORTED"):
            driver.malloc(0, 256)
        with refused("STREAM_CAPTURE_INVALIDATED"):
            driver.end_capture(stream)

    @pytest.mark.parametrize(
        ("mode", "harmed"),
        [(CaptureMode.GLOBAL, True), (CaptureMode.THREAD_LOCAL, False), (CaptureMode.RELAXED, False)],
    )
    def test_other_threads(self, machine: Machine, mode: CaptureMode, harmed: bool) -> None:
        driver, stream = machine.driver, machine.stream()
        codes: list[str] = []

        def allocate() -> None:
            try:
                driver.free(0, driver.malloc(0, 256))
            except DriverError as error:
                codes.append(error.code)

        driver.begin_capture(stream, mode)
        in_threads(1, lambda _: allocate())
        if harmed:
            with refused("STREAM_CAPTURE_INVALIDATED"):
                driver.end_capture(stream)
        else:
            driver.end_capture(stream)
        assert codes == ["CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"] * harmed

    def test_no_mode_lets_anybody_wait_for_what_does_not_run(self, machine: Machine) -> None:
        driver, stream = machine.driver, machine.stream()
        waits: list[Callable[[], object]] = [stream.synchronize, stream.query, lambda: driver.synchronize(0)]
        for wait in waits:
            driver.begin_capture(stream, CaptureMode.RELAXED)
            with driver.beside_captures(), pytest.raises(DriverError):
                wait()
            with refused("STREAM_CAPTURE_INVALIDATED"):
                driver.end_capture(stream)

    def test_captured_events_are_in_no_streams_order(self, machine: Machine) -> None:
        driver, stream = machine.driver, machine.stream()
        driver.begin_capture(stream, CaptureMode.RELAXED)
        event = stream.record()
        with pytest.raises(DriverError):
            event.query()
        _end_anyhow(driver, stream)
        stream.record(event)
        event.synchronize()
        assert event.query()

    def test_a_capture_waits_for_nothing_outside(self, machine: Machine) -> None:
        driver, stream, other = machine.driver, machine.stream(), machine.stream()
        event = other.record()
        driver.begin_capture(stream)
        with refused("STREAM_CAPTURE_ISOLATION"):
            stream.wait(event)
        with refused("STREAM_CAPTURE_INVALIDATED"):
            driver.end_capture(stream)
        stream.wait(event)

    def test_a_stream_that_waits_for_a_captured_event_is_captured_too(self, machine: Machine) -> None:
        driver, stream, other, ptr = machine.driver, machine.stream(), machine.stream(), machine.device(256)
        driver.fill(ptr, 1, 256, stream=other)
        earlier = other.record()
        _detour(driver, stream, other, lambda: driver.fill(ptr, 2, 256, stream=other))
        # The waits in the capture have waited for nothing: this one may not be taken for done.
        stream.wait(earlier)
        driver.fill(ptr, 3, 128, stream=stream)
        stream.synchronize()
        assert list(machine.read(ptr + 127, 2)) == [3, 1]

    def test_captures_begin_and_end_once(self, machine: Machine) -> None:
        driver, stream = machine.driver, machine.stream()
        with pytest.raises(DriverError):
            driver.end_capture(stream)
        driver.begin_capture(stream)
        with pytest.raises(DriverError):
            driver.begin_capture(stream)
        _end_anyhow(driver, stream)
        driver.begin_capture(stream)
        driver.end_capture(stream)

    def test_another_thread_does_not_end_a_capture(self, machine: Machine) -> None:
        driver, stream = machine.driver, machine.stream()
        codes: list[str] = []

        def end() -> None:
            try:
                driver.end_capture(stream)
            except DriverError as error:
                codes.append(error.code)

        driver.begin_capture(stream)
        in_threads(1, lambda _: end())
        assert codes == ["CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"]
        _end_anyhow(driver, stream)


def _forbidden(machine: Machine, stream: Stream) -> dict[str, Callable[[], object]]:
    """Calls that a capture of `stream` forbids; what they take is given back with the machine."""
    driver, data = machine.driver, pages(4096)
    machine.keep.append(data)
    ptr, event = driver.malloc(0, 256), machine.stream().record()
    live = [ptr]
    machine.finally_do(lambda: driver.free(0, live[0] if live else 0))

    def free() -> None:
        driver.free(0, ptr)
        live.clear()

    registered: list[int] = []

    def register() -> None:
        driver.host_register(address(data), 4096)
        registered.append(address(data))
        machine.finally_do(lambda: driver.host_unregister(registered.pop()))

    return {
        "malloc": lambda: machine.device(256),
        "free": free,
        "register": register,
        "query": event.query,
        "synchronize": stream.synchronize,
        "device": lambda: driver.synchronize(0),
    }


def _detour(driver: Driver, stream: Stream, other: Stream, action: Callable[[], object]) -> None:
    """Do `action` on `other` within a capture that began on `stream`."""
    driver.begin_capture(stream)
    other.wait(stream.record())
    action()
    stream.wait(other.record())
    driver.end_capture(stream)


def _end_anyhow(driver: Driver, stream: Stream) -> None:
    """End a capture that a refused call may have broken."""
    with contextlib.suppress(DriverError):
        driver.end_capture(stream)
    assert not driver.is_capturing(stream)
