"""What is pinned in this process, told."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

from memferry_allocator import (
    Driver,
    EmulatedDriver,
    Foreign,
    HostArena,
    PinnedMemory,
    RegistrationMap,
    adopt,
    describe,
    registrations,
)

from .driver_cases import PAGE, map_pages, unmap_pages
from .machine import address, pages
from .test_arena import LAZY
from .test_registration import Counting


def test_a_row_says_everything(any_driver: Driver) -> None:
    data, known, before = pages(4 * PAGE), registrations(any_driver), time.time()
    start = address(data)
    held = known.register(start, 2 * PAGE, owner=data, name="weights", read_only=True)
    again = known.register(start + 10, 10, name="cache", read_only=True)
    (row,) = (row for row in describe(any_driver) if row.address == start)
    assert (row.driver, row.nbytes, row.names, row.owner) == (
        any_driver.name, 2 * PAGE, ("cache", "weights"), "ndarray",
    )  # fmt: skip
    assert before <= row.since <= time.time()
    assert (row.read_only, row.borrowed, row.references, row.stale) == (True, False, 2, "")
    held.close()
    again.close()
    assert row.references == 2  # a value, whatever happens later
    assert start not in {row.address for row in describe(any_driver)}


def test_all_drivers_together_or_one() -> None:
    one, other = EmulatedDriver(), EmulatedDriver()
    first, second = HostArena(one, PAGE, LAZY), adopt(other, np.zeros(100, np.uint8))
    direct = RegistrationMap(other)
    third = direct.register(first.address, 10, name="by a map of its own")
    everything = {(row.address, row.names) for row in describe()}
    mine = {(row.address, row.names) for row in describe(one)}
    theirs = {(row.address, row.names) for row in describe(other)}
    assert mine == {(first.address, ("HostArena",))}
    assert theirs == {(second.span.ptr, ("ndarray",)), (first.address, ("by a map of its own",))}
    assert mine | theirs <= everything
    third.close()


def test_in_order_of_address() -> None:
    driver, data = EmulatedDriver(), pages(4 * PAGE)
    held = [registrations(driver).register(address(data) + at * PAGE, 100) for at in (2, 0, 3, 1)]
    found = describe(driver)
    assert [row.address - address(data) for row in found] == [0, PAGE, 2 * PAGE, 3 * PAGE]
    assert (len(found), found.nbytes) == (4, 400)
    for registration in held:
        registration.close()
    assert describe(driver) == PinnedMemory(())


def test_borrowed_and_stale_ranges(any_driver: Driver) -> None:
    data, known, start = pages(PAGE), registrations(any_driver), map_pages(2)
    any_driver.host_register(address(data), PAGE)
    borrowed = known.register(address(data), PAGE, foreign=Foreign.BORROW)
    stale = known.register(start, 2 * PAGE)
    unmap_pages(start, 2)
    found = {row.address: row for row in describe(any_driver)}
    assert found[address(data)].borrowed
    assert found[start].stale == "its pages were unmapped"
    text = str(describe(any_driver))
    assert "borrowed" in text
    assert "stale: its pages were unmapped" in text
    stale.close()
    any_driver.host_unregister(address(data))
    (row,) = (row for row in describe(any_driver) if row.address == address(data))
    assert "unregistered" in row.stale
    borrowed.close()


def test_what_is_borrowed_counts_as_its_owners() -> None:
    driver, data = EmulatedDriver(), pages(2 * PAGE)
    driver.host_register(address(data), PAGE)
    with registrations(driver).register(address(data), PAGE, foreign=Foreign.BORROW):
        assert len(describe(driver)) == 1
        assert describe(driver).nbytes == 0


def test_what_an_undo_left_behind_is_nobodys() -> None:
    driver, data = Counting(), pages(600)
    known, start = RegistrationMap(driver, max_chunk=300), address(data)
    driver.refuse |= {("register", start + 300), ("unregister", start)}
    with pytest.raises(Exception, match="undoing it failed"):
        known.register(start, 600)
    (row,) = describe(driver)
    assert (row.nbytes, row.names, row.references) == (300, (), 0)
    assert "nobody" in str(describe(driver))


def test_a_table_to_read() -> None:
    driver, data = EmulatedDriver(), pages(3 * PAGE)
    held = registrations(driver).register(address(data), 3 * PAGE, name="gradients", read_only=True)
    head, line, total = str(describe(driver)).splitlines()
    for word in ("driver", "address", "size", "references", "since", "by", "owner", "notes"):
        assert word in head
    for word in ("emulated", f"{address(data):#x}", "12.00 KiB", "gradients", "read-only"):
        assert word in line
        assert head.index("by") == line.index("gradients")
    assert total == "1 ranges, 12.00 KiB pinned by MemFerry"
    held.close()


def test_a_closed_driver_can_be_described() -> None:
    driver, data = EmulatedDriver(), pages(PAGE)
    driver.host_register(address(data), PAGE)
    held = registrations(driver).register(address(data), PAGE, foreign=Foreign.BORROW)
    driver.close()
    (row,) = describe(driver)
    assert "cannot be asked any more" in row.stale
    del held


def test_a_dead_driver_has_no_rows() -> None:
    driver = EmulatedDriver()
    arena = HostArena(driver, PAGE, LAZY)
    where = arena.address
    assert where in {row.address for row in describe()}
    del arena, driver
    gc.collect()
    assert where not in {row.address for row in describe()}
