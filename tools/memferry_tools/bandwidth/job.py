"""One run of ``memferry bandwidth``, from its options to its exit status."""

from __future__ import annotations

import time
from pathlib import Path

from memferry_allocator import DeviceLostError, Driver, DriverError, EmulatedOptions, format_size, open_driver
from memferry_transport import Calibration
from memferry_transport.calibration import calibration_path, explain, load_calibration, save_calibration
from memferry_transport.measure import (
    CASES,
    Bench,
    Case,
    CaseResult,
    MeasureOptions,
    has_virtual_clock,
    leave_out,
    run_case,
)
from memferry_transport.topology import discover, emulated_options, machine

from ..errors import ToolError
from ..files import check_writable, write_json, write_whole
from ..machine import describe_machine
from ..screen import Row, Screen
from ..version import version
from . import plot
from .document import cuda_version, document, names_of
from .export import to_csv, to_nvbandwidth
from .options import BandwidthOptions
from .show import result_line, show_result, summary_lines

KEPT_FROM = 256 << 20  # bytes of the largest copy: ways that were measured with less are not worth keeping


def run(options: BandwidthOptions) -> int:
    """Measure, show it, and keep the results.

    Returns
    -------
    int
        0, or 1 if bytes arrived wrong in any case.

    Raises
    ------
    DeviceLostError, KeyboardInterrupt
        The run ended early; what was measured until then is kept.
    """
    for path, name in _outputs(options):
        check_writable(path, name)
    if options.plot is not None:
        plot.check_drawable()
    began = time.monotonic()
    return _Run(options, _open(options.device, options.fixture), began).run()


def list_cases(screen: Screen) -> int:
    """Show what can be measured."""
    screen.table(
        ("case", "unit", "nvbandwidth", "what"),
        [(case.name, case.unit, "yes" if case.form else "", case.what) for case in CASES.values()],
        words=4,
    )
    return 0


class _Run:
    def __init__(self, options: BandwidthOptions, driver: Driver, began: float) -> None:
        self.options, self.driver, self.began = options, driver, began
        self.emulated = has_virtual_clock(driver)
        self.settings = options.settle(emulated=self.emulated)
        self.devices = options.devices or tuple(range(driver.device_count))
        if max(self.devices) >= driver.device_count:
            raise ToolError(f"--devices: this machine has {driver.device_count}, the first is 0")
        self.links = discover(driver)
        self.machine = self.links.machine
        self.screen = Screen()
        self.results: list[CaseResult] = []
        self.known: Calibration | None = None
        self.stopped: DeviceLostError | KeyboardInterrupt | None = None

    def run(self) -> int:
        self.screen.title(f"memferry {version()}: bandwidth{', EMULATED' if self.emulated else ''}")
        self.screen.rows(self._settings_rows())
        self._use_bench()
        results, known = self.results, self.known
        for result in results:
            show_result(self.screen, result)
        if self.stopped is None:
            self.links = discover(self.driver)  # as they are now: an idle device's link is slower
        seconds = time.monotonic() - self.began
        content = document(self.driver, self.devices, self.links, self.settings, results, known, seconds)
        if results:
            self.screen.title("summary")
            self.screen.lines("\n".join(summary_lines(content["summary"])))
        if self.options.explain and known is not None:
            self.screen.title("what the transfer engine decides by")
            self.screen.lines(explain(known))
        self._write(results, content)
        if self.stopped is not None:
            raise self.stopped
        return 1 if any(result.status == "failed" for result in results) else 0

    def _use_bench(self) -> None:
        try:
            with Bench(self.driver, self.devices, self.settings, machine=self.machine) as bench:
                self._recall(bench)
                self._measure(bench)
                self.known = bench.calibrated
                wanted = self.options.explain or self.options.recalibrate
                if wanted and self.known is None and self.stopped is None:
                    self.known = self._calibrate(bench)
        except DeviceLostError:
            if self.stopped is None:
                raise  # else it is the same once more: nothing on the device can be waited for

    # -- the calibration ---------------------------------------------------------------------------------
    def _recall(self, bench: Bench) -> None:
        """Use what was measured of this machine earlier; of emulated ones nothing is kept."""
        if self.emulated or self.options.recalibrate:
            return
        found = load_calibration(self.machine)
        if found is not None and self._covers(found):
            bench.use(found)
            self.screen.rows([("calibrated", f"{found.date}, {calibration_path(self.machine)}")])

    def _covers(self, calibration: Calibration) -> bool:
        return set(self.devices) <= {path.device for path, _ in calibration.ways}

    def _calibrate(self, bench: Bench) -> Calibration:
        known = bench.calibration()
        if self.emulated:
            return known
        if set(self.devices) < set(range(self.driver.device_count)):
            self.screen.rows([("calibrated", "for this run only: --devices leaves some out")])
        elif self.settings.largest < KEPT_FROM:
            self.screen.rows(
                [("calibrated", f"for this run only: --size is less than {format_size(KEPT_FROM // 2)}")]
            )
        else:
            self.screen.rows([("calibrated", f"and kept in {save_calibration(known)}")])
        return known

    # -- the cases ---------------------------------------------------------------------------------------
    def _measure(self, bench: Bench) -> None:
        if not self.options.cases:
            return
        with self.screen.progress("measuring", len(self.options.cases)) as show:
            for name in self.options.cases:
                result = self._measure_one(bench, CASES[name])
                self.results.append(result)
                show(result_line(result), name)

    def _measure_one(self, bench: Bench, case: Case) -> CaseResult:
        if self.stopped is not None:
            return leave_out(case, "the run had ended before")
        if self._late():
            return leave_out(case, f"the time limit of {self.options.time_limit_s:g} s was over")
        calibrated = bench.calibrated
        try:
            result = run_case(bench, case)
            if bench.calibrated is not calibrated:
                self._calibrate(bench)
        except (DeviceLostError, KeyboardInterrupt) as error:
            self.stopped = error
            return leave_out(case, str(error) or "interrupted")
        return result

    def _late(self) -> bool:
        limit = self.options.time_limit_s
        return limit is not None and time.monotonic() - self.began > limit

    # -- what is kept ------------------------------------------------------------------------------------
    def _write(self, results: list[CaseResult], content: dict[str, object]) -> None:
        names = names_of(self.links, self.devices)
        options = self.options
        if options.json is not None:
            write_json(options.json, content, "--json")
        if options.csv is not None:
            write_whole(options.csv, to_csv(results), "--csv")
        if options.nvbandwidth is not None:
            gpu_driver = None if self.emulated else describe_machine()["gpu_driver"]
            form = to_nvbandwidth(results, names, driver=gpu_driver, cuda=cuda_version(self.driver))
            write_json(options.nvbandwidth, form, "--nvbandwidth-compat")
        if options.plot is not None:
            title = f"{self.machine}{' (EMULATED, virtual clock)' if self.emulated else ''}"
            write_whole(options.plot, plot.draw(results, title), "--plot")
        self.screen.rows([("written", str(path)) for path, _ in _outputs(options) if path is not None])

    def _settings_rows(self) -> list[Row]:
        settings: MeasureOptions = self.settings
        clock = (
            "the EMULATED devices' virtual clock; says nothing about this machine" if self.emulated else "events"
        )
        return [
            ("machine", self.machine),
            ("devices", ", ".join(map(str, self.devices))),
            ("copies", f"{settings.samples} samples of {settings.copies} x {format_size(settings.nbytes)}"),
            ("times by", clock),
        ]


def _open(kind: str, fixture: str | None) -> Driver:
    # Nothing runs earlier than it must: then what is under way can be asked, as on a real device.
    if fixture is None:
        emulated = EmulatedOptions(device_count=2, eagerness=0.0)
    else:
        emulated = emulated_options(machine(fixture), eagerness=0.0)
    try:
        return open_driver(kind, emulated=emulated)
    except DriverError as error:
        raise ToolError(f"--device {kind}: {error}") from error


def _outputs(options: BandwidthOptions) -> list[tuple[Path | None, str]]:
    return [
        (options.json, "--json"),
        (options.csv, "--csv"),
        (options.nvbandwidth, "--nvbandwidth-compat"),
        (options.plot, "--plot"),
    ]
