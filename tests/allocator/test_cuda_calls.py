"""What the CUDA driver asks of the library, and what it makes of the answers; the library is played."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

import pytest
from cuda.bindings import driver as cu

from memferry_allocator import (
    DeviceLostError,
    DriverError,
    ForkedError,
    PageKind,
    PageLocation,
    Stream,
    UnsupportedError,
)
from memferry_allocator.driver.cuda import CudaDriver, core
from memferry_allocator.driver.cuda import library as calls_of
from memferry_allocator.driver.cuda.errors import error_of
from memferry_allocator.driver.cuda.library import Beside

from .machine import refused

CONTEXT = 77
OK = (cu.CUresult.CUDA_SUCCESS,)


class Library:
    """Answers every call with the code set for it, and keeps the stack of contexts."""

    beside: Beside | None = None
    played: dict[str, Any]  # as pointers

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.codes: dict[str, int] = {}
        self.contexts: list[int] = []
        self.capturing: set[int] = set()
        self.mode = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            return self.codes.get(name, 0)

        return call

    def cuCtxGetCurrent(self, answer: Any) -> int:  # noqa: N802
        answer[0] = self.contexts[-1] if self.contexts else 0
        return 0

    def cuCtxPushCurrent_v2(self, context: int) -> int:  # noqa: N802
        code = self.codes.get("push", 0)
        if code == 0:
            self.contexts.append(context)
        return code

    def cuCtxPopCurrent_v2(self, answer: Any) -> int:  # noqa: N802
        answer[0] = self.contexts.pop()
        return 0

    def cuStreamIsCapturing(self, stream: int, answer: Any) -> int:  # noqa: N802
        self.calls.append(("cuStreamIsCapturing", (stream,)))
        answer[0] = int(stream in self.capturing)
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        mode[0], self.mode = self.mode, mode[0]
        return 0

    def asked(self, name: str) -> list[Any]:
        return [arguments for call, arguments in self.calls if call == name]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    played = Library()
    monkeypatch.setattr(core, "initialise", lambda: 1)
    monkeypatch.setattr(core, "library", lambda: played)
    monkeypatch.setattr(cu, "cuDevicePrimaryCtxRetain", lambda device: (*OK, CONTEXT))
    monkeypatch.setattr(cu, "cuDevicePrimaryCtxRelease", lambda device: OK)
    monkeypatch.setattr(cu, "cuEventCreate", lambda flags: (*OK, 500))
    monkeypatch.setattr(cu, "cuEventDestroy", lambda handle: OK)
    return played


@pytest.fixture
def driver(library: Library) -> CudaDriver:
    return CudaDriver()


def _stream(driver: CudaDriver, handle: int) -> Stream:
    return driver.stream_from_handle(0, handle)


@pytest.mark.parametrize("handle", [0, 1])
def test_the_default_stream_is_never_asked_whether_it_is_captured(
    driver: CudaDriver, library: Library, handle: int
) -> None:
    stream = _stream(driver, handle)
    assert not driver.is_capturing(stream)
    stream.record()
    assert library.asked("cuStreamIsCapturing") == []


def test_a_recording_in_a_capture_is_in_no_streams_order(driver: CudaDriver, library: Library) -> None:
    stream, other = _stream(driver, 40), _stream(driver, 41)
    event = stream.record()
    assert event.recorded[0] is stream
    library.capturing.add(40)
    stream.record(event)
    assert event.recorded[0] is None
    for _ in range(2):
        other.wait(event)
    assert library.asked("cuStreamWaitEvent") == [(41, 500, 0)] * 2


def test_several_calls_make_the_context_current_once(
    driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a small copy costs little: it takes five calls, and each would push and pop."""
    pushed: list[int] = []
    push = library.cuCtxPushCurrent_v2
    monkeypatch.setattr(library, "cuCtxPushCurrent_v2", lambda context: pushed.append(context) or push(context))
    stream, other = _stream(driver, 40), _stream(driver, 41)
    with driver.several_calls(0):
        other.wait(stream.record())
        driver.copy(1000, 2000, 8, stream=other)
        with driver.several_calls(0), driver._on(0):
            pass
    assert pushed == [CONTEXT]
    assert library.contexts == []
    assert driver._answers.held is None


def test_another_device_s_context_comes_between(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a finaliser's may, in the middle of several calls."""
    monkeypatch.setattr(core, "initialise", lambda: 2)
    monkeypatch.setattr(cu, "cuDevicePrimaryCtxRetain", lambda device: (*OK, CONTEXT + device))
    driver = CudaDriver()
    seen = []
    with driver.several_calls(0):
        with driver._on(1):
            seen.append(library.contexts[-1])
            with driver._on(0):
                seen.append(library.contexts[-1])
            seen.append(library.contexts[-1])
        with driver._on(0):
            seen.append(library.contexts[-1])
    assert [context - CONTEXT for context in seen] == [1, 0, 1, 0]
    assert library.contexts == []


def test_a_recording_that_needs_a_context_to_tell_of_captures_gets_one(
    driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(stream: int, answer: Any) -> int:
        answer[0] = int(stream in library.capturing)
        return 0 if library.contexts else 201

    monkeypatch.setattr(library, "cuStreamIsCapturing", ask)
    library.capturing.add(41)
    assert [_stream(driver, handle).record().recorded[0] is None for handle in (40, 41)] == [False, True]


def test_what_the_host_has_waited_for_no_stream_waits_for(driver: CudaDriver, library: Library) -> None:
    stream, other = _stream(driver, 40), _stream(driver, 41)
    first, last = stream.record(), stream.record()
    elsewhere = _stream(driver, 42).record()
    stream.synchronize()
    other.wait(first)
    other.wait(last)
    assert library.asked("cuStreamWaitEvent") == []
    for event in (stream.record(last), elsewhere):
        other.wait(event)
    assert len(library.asked("cuStreamWaitEvent")) == 2
    other.wait(first)
    assert len(library.asked("cuStreamWaitEvent")) == 2


def test_a_name_of_many_streams_is_refused(driver: CudaDriver) -> None:
    """What one thread's per-thread default stream has waited for, another thread's has not."""
    with pytest.raises(UnsupportedError, match="per-thread default stream"):
        _stream(driver, 2)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_finaliser_may_record_in_the_middle_of_a_recording(
    driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It blocks nobody, and no wait is left out that counts."""
    stream, other = _stream(driver, 40), _stream(driver, 41)
    handles = itertools.count(500)
    monkeypatch.setattr(cu, "cuEventCreate", lambda flags: (*OK, next(handles)))
    outer, inner = driver.create_event(0), driver.create_event(0)
    recorded: list[int] = []
    late = [inner]

    def record(event: int, on: int) -> int:
        now = late.pop() if late else None
        if now is not None and when == "before":
            stream.record(now)
        recorded.append(event)
        if now is not None and when == "after":
            stream.record(now)
        return 0

    library.cuEventRecord = record  # type: ignore[attr-defined]
    thread = threading.Thread(target=stream.record, args=(outer,), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    places = {handle: place for place, handle in enumerate(recorded)}
    order = sorted((inner, outer), key=lambda event: places[event.handle])
    assert order[0].sequence < order[1].sequence
    other.wait(order[0])
    other.wait(order[1])
    assert len(library.asked("cuStreamWaitEvent")) == 2


def test_a_stream_is_closed_between_recordings_of_other_threads_and_not_in_one(
    driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver crashes if it is given a stream that is gone."""
    gone: list[int] = []
    recording, closing = threading.Event(), threading.Event()

    def record(event: int, on: int) -> int:
        if not recording.is_set():
            recording.set()
            closing.wait(0.2)  # closing comes to its end here, unless it waits for this recording
        assert on not in gone
        return 0

    def closed() -> None:
        recording.wait(60)
        stream.close()
        closing.set()

    monkeypatch.setattr(cu, "cuStreamCreateWithPriority", lambda flags, priority: (*OK, 40))
    monkeypatch.setattr(cu, "cuStreamSynchronize", lambda handle: OK)
    monkeypatch.setattr(cu, "cuStreamDestroy", lambda handle: (gone.append(handle), OK)[1])
    monkeypatch.setattr(library, "cuEventRecord", record, raising=False)
    stream, event = driver.create_stream(0), driver.create_event(0)
    closer = threading.Thread(target=closed)
    closer.start()
    stream.record(event)
    closer.join()
    assert gone == [40]
    with refused("INVALID_HANDLE"):
        stream.record(event)


def test_memory_is_found_on_its_device_without_the_bindings(
    driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some versions of the bindings answer 0 for every device."""
    attribute = cu.CUpointer_attribute
    answers = {
        attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE: cu.CUmemorytype.CU_MEMORYTYPE_DEVICE,
        attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: 0,
        attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: 0,
    }

    def ask(answer: Any, wanted: int, ptr: int) -> int:
        assert (wanted, ptr) == (int(attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL), 1 << 20)
        answer[0] = 3
        return 0

    monkeypatch.setattr(cu, "cuPointerGetAttribute", lambda wanted, ptr: (*OK, answers[wanted]))
    monkeypatch.setattr(library, "cuPointerGetAttribute", ask, raising=False)
    assert driver.device_of(1 << 20) == 3


def test_no_device_is_taken_for_the_one_whose_context_is_kept(driver: CudaDriver) -> None:
    for device in (-1, 1):
        with refused("INVALID_DEVICE"):
            driver.memory_info(device)


def test_a_wait_of_the_host_that_fails_is_none(driver: CudaDriver, library: Library) -> None:
    stream, other = _stream(driver, 40), _stream(driver, 41)
    event = stream.record()
    library.codes["cuStreamSynchronize"] = 1
    with refused("INVALID_VALUE"):
        stream.synchronize()
    other.wait(event)
    assert len(library.asked("cuStreamWaitEvent")) == 1


def test_handles_of_events_that_are_gone_serve_the_next_ones(
    driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count(500)
    monkeypatch.setattr(cu, "cuEventCreate", lambda flags: (*OK, next(numbers)))
    destroyed: list[int] = []
    monkeypatch.setattr(cu, "cuEventDestroy", lambda handle: destroyed.append(handle) or OK)
    kept, gone = driver.create_event(0), driver.create_event(0)
    del gone
    assert [kept.handle, driver.create_event(0, timing=True).handle] == [500, 502]
    assert driver.create_event(0).handle == 501
    driver.close()
    assert sorted(destroyed) == [501, 502]
    del kept


def test_asking_about_a_capture_needs_no_context(driver: CudaDriver, library: Library) -> None:
    stream = _stream(driver, 40)
    assert not driver.is_capturing(stream)
    library.capturing.add(40)
    assert driver.is_capturing(stream)
    assert library.asked("cuCtxGetCurrent") == []
    assert library.contexts == []


@pytest.mark.parametrize("current", [[], [CONTEXT], [CONTEXT, 99]])
def test_the_current_context_is_left_as_it_was(driver: CudaDriver, library: Library, current: list[int]) -> None:
    stream = _stream(driver, 40)
    library.contexts[:] = current
    stream.record()
    library.codes["cuMemcpyAsync"] = 1
    with refused("INVALID_VALUE"):
        driver.copy(1, 2, 3, stream=stream)
    assert library.contexts == current


def test_beside_captures_puts_the_threads_mode_back(driver: CudaDriver, library: Library) -> None:
    seen = []
    with contextlib.suppress(ZeroDivisionError), driver.beside_captures():
        seen.append(library.mode)
        with driver.beside_captures():
            seen.append(library.mode)
        seen.append(library.mode)
        raise ZeroDivisionError
    assert (seen, library.mode) == ([2, 2, 2], 0)


@pytest.mark.parametrize(
    ("code", "lost"), [(700, True), (709, True), (214, True), (201, True), (1, False), (2, False)]
)
def test_answers_that_end_a_device(driver: CudaDriver, library: Library, code: int, lost: bool) -> None:
    stream = _stream(driver, 40)
    event = stream.record()
    library.codes["cuStreamSynchronize"] = code
    with pytest.raises(DriverError) as caught:
        stream.synchronize()
    assert isinstance(caught.value, DeviceLostError) is lost
    library.codes.clear()
    if lost:
        for call in (stream.synchronize, stream.record, event.query, lambda: driver.fill(1, 0, 1, stream=stream)):
            with pytest.raises(DeviceLostError):
                call()
    else:
        stream.synchronize()
    driver.close()


def test_a_context_that_is_gone(driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _stream(driver, 40)
    stream.record()
    library.codes["push"] = 709
    gone = (cu.CUresult.CUDA_ERROR_INVALID_CONTEXT,)
    monkeypatch.setattr(cu, "cuDevicePrimaryCtxRelease", lambda device: gone)
    with pytest.raises(DeviceLostError):
        stream.synchronize()
    driver.close()
    driver.close()
    with refused("DEINITIALIZED"):
        stream.synchronize()


def test_an_answer_that_the_bindings_do_not_know() -> None:
    assert error_of(123456, "call").code == "CUDA_ERROR_123456"


def test_reserved_addresses_with_nothing_behind_them_are_not_touched(
    driver: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy there would end the device's context."""
    page, stream = 2 << 20, _stream(driver, 40)
    monkeypatch.setattr(driver, "_granularity", lambda location: page)
    monkeypatch.setattr(cu, "cuMemAddressReserve", lambda *_: (*OK, 8 * page))
    monkeypatch.setattr(cu, "cuMemCreate", lambda *_: (*OK, 5))
    monkeypatch.setattr(cu, "cuMemMap", lambda *_: OK)
    monkeypatch.setattr(cu, "cuMemSetAccess", lambda *_: OK)
    base = driver.reserve_addresses(4 * page)
    handle = driver.create_pages(PageLocation(PageKind.DEVICE), page)
    driver.map_pages(base + page, page, handle, device=0)
    driver.fill(base + page, 0, page, stream=stream)
    driver.copy(base + page, 3 * page, page, stream=stream)  # memory that is not in the books
    for start, nbytes in [(0, 1), (page - 1, 2), (page, page + 1), (3 * page, page)]:
        with refused("INVALID_VALUE"):
            driver.fill(base + start, 0, nbytes, stream=stream)
        with refused("INVALID_VALUE"):
            driver.copy(3 * page, base + start, nbytes, stream=stream)
    assert len(library.asked("cuMemsetD8Async")) == len(library.asked("cuMemcpyAsync")) == 1


def test_access_that_is_refused_maps_nothing(driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    page, unmapped = 2 << 20, []
    monkeypatch.setattr(driver, "_granularity", lambda location: page)
    monkeypatch.setattr(cu, "cuMemAddressReserve", lambda *_: (*OK, 8 * page))
    monkeypatch.setattr(cu, "cuMemCreate", lambda *_: (*OK, 5))
    monkeypatch.setattr(cu, "cuMemMap", lambda *_: OK)
    monkeypatch.setattr(cu, "cuMemSetAccess", lambda *_: (cu.CUresult.CUDA_ERROR_NOT_SUPPORTED,))
    monkeypatch.setattr(cu, "cuMemUnmap", lambda *span: unmapped.append(span) or OK)
    base, handle = driver.reserve_addresses(page), driver.create_pages(PageLocation(PageKind.DEVICE), page)
    with refused("NOT_SUPPORTED"):
        driver.map_pages(base, page, handle, device=0)
    assert unmapped == [(base, page)]
    with refused("INVALID_VALUE"):
        driver.unmap_pages(base, page)


def test_a_forked_child_asks_nothing(driver: CudaDriver, library: Library) -> None:
    stream = _stream(driver, 40)
    event = stream.record()
    library.calls.clear()
    driver._forked = True
    for call in (stream.synchronize, stream.record, event.query, lambda: driver.is_capturing(stream)):
        with pytest.raises(ForkedError):
            call()
    driver.close()
    stream.close()
    assert library.calls == []


# -- a copy beside a stream ------------------------------------------------------------------------------------
TYPES = {
    "current": "int(uintptr_t *)",
    "push": "int(uintptr_t)",
    "pop": "int(uintptr_t *)",
    "record": "int(uintptr_t, uintptr_t)",
    "wait": "int(uintptr_t, uintptr_t, unsigned int)",
    "capturing": "int(uintptr_t, int *)",
    "copy": "int(uintptr_t, uintptr_t, size_t, uintptr_t)",
}


@pytest.fixture(params=["call by call", "compiled"])
def beside(request: pytest.FixtureRequest, library: Library, driver: CudaDriver) -> CudaDriver:
    """A driver that makes the calls of a copy beside a stream one by one, or by its compiled part."""
    handles = itertools.count(500)
    request.getfixturevalue("monkeypatch").setattr(cu, "cuEventCreate", lambda flags: (*OK, next(handles)))
    if request.param == "compiled":
        if not calls_of._BESIDE.is_file():
            pytest.skip("installed without a compiler")
        library.played = {
            name: calls_of._ffi.callback(TYPES[name], getattr(library, symbol))
            for name, symbol in calls_of._TABLE.items()
        }
        library.beside = Beside(library.played)
    return driver


WORK = ("cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync")


def _work(library: Library) -> list[tuple[str, tuple[Any, ...]]]:
    return [(name, arguments) for name, arguments in library.calls if name in WORK]


def test_a_copy_beside_a_stream_is_between_two_waits(beside: CudaDriver, library: Library) -> None:
    stream, lane, begin = _stream(beside, 40), _stream(beside, 41), beside.create_event(0)
    end = beside.copy_beside([(1000, 2000, 8)], stream=stream, lane=lane, begin=begin)
    assert _work(library) == [
        ("cuEventRecord", (500, 40)),
        ("cuStreamWaitEvent", (41, 500, 0)),
        ("cuMemcpyAsync", (1000, 2000, 8, 41)),
        ("cuEventRecord", (501, 41)),
        ("cuStreamWaitEvent", (40, 501, 0)),
    ]
    assert library.contexts == []
    assert (begin.recorded[0], end.recorded[0]) == (stream, lane)
    assert begin.sequence < end.sequence == lane.recordings.last
    for later, event in ((lane, begin), (stream, end)):  # what they wait for already they wait for no more
        later.wait(event)
    assert len(library.asked("cuStreamWaitEvent")) == 2


def test_a_context_that_is_current_is_left_alone(beside: CudaDriver, library: Library) -> None:
    beside._context(0)
    library.contexts.append(CONTEXT)
    stream, lane, begin = _stream(beside, 40), _stream(beside, 41), beside.create_event(0)
    beside.copy_beside([(1000, 2000, 8)], stream=stream, lane=lane, begin=begin)
    assert library.contexts == [CONTEXT]


@pytest.mark.parametrize(
    ("call", "made"),
    [("cuEventRecord", 1), ("cuStreamWaitEvent", 2), ("cuMemcpyAsync", 5), ("push", 0)],
)
def test_a_refusal_is_told_and_the_stream_comes_after_all_the_same(
    beside: CudaDriver, library: Library, call: str, made: int
) -> None:
    stream, lane, begin = _stream(beside, 40), _stream(beside, 41), beside.create_event(0)
    library.codes[call] = 1
    with refused("INVALID_VALUE"):
        beside.copy_beside([(1000, 2000, 8)], stream=stream, lane=lane, begin=begin)
    assert len(_work(library)) == made
    assert library.contexts == []
    library.codes.clear()
    assert (lane.recordings.last > 0) is (call == "cuMemcpyAsync")
    beside.copy_beside([(1000, 2000, 8)], stream=stream, lane=lane, begin=begin)
    assert _work(library)[-1][1][0] == 40


def test_a_device_that_is_lost_in_it_is_remembered(beside: CudaDriver, library: Library) -> None:
    stream, lane, begin = _stream(beside, 40), _stream(beside, 41), beside.create_event(0)
    library.codes["cuMemcpyAsync"] = 700
    for _ in range(2):
        with refused("ILLEGAL_ADDRESS", DeviceLostError):
            beside.copy_beside([(1000, 2000, 8)], stream=stream, lane=lane, begin=begin)
    assert len(library.asked("cuMemcpyAsync")) == 1


def test_in_a_capture_both_events_are_in_no_streams_order(beside: CudaDriver, library: Library) -> None:
    stream, lane, begin = _stream(beside, 40), _stream(beside, 41), beside.create_event(0)
    library.capturing.update((40, 41))
    end = beside.copy_beside([(1000, 2000, 8)], stream=stream, lane=lane, begin=begin)
    assert begin.recorded[0] is end.recorded[0] is None
    assert begin.sequence
    assert end.sequence


def test_nothing_several_pieces_and_one_stream(beside: CudaDriver, library: Library) -> None:
    stream, lane, begin = _stream(beside, 40), _stream(beside, 41), beside.create_event(0)
    pieces = [(1000, 2000, 8), (3000, 4000, 0), (5000, 6000, 9)]
    beside.copy_beside(pieces, stream=stream, lane=lane, begin=begin)
    assert [arguments[2] for arguments in library.asked("cuMemcpyAsync")] == [8, 9]
    library.calls.clear()
    beside.copy_beside(pieces[:1], stream=lane, lane=lane, begin=begin)
    assert [name for name, _ in _work(library)] == ["cuMemcpyAsync", "cuEventRecord"]
    library.calls.clear()
    for nbytes in (0, -1):
        with contextlib.nullcontext() if not nbytes else refused("INVALID_VALUE"):
            beside.copy_beside([(1000, 2000, nbytes)], stream=stream, lane=lane, begin=begin)
    assert library.asked("cuMemcpyAsync") == []


@pytest.mark.parametrize("closed", [40, 41])
def test_closed_streams_are_refused_before_anything_is_done(
    beside: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch, closed: int
) -> None:
    stream, lane, begin = _stream(beside, 40), _stream(beside, 41), beside.create_event(0)
    object.__setattr__(stream if closed == 40 else lane, "handle", core.CLOSED)
    with refused("INVALID_HANDLE"):
        beside.copy_beside([(1000, 2000, 8)], stream=stream, lane=lane, begin=begin)
    assert _work(library) == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_finaliser_may_record_in_the_middle_of_it(
    beside: CudaDriver, library: Library, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """On either stream: no wait is left out that counts."""
    stream, lane, begin = _stream(beside, 40), _stream(beside, 41), beside.create_event(0)
    late, asked, busy = beside.create_event(0), itertools.count(1), []
    ask = library.cuStreamIsCapturing

    def meanwhile(handle: int, answer: Any) -> int:
        if not busy and next(asked) == number:
            busy.append(handle)
            (stream if handle == 40 else lane).record(late)
        return ask(handle, answer)

    if library.beside is not None:
        library.played["capturing"] = calls_of._ffi.callback(TYPES["capturing"], meanwhile)
        library.beside = Beside(library.played)
    else:
        monkeypatch.setattr(library, "cuStreamIsCapturing", meanwhile)
    end = beside.copy_beside([(1000, 2000, 8)], stream=stream, lane=lane, begin=begin)
    assert busy == [39 + number]
    waits = len(library.asked("cuStreamWaitEvent"))
    _stream(beside, 42).wait(end)
    assert len(library.asked("cuStreamWaitEvent")) == waits + 1
    assert end.recorded[0] is lane
    assert end.sequence == lane.recordings.last
    if number == 2:
        assert end.sequence > late.sequence
