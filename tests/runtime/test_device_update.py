"""The device's part of the update: only kernels with the right bits, and state that streams through a ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memferry_allocator import DevicePool, EmulatedDriver, EmulatedOptions, HostArena, Stream
from memferry_rt.device_update import DeviceUpdate, device_agrees, open_device_update, part_of
from memferry_rt.native import AdamKernel, AdamOperands, AdamSettings, load_adam
from memferry_rt.split import UpdateRates, spread
from memferry_rt.streaming import BYTES, SLOTS, UNIT, StateStream

CHOSEN = AdamSettings(1e-2, 0.9, 0.99, 1e-8, 0.1, decoupled=True, maximize=False)


@pytest.fixture
def kernel() -> AdamKernel:
    found = load_adam()
    if found is None:
        pytest.skip("no native kernel")
    return found


class Wrong:
    """Rounds a little differently."""

    def __init__(self, right: DeviceUpdate) -> None:
        self._right = right

    def prepare(self, settings: AdamSettings, step: float, scale: float) -> Any:
        return self._right.prepare(settings, step, scale * (1 + 2**-22))

    def run(self, stream: Stream, prepared: Any, operands: AdamOperands) -> None:
        self._right.run(stream, prepared, operands)


def test_a_device_kernel_that_differs_is_not_used(kernel: AdamKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = EmulatedDriver()
    right = open_device_update(driver, 0, kernel)
    assert right is not None
    assert device_agrees(driver, 0, right, kernel)
    monkeypatch.setattr("memferry_rt.device_update.open_device_adam", lambda *_, **__: Wrong(right))
    with pytest.warns(RuntimeWarning, match="differ in the last bit"):
        assert open_device_update(driver, 0, kernel) is None
    assert driver.registered == 0
    assert open_device_update(driver, 0, None) is None


class State:
    """One parameter's state in registered pages, and a copy that the CPU updates."""

    def __init__(self, driver: EmulatedDriver, count: int, dtype: str, seed: int) -> None:
        size = 4 * count + 64
        self.arena = HostArena(driver, 5 * size)
        self.pages = self.arena.array(self.arena.cut(5 * size))
        noise = np.random.default_rng(seed).random((5, size // 4), dtype=np.float32)
        self.pages[:] = noise.view(np.uint8).reshape(-1)[: 5 * size]
        if dtype == "bfloat16":  # any bits but those of infinities and NaNs
            self.pages[3 * size : 4 * size].view(np.uint16)[:] &= 0x3FFF
        self.expected = self.pages.copy()
        self.operands, self.copy = (
            AdamOperands(
                base, base + 3 * size, dtype, base + size, base + 2 * size,
                base + 4 * size if dtype == "bfloat16" else 0, count, tail=count % 8,
            )
            for base in (self.pages.ctypes.data, self.expected.ctypes.data)
        )  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    units=st.integers(1, 8),
    seed=st.integers(0, 9),
)
def test_streamed_state_has_the_bits_of_the_cpu(counts: list[int], dtype: str, units: int, seed: int) -> None:
    kernel = load_adam()
    if kernel is None:
        pytest.skip("no native kernel")
    driver = EmulatedDriver(EmulatedOptions(seed=seed))
    update = open_device_update(driver, 0, kernel)
    assert update is not None
    pool = DevicePool(driver, 0, 1 << 16)
    streaming = StateStream(driver, 0, update, pool, units * SLOTS * BYTES * UNIT, measure=True)
    states = [State(driver, count, dtype, seed) for count in counts]
    for state in states:
        streaming.run(state.operands, update.prepare(CHOSEN, 2.0, 0.5))
    streaming.out.synchronize()
    for state in states:
        kernel.run(kernel.prepare(CHOSEN, 2.0, 0.5), state.copy)
        assert np.array_equal(state.pages, state.expected)
    assert streaming.bytes_in == sum(counts) * (16 if dtype == "float32" else 14)
    assert streaming.bytes_out == sum(counts) * (12 if dtype == "float32" else 14)
    rate = streaming.rate()
    assert rate is not None
    assert rate > 0
    assert streaming.rate() is None
    streaming.close(driver.create_stream(0))
    assert pool.used == 0


@given(count=st.integers(1, 5000), cut=st.integers(1, 40), weight=st.booleans())
def test_the_parts_of_an_update_are_the_whole(count: int, cut: int, weight: bool) -> None:
    whole = AdamOperands(1000, 2000, "bfloat16", 3000, 4000, 5000 if weight else 0, count, tail=count % 8)
    size = 64 * cut
    parts = [part_of(whole, start, min(size, count - start)) for start in range(0, count, size)]
    assert parts[0].parameter == whole.parameter
    for number, part in enumerate(parts):
        assert part.parameter == whole.parameter + 4 * size * number
        assert part.gradient == whole.gradient + 2 * size * number
        assert part.weight == (whole.weight + 2 * size * number if weight else 0)
    assert sum(part.count for part in parts) == count
    assert [part.tail for part in parts[:-1]] == [0] * (len(parts) - 1)
    assert parts[-1].tail == whole.tail


@given(st.lists(st.integers(0, 1000), max_size=40), st.floats(0, 1))
def test_the_device_has_about_its_share_at_every_point(sizes: list[int], share: float) -> None:
    chosen = spread(sizes, share)
    largest = max(sizes, default=0)
    for end in range(len(sizes) + 1):
        taken = sum(size for size, take in zip(sizes[:end], chosen[:end], strict=True) if take)
        assert abs(taken - share * sum(sizes[:end])) <= largest
    assert not any(spread(sizes, 0.0))
    assert spread(sizes, 1.0) == [size > 0 for size in sizes]


def test_rates_follow_what_is_measured() -> None:
    rates = UpdateRates()
    assert rates.device_share == 0.5
    assert rates.measured(None, None) is rates
    rates = rates.measured(6e9, 2e9)
    assert (rates.cpu, rates.device, rates.samples) == (6e9, 2e9, 1)
    assert rates.device_share == 0.25
    assert rates.measured(None, 4e9).device == 3e9
