"""What helpers have carried, what they hold, and whether it has come."""

from __future__ import annotations

import pytest

from memferry_allocator import Direction
from memferry_transport import LinearCost, TransferFailedError

from .fleet import IN, OUT, RATE, Fleet, calibrated, slow_links


@pytest.mark.parametrize("mode", ["quota", "queue"])
def test_bytes_and_staging_are_counted_by_helper(mode: str) -> None:
    fleet = Fleet(slow_links(3), mode=mode)
    assert [(use.device, use.bytes_in, use.staging_nbytes) for use in fleet.engine.helpers()] == [
        (1, 0, 0),
        (2, 0, 0),
    ]
    carried = {(helper, way): 0 for helper in (1, 2) for way in Direction}
    for direction in (IN, OUT, IN):
        transfer = fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream)
        transfer.synchronize()
        for share in transfer.ways:
            if share.path.helper is not None:
                carried[share.path.helper, direction] += share.nbytes
    for use in fleet.engine.helpers():
        assert (use.bytes_in, use.bytes_out) == (carried[use.device, IN], carried[use.device, OUT])
        assert use.bytes_in + use.bytes_out > 0
        assert use.staging_nbytes == 2 * 2 * 100  # two slices a direction
    fleet.close()


def test_kernels_hold_no_memory() -> None:
    fleet = Fleet(slow_links(), calibration=calibrated(2, kernels={1: LinearCost(0.0, RATE)}), relay="kernel")
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).synchronize()
    (use,) = fleet.engine.helpers()
    assert use.bytes_in > 0 == use.staging_nbytes
    fleet.close()


def test_a_direct_transfer_takes_no_helper() -> None:
    fleet = Fleet(slow_links())
    for direction in Direction:
        transfer = fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream, direct=True)
        assert not transfer.ways
        assert fleet.engine.copy(*fleet.ends(direction), direction, stream=fleet.stream).ways
    fleet.close()


def test_bytes_that_a_lost_helper_had_are_told_of_once() -> None:
    driver = slow_links()
    fleet = Fleet(driver)
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).synchronize()
    fleet.engine.require_arrived()
    driver.lose(1)
    fleet.engine.require_arrived()  # all had come before
    fleet.engine.close()

    driver = slow_links()
    fleet = Fleet(driver)
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream)
    fleet.engine.require_arrived()  # under way, and well so far
    driver.lose(1)
    with pytest.raises(TransferFailedError, match="device 1, a helper, was lost"):
        fleet.engine.require_arrived()
    fleet.engine.require_arrived()
    fleet.engine.copy(*fleet.ends(IN), IN, stream=fleet.stream).synchronize()
    fleet.engine.require_arrived()
    assert fleet.arrived(IN)
    fleet.engine.close()
