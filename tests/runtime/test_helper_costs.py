"""Where the costs of ways over helpers come from."""

from __future__ import annotations

from pathlib import Path as File

import pytest

from memferry_allocator import EmulatedDriver, EmulatedOptions
from memferry_rt.helpers import Help, costs, find_costs
from memferry_transport import CalibrationError, Path
from memferry_transport.calibration import calibration_path, save_calibration
from memferry_transport.measure import MeasureOptions
from memferry_transport.topology import discover, prior_calibration


class AsReal:
    """No driver is an emulated one."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: File) -> EmulatedDriver:
    """A machine that is taken for a real one, of which nothing is known yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(costs, "EmulatedDriver", AsReal)
    monkeypatch.setattr(costs, "SHORT", MeasureOptions(nbytes=512 << 10, samples=1, copies=1))
    return EmulatedDriver(EmulatedOptions(device_count=3, device_memory=64 << 20))


def test_they_are_measured_where_nothing_is_kept(driver: EmulatedDriver) -> None:
    free = [driver.memory_info(device).free for device in range(3)]
    found = find_costs(driver, 1, [0])
    assert found.source.startswith("costs measured at set-up in ")
    assert {(path.device, path.helper) for path, _ in found.calibration.ways} == {(1, None), (1, 0)}
    assert {device for device, _ in found.calibration.break_even_bytes} == {1}
    assert [driver.memory_info(device).free for device in range(3)] == free
    assert driver.registered == 0
    assert not calibration_path(discover(driver).machine).exists(), "a short measurement is not worth keeping"


def test_where_nothing_can_be_measured_it_says_what_to_do(driver: EmulatedDriver) -> None:
    taken = driver.malloc(1, driver.memory_info(1).free - (1 << 20))
    with pytest.raises(CalibrationError, match=r"^helpers: .*run `memferry bandwidth --recalibrate` once"):
        find_costs(driver, 1, [0])
    driver.free(1, taken)
    assert driver.memory_info(1).free == driver.memory_info(0).free
    assert driver.registered == 0


def test_what_is_kept_of_the_machine_is_taken(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = prior_calibration(discover(driver), 4096)
    path = save_calibration(kept)
    monkeypatch.setattr(costs, "calibrate", lambda *_, **__: pytest.fail("it is measured"))
    found = find_costs(driver, 0, [2])
    assert found.source == f"costs as calibrated {kept.date}"
    assert {way for way, _ in found.calibration.ways} == {Path(0), Path(0, 2)}
    assert found.calibration.slice_bytes == 4096
    path.write_text("{")
    with pytest.raises(CalibrationError, match="is damaged"):
        find_costs(driver, 0, [2])


def test_what_is_kept_is_not_taken_where_a_helper_is_not_in_it(driver: EmulatedDriver) -> None:
    fewer = EmulatedDriver(EmulatedOptions(device_count=2))
    known = prior_calibration(discover(fewer), 4096)
    save_calibration(
        type(known)(discover(driver).machine, known.source, "2020-01-01T00:00:00Z", known.ways, known.slice_bytes)
    )
    assert "measured" in find_costs(driver, 0, [2]).source
    assert "calibrated" in find_costs(driver, 0, [1]).source


def test_auto_uses_only_devices_that_were_chosen(driver: EmulatedDriver) -> None:
    save_calibration(prior_calibration(discover(driver), 4096))
    help = Help.over(driver, 0, [1], named=False)
    assert help.options is not None
    assert help.options.helpers == "auto"
    assert help.calibration is not None
    assert {path.helper for path, _ in help.calibration.ways} == {None, 1}
