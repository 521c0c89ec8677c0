"""Registered host memory in C: counted, in chunks, whole or not at all."""

from __future__ import annotations

import ctypes
import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ...threads import in_threads
from ..driver_cases import PAGE, map_pages, unmap_pages
from .bound import Device, Native, Refused

WORLD = 12  # pages


def registered(native: Native) -> int:
    return int(native.stub.stub_registrations())


@settings(max_examples=3 * settings.default.max_examples)
@given(
    max_chunk=st.integers(1, 4 * PAGE),
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(0, 4 * PAGE), st.integers(1, 3 * PAGE), st.integers(0, 3)),
        max_size=12,
    ),
)
def test_any_sequence_of_calls(loaded: Native, max_chunk: int, steps: list[tuple[bool, int, int, int]]) -> None:
    """A byte is registered exactly while somebody claims it, and never twice with the driver."""
    native, start = loaded, map_pages(WORLD)
    max_chunk = max(max_chunk, 3 * PAGE // 16)
    device = native.open(max_chunk=max_chunk)
    claims: list[tuple[int, int]] = []
    for release, at, nbytes, which in steps:
        if release and claims:
            at, nbytes = claims.pop(which % len(claims))
            device.unregister(start + at, nbytes)
        else:
            device.register(start + at, nbytes)
            claims.append((at, nbytes))
        edges = sorted({edge for at, nbytes in claims for edge in (at, at + nbytes - 1)} | {7 * PAGE + 1})
        for byte in edges:
            claimed = any(at <= byte < at + nbytes for at, nbytes in claims)
            if claimed:
                first, size = device.range_of(start + byte)
                assert first <= start + byte < first + size <= first + max_chunk
                assert device.device_pointer(start + byte) == start + byte
    for at, nbytes in claims:
        device.unregister(start + at, nbytes)
    with pytest.raises(Refused, match="NOT_REGISTERED"):
        device.range_of(start)
    assert device.host_statistics().registered == registered(native) == 0
    device.close()
    unmap_pages(start, WORLD)


def test_a_second_registration_never_reaches_the_driver(native: Native, device: Device) -> None:
    start = map_pages(8)
    device.register(start, 4 * PAGE)
    for at, nbytes in ((0, 4 * PAGE), (PAGE, PAGE), (100, 50)):
        device.register(start + at, nbytes)
    assert registered(native) == 1
    device.register(start + 2 * PAGE, 4 * PAGE)  # of this only the half that is new
    assert registered(native) == 2
    assert device.host_statistics().registered == 6 * PAGE
    for at, nbytes in ((0, 4 * PAGE), (0, 4 * PAGE), (PAGE, PAGE), (100, 50)):
        device.unregister(start + at, nbytes)
    assert registered(native) == 2  # the other one reaches into the first
    device.unregister(start + 2 * PAGE, 4 * PAGE)
    assert registered(native) == 0


def test_two_handles_share_the_registrations(native: Native, device: Device) -> None:
    start, other = map_pages(1), native.open(1)
    device.register(start, PAGE)
    other.register(start, PAGE)
    assert registered(native) == 1
    device.unregister(start, PAGE)
    assert registered(native) == 1
    other.unregister(start, PAGE)
    other.close()


@pytest.mark.parametrize("failing", range(4))
def test_a_refused_chunk_undoes_those_before(native: Native, failing: int) -> None:
    device, start = native.open(max_chunk=PAGE), map_pages(4)
    native.stub.stub_fail(b"cuMemHostRegister_v2", failing, 304)
    with pytest.raises(Refused, match=r"DRIVER: host register: CUDA_ERROR_OPERATING_SYSTEM .*asked for 4\.00 KiB"):
        device.register(start, 4 * PAGE)
    assert (registered(native), device.host_statistics().registered) == (0, 0)
    device.register(start, 4 * PAGE)
    assert registered(native) == 4
    device.unregister(start, 4 * PAGE)
    device.close()


def test_a_failing_undo_is_told_and_what_stays_is_known(native: Native) -> None:
    device, start = native.open(max_chunk=PAGE), map_pages(3)
    native.stub.stub_fail(b"cuMemHostRegister_v2", 2, 304)
    native.stub.stub_fail(b"cuMemHostUnregister", 0, 304)
    with pytest.raises(Refused, match=r"OPERATING_SYSTEM .* undoing .* failed"):
        device.register(start, 3 * PAGE)
    assert (registered(native), device.host_statistics().registered) == (1, PAGE)
    device.register(start, 3 * PAGE)  # takes what stayed over
    device.unregister(start, 3 * PAGE)
    assert registered(native) == 0
    device.close()


def test_a_refused_unregister_can_be_repeated(native: Native) -> None:
    device, start = native.open(max_chunk=PAGE), map_pages(3)
    device.register(start, 3 * PAGE)
    native.stub.stub_fail(b"cuMemHostUnregister", 1, 304)
    with pytest.raises(Refused, match="call again"):
        device.unregister(start, 3 * PAGE)
    assert registered(native) == 2
    device.unregister(start, 3 * PAGE)
    assert registered(native) == 0
    device.close()


def test_what_was_not_registered_like_that(device: Device) -> None:
    start = map_pages(4)
    device.register(start, 2 * PAGE)
    for at, nbytes in ((0, PAGE), (PAGE, PAGE), (3 * PAGE, PAGE)):
        with pytest.raises(Refused, match="NOT_REGISTERED"):
            device.unregister(start + at, nbytes)
    device.unregister(start, 2 * PAGE)
    with pytest.raises(Refused, match="unregistered already"):
        device.unregister(start, 2 * PAGE)
    with pytest.raises(Refused, match="NOT_REGISTERED: host device pointer"):
        device.device_pointer(start)


def test_somebody_else_s_registration(native: Native, device: Device) -> None:
    """Of another library: told, left alone, and nothing of ours stays."""
    start, own = map_pages(4), native.stub_ffi
    native.stub.cuCtxPushCurrent_v2(own.cast("void *", 1))
    native.stub.cuMemHostRegister_v2(own.cast("void *", start + 2 * PAGE), PAGE, 3)
    with pytest.raises(Refused, match=r"ALREADY_REGISTERED: .* another library holds"):
        device.register(start, 4 * PAGE)
    assert registered(native) == 1
    native.stub.cuMemHostUnregister(own.cast("void *", start + 2 * PAGE))
    native.stub.cuCtxPopCurrent_v2(own.new("void **"))


def test_read_only_mappings(native: Native, device: Device) -> None:
    start = map_pages(2, rights=mmap.PROT_READ)
    with pytest.raises(Refused, match="MEMFERRY_READ_ONLY"):
        device.register(start, PAGE)
    device.register(start, PAGE, native.lib.MEMFERRY_READ_ONLY)
    with pytest.raises(Refused, match="registered as read-only already"):
        device.register(start, PAGE)
    device.unregister(start, PAGE)
    with pytest.raises(Refused, match="INVALID: host register: unknown flags 0x6"):
        device.register(start, PAGE, 6)


@pytest.mark.parametrize(("address", "nbytes"), [(0, 1), (1 << 20, (1 << 64) - 1), ((1 << 64) - 4096, 4097)])
def test_ranges_that_are_none(device: Device, address: int, nbytes: int) -> None:
    with pytest.raises(Refused, match=r"INVALID: host register: .* no range"):
        device.register(address, nbytes)


def test_empty_ranges_take_no_driver_call(native: Native, device: Device) -> None:
    native.stub.stub_count_calls(1)
    before = native.stub.stub_calls()
    device.register(4096, 0)
    device.unregister(4096, 0)
    native.stub.stub_count_calls(0)
    assert native.stub.stub_calls() == before


def test_the_device_pointer_is_asked_for(native: Native, device: Device) -> None:
    start = map_pages(2)
    native.stub.stub_mapped_offset(1 << 40)
    device.register(start, 2 * PAGE)
    assert device.device_pointer(start + 24) == start + 24 + (1 << 40)
    device.unregister(start, 2 * PAGE)


# -- arenas ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, (2 << 20) + 1, (65 << 20) + 3])
def test_arenas_are_exact_aligned_and_zero(native: Native, device: Device, nbytes: int) -> None:
    address = device.host(nbytes)
    assert address % (2 << 20) == 0
    exact = -(-nbytes // PAGE) * PAGE
    found = device.host_statistics()
    assert (found.arenas, found.arena_nbytes, found.registered) == (1, exact, exact)
    data = (ctypes.c_char * exact).from_address(address)
    assert data[:1] == data[exact - 1 :] == b"\0"
    data[exact - 1 :] = b"x"
    with pytest.raises(Refused, match="BUSY: close: device 0 still has open arenas"):
        device.close()
    device.host_free(address)
    assert device.host_statistics().arena_nbytes == 0


def test_arenas_that_cannot_be(native: Native, device: Device) -> None:
    assert device.host(0) == 0
    device.host_free(0)
    with pytest.raises(Refused, match=r"OUT_OF_MEMORY: host allocate: .* cannot be mapped"):
        device.host(1 << 52)
    with pytest.raises(Refused, match="INVALID: host allocate"):
        device.host((1 << 64) - 1)
    native.stub.stub_fail(b"cuMemHostRegister_v2", 0, 304)
    with pytest.raises(Refused, match="OPERATING_SYSTEM"):
        device.host(PAGE)
    assert device.host_statistics().arenas == 0


def test_arenas_are_freed_once(native: Native, device: Device) -> None:
    address = device.host(PAGE)
    with pytest.raises(Refused, match="INVALID: host free"):
        device.host_free(address + 1)
    native.stub.stub_fail(b"cuMemHostUnregister", 0, 304)
    with pytest.raises(Refused, match="OPERATING_SYSTEM"):
        device.host_free(address)
    assert device.host_statistics().arenas == 1
    device.host_free(address)
    with pytest.raises(Refused, match="freed twice"):
        device.host_free(address)


def test_threads_register_the_same_ranges(native: Native, device: Device) -> None:
    start = map_pages(8)

    def work(number: int) -> None:
        for turn in range(50):
            at = (turn + number) % 6 * PAGE
            device.register(start + at, 2 * PAGE)
            assert device.device_pointer(start + at + PAGE) == start + at + PAGE
            device.unregister(start + at, 2 * PAGE)

    in_threads(8, work)
    assert (registered(native), device.host_statistics().registrations) == (0, 0)
