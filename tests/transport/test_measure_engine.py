"""What is measured of the transfer engine, on links that are known."""

from __future__ import annotations

import pytest

from memferry_allocator import Direction, EmulatedDriver
from memferry_transport import Calibration, Path
from memferry_transport.measure import Bench, CaseResult, Matrix, find_case, run_case
from memferry_transport.quotas import slice_quotas

from .measuring import D2H, H2D, IN, OUT, bench_of, emulated, gb_per_second

SIZE = 1 << 20
WAYS = {IN: ("h2d", H2D), OUT: ("d2h", D2H)}


def run(bench: Bench, name: str) -> CaseResult:
    return run_case(bench, find_case(name))


def measured(bench: Bench, name: str) -> Matrix:
    result = run(bench, name)
    assert result.status == "passed", result.reason
    assert result.matrix is not None
    return result.matrix


def test_the_engine_takes_as_long_as_its_ways_cost() -> None:
    """Below the break-even it is a plain copy; above, all ways end when the slowest share does."""
    with bench_of(nbytes=SIZE) as bench:
        known = bench.calibration()
        for direction, (name, link) in WAYS.items():
            matrix = measured(bench, f"engine_{name}")
            for column in matrix.columns:
                nbytes = int(column)
                plain = gb_per_second(link, nbytes)
                assert abs(matrix.value("direct", column) / plain - 1) < 1e-9  # type: ignore[operator]
                wanted = plain
                if nbytes >= known.break_even_bytes[0, direction]:
                    wanted = nbytes / several(known, direction, nbytes) / 1e9
                    assert wanted > plain
                assert abs(matrix.value("engine", column) / wanted - 1) < 1e-6  # type: ignore[operator]


def several(known: Calibration, direction: Direction, nbytes: int) -> float:
    """Seconds over device 0's own link and device 1's, in whichever way that one carries half of it sooner."""
    direct, *relays = (known.ways[path, direction].cost for path in (Path(0), Path(0, 1), Path(0, 1, "kernel")))
    best = min(range(2), key=lambda kind: relays[kind].seconds(nbytes // 2))
    unit = (known.slice_bytes, min(64 << 10, known.slice_bytes))[best]
    costs = [direct, relays[best]]
    quotas = slice_quotas(nbytes, costs, [unit, unit])
    return max(cost.seconds(quota) for cost, quota in zip(costs, quotas, strict=True))


def test_what_the_engine_counts_on_is_what_it_takes() -> None:
    with bench_of(nbytes=SIZE) as bench:
        ratios = [value for row in measured(bench, "predicted_over_measured").values() for value in row]
        assert all(abs(ratio - 1) < 1e-6 for ratio in ratios if ratio is not None)
        assert None not in ratios


def test_without_helpers_it_is_the_drivers_own_copy() -> None:
    with bench_of(nbytes=SIZE) as bench:
        matrix = measured(bench, "engine_direct")
        for direction in ("h2d", "d2h"):
            plain, engine = (matrix.value(row, direction) for row in ("driver.copy", "engine.copy"))
            assert plain == pytest.approx(engine, rel=1e-9)


def test_every_set_of_ways_is_measured_with_slices_of_several_sizes() -> None:
    with bench_of(emulated(3), devices=(0, 1, 2), nbytes=SIZE) as bench:
        matrix = measured(bench, "multipath_h2d")
        assert bench.calibration().slice_bytes == 256 << 10
        assert matrix.rows == [
            "direct",
            "direct + 1, slices of 256 KiB",
            "direct + 1, kernels of 8 blocks",
            *(f"direct + 1, 2, slices of {size} KiB" for size in (128, 256, 512)),
            *(f"direct + 1, 2, kernels of {blocks} blocks" for blocks in (4, 8, 16)),
        ]
        last = [matrix.value(row, matrix.columns[-1]) or 0.0 for row in matrix.rows]
        assert last[0] < last[1] < last[4], "the more ways, the faster"
        assert last[1] < last[2] < last[7], "kernels have no second hop"


def test_devices_that_all_pull_have_little_to_gain_and_little_to_lose() -> None:
    with bench_of(nbytes=SIZE) as bench:
        matrix = measured(bench, "both_pulling")
        direct, engine = (matrix.value(row, str(SIZE)) for row in ("direct", "engine"))
        assert direct is not None
        assert engine is not None
        assert abs(direct / (2 * gb_per_second(H2D, SIZE)) - 1) < 1e-9
        assert 0.8 < engine / direct < 1.2


def test_one_device_has_nobody_to_relay() -> None:
    with bench_of(emulated(1), devices=(0,)) as bench:
        for name, said in (("multipath_d2h", "no other device"), ("both_pulling", "two devices")):
            result = run(bench, name)
            assert result.status == "not run"
            assert said in str(result.reason)
        assert run(bench, "engine_h2d").status == "passed"


def test_processor_time_is_not_measured_where_the_processor_copies() -> None:
    with bench_of() as bench:
        result = run(bench, "cpu_share")
        assert result.status == "not run"
        assert "emulated" in str(result.reason)


class Real(EmulatedDriver):
    """An emulated machine that is taken for a real one."""

    name = "real"


def test_the_share_of_a_processor_is_a_share() -> None:
    with bench_of(Real(emulated().options), samples=2) as bench:
        matrix = measured(bench, "cpu_share")
        assert matrix.rows == ["engine"]
        assert matrix.columns == ["h2d", "d2h"]
        assert all(0 < sample < 2 for samples in matrix.samples.values() for sample in samples)


def test_submitting_takes_host_time() -> None:
    with bench_of(devices=(0,), samples=2) as bench:
        matrix = measured(bench, "submission")
        assert [len(samples) for samples in matrix.samples.values()] == [2, 2]
        assert all(value is not None and value > 0 for row in matrix.values() for value in row)
