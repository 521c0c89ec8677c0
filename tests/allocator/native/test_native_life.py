"""Opening, closing, forks, captures, contexts and errors of the library in C."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memferry_allocator import UnsupportedError
from memferry_allocator import native as package
from memferry_allocator.native import library
from memferry_allocator.native.__main__ import main

from ..driver_cases import PAGE, map_pages
from ..test_open_driver import in_a_process
from .bound import Device, Native, Refused
from .compiling import need_compiler


@need_compiler
def test_it_is_built_where_a_compiler_is() -> None:
    assert package.library_path().is_file()
    assert package.torch_library_path().is_file()
    assert (package.include_path() / "memferry.h").is_file()


def test_without_a_compiler_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    with pytest.raises(UnsupportedError, match=r"without a C compiler .* install"):
        package.library_path()
    with pytest.raises(UnsupportedError, match=r"without a C\+\+ compiler"):
        package.torch_library_path()
    assert main(["--cflags"]) == 0
    assert main(["--libs"]) == 1
    assert "without a C compiler" in capsys.readouterr().err


@need_compiler
def test_flags_for_a_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cflags", "--libs"]) == 0
    assert f"-I{package.include_path()} -L" in capsys.readouterr().out
    assert main(["--library"]) == 0
    assert capsys.readouterr().out.strip() == str(package.library_path())
    with pytest.raises(SystemExit):
        main([])


def test_every_status_has_words(native: Native) -> None:
    texts = {native.ffi.string(native.lib.memferry_error_text(status)) for status in native.statuses}
    assert len(texts) == len(native.statuses)
    assert b"unknown status" not in texts
    assert native.ffi.string(native.lib.memferry_error_text(99)) == b"unknown status"
    assert native.ffi.string(native.lib.memferry_version()) == b"0.1.0"


def test_a_second_close_does_nothing(native: Native) -> None:
    device = native.open()
    pool = device.pool(4096)
    for _ in range(2):
        pool.close()
    for _ in range(2):
        device.close()
    native.call("close", native.ffi.NULL)
    native.call("pool_close", native.ffi.NULL)


@pytest.mark.parametrize("ordinal", [-1, 2])
def test_devices_that_are_not_there(native: Native, ordinal: int) -> None:
    with pytest.raises(Refused, match=f"NO_DEVICE: open: asked for device {ordinal}, the driver has 2"):
        native.open(ordinal)


def test_drivers_that_are_not_there(native: Native) -> None:
    with pytest.raises(Refused, match=r"NO_DRIVER: .* MEMFERRY_LIBCUDA"):
        native.open(path="/nowhere/libcuda.so.1")
    with pytest.raises(Refused, match=r"NO_DRIVER: open: libm.so.6 has no cuInit"):
        native.open(path="libm.so.6")


@pytest.mark.parametrize(
    ("call", "code", "status"),
    [
        ("cuInit", 100, "NO_DEVICE"),
        ("cuInit", 803, "DRIVER"),
        ("cuDeviceGetCount", 3, "DRIVER"),
        ("cuDeviceGet", 101, "NO_DEVICE"),
        ("cuDevicePrimaryCtxRetain", 2, "OUT_OF_MEMORY"),
        ("cuDevicePrimaryCtxRetain", 709, "DEVICE_LOST"),
    ],
)
def test_drivers_that_do_not_start(native: Native, call: str, code: int, status: str) -> None:
    native.stub.stub_fail(call.encode(), 0, code)
    with pytest.raises(Refused, match=f"{status}: open"):
        native.open()


def test_the_environment_names_the_driver(stub: Path) -> None:
    said = in_a_process(
        "from memferry_allocator.native import bindings\n"
        "ffi, lib = bindings()\n"
        "device = ffi.new('memferry_device **')\n"
        "print(lib.memferry_open(0, ffi.NULL, device), lib.memferry_close(device))\n",
        MEMFERRY_LIBCUDA=str(stub),
    )
    assert said == "0 0"


@pytest.mark.parametrize("call", ["cuCtxPushCurrent_v2", "cuThreadExchangeStreamCaptureMode"])
def test_a_context_that_cannot_be_entered(native: Native, device: Device, call: str) -> None:
    """The `native` fixture checks that the stack of contexts is as it was."""
    native.stub.stub_fail(call.encode(), 0, 201)
    with pytest.raises(Refused, match=r"DEVICE_LOST: .* restart the process"):
        device.pool(4096)


@pytest.mark.parametrize("call", ["cuCtxSynchronize", "cuMemFree_v2"])
def test_a_close_that_is_refused_can_be_repeated(native: Native, device: Device, call: str) -> None:
    pool = device.pool(4096)
    native.stub.stub_fail(call.encode(), 0, 304)
    with pytest.raises(Refused, match="OPERATING_SYSTEM"):
        pool.close()
    pool.free(pool.allocate(1, device.stream()), 1, device.stream())
    pool.close()


def test_arguments_that_are_nothing(native: Native, device: Device) -> None:
    null, lib = native.ffi.NULL, native.lib
    pool, out = device.pool(4096), native.ffi.new("memferry_ptr *")
    for status in (
        lib.memferry_open(0, null, null),
        lib.memferry_stream_create(null, native.ffi.new("memferry_stream *")),
        lib.memferry_stream_create(device.handle[0], null),
        lib.memferry_copy(null, 1, 2, 3, null),
        lib.memferry_pool_open(null, 1, native.ffi.new("memferry_pool **")),
        lib.memferry_pool_open(device.handle[0], 0, native.ffi.new("memferry_pool **")),
        lib.memferry_allocate(null, 1, null, out),
        lib.memferry_allocate(pool.handle[0], 1, null, null),
        lib.memferry_free(null, 1, 1, null),
        lib.memferry_pool_trim(null, null),
        lib.memferry_pool_forget_stream(null, null),
        lib.memferry_pool_statistics(pool.handle[0], null),
        lib.memferry_host_register(null, null, 0, 0),
        lib.memferry_host_device_pointer(device.handle[0], out, null),
        lib.memferry_host_allocate(device.handle[0], 1, null),
        lib.memferry_host_statistics_get(device.handle[0], null),
    ):
        with pytest.raises(Refused, match="INVALID"):
            native.check(status)
    pool.close()


def test_copies_end_where_registrations_do(native: Native, device: Device) -> None:
    start, stream = map_pages(4), device.stream()
    device.register(start, 2 * PAGE)
    with pytest.raises(Refused, match="memferry_host_range has the edges"):
        device.call("copy", start, start + PAGE, 2 * PAGE, stream)
    device.call("copy", start, start + PAGE, PAGE, stream)
    device.call("copy", 0, 0, 0, stream)
    device.unregister(start, 2 * PAGE)


# -- captures ----------------------------------------------------------------------------------------------
class Capture:
    """A stream that is being captured; leaving checks that the capture came through unharmed."""

    def __init__(self, native: Native, stream: object, mode: int) -> None:
        self.native, self.stream, self.mode = native, native.stub_ffi.cast("void *", stream), mode

    def _call(self, name: str, *arguments: object) -> int:
        self.native.stub.cuCtxPushCurrent_v2(self.native.stub_ffi.cast("void *", 1))
        code = getattr(self.native.stub, name)(self.stream, *arguments)
        self.native.stub.cuCtxPopCurrent_v2(self.native.stub_ffi.new("void **"))
        return int(code)

    def __enter__(self) -> None:
        assert self._call("cuStreamBeginCapture_v2", self.mode) == 0

    def __exit__(self, *_: object) -> None:
        assert self._call("cuStreamEndCapture", self.native.stub_ffi.new("void **")) == 0


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_a_captured_stream_is_refused_and_everything_else_works(native: Native, device: Device, mode: int) -> None:
    pool, stream, other = device.pool(4096), device.stream(), device.stream()
    pointer = pool.allocate(1024, stream)
    with Capture(native, stream, mode):
        for refused in (
            lambda: pool.allocate(1, stream),
            lambda: pool.free(pointer, 1024, stream),
            lambda: pool.record_use(pointer, stream),
        ):
            with pytest.raises(Refused, match=r"CAPTURING: .* before or after the capture"):
                refused()
        pool.free(pool.allocate(1024, other), 1024, other)
        address = device.host(PAGE)
        device.host_free(address)
        second = device.pool(4096)
        second.trim()
        second.close()
    pool.free(pointer, 1024, stream)
    pool.close()


def test_memory_last_used_on_a_captured_stream_waits_for_the_capture(native: Native, device: Device) -> None:
    pool, stream, other = device.pool(4096), device.stream(), device.stream()
    pool.free(pool.allocate(2048, stream), 2048, stream)
    pool.forget(other)
    with Capture(native, stream, 0):
        rest = pool.allocate(2048, other)  # never used on the captured stream, or not at all
        with pytest.raises(Refused, match=r"CAPTURING: .* last used on stream"):
            pool.allocate(2048, other)
    again = pool.allocate(2048, other)
    for pointer in (rest, again):
        pool.free(pointer, 2048, other)
    pool.close()


# -- forks -------------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_is_refused_and_the_parent_goes_on(native: Native, device: Device) -> None:
    pool, stream = device.pool(4096), device.stream()
    pointer, address = pool.allocate(1, stream), device.host(PAGE)
    calls = (
        lambda: pool.allocate(1, stream),
        lambda: pool.free(pointer, 1, stream),
        lambda: pool.trim(),
        lambda: pool.statistics,
        lambda: pool.forget(stream),
        lambda: pool.close(),
        lambda: device.host(PAGE),
        lambda: device.host_free(address),
        lambda: device.register(address, PAGE),
        lambda: device.unregister(address, PAGE),
        lambda: device.device_pointer(address),
        lambda: device.stream(),
        lambda: device.call("stream_synchronize", stream),
        lambda: device.call("stream_destroy", stream),
        lambda: device.call("copy", address, address, 1, stream),
        lambda: device.close(),
        lambda: native.open(),
    )
    child = os.fork()
    if child == 0:
        answered = 0
        for call in calls:
            try:
                call()
            except Refused as error:
                answered += error.status == "FORKED"
        os._exit(answered)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
    pool.free(pointer, 1, stream)
    device.host_free(address)
    pool.close()
