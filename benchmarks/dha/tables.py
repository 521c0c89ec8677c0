"""The tables of direct host access."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rows = list[tuple[str, ...]]
Case = dict[str, Any]


def link(summary: Case) -> Rows:
    found = summary.get("link")
    if not _there(found):
        return []
    head = ("", "to the device, GB/s", "from the device, GB/s")
    rows = [("copy engine", _rate(found["to_device"]), _rate(found["from_device"]))]
    for name in dict.fromkeys((*found["kernel_reads"], *found["kernel_writes"])):
        ways = (found[way].get(name) for way in ("kernel_reads", "kernel_writes"))
        rows.append((f"kernel, {name}", *("" if rate is None else _rate(rate) for rate in ways)))
    return [head, *rows]


def embedding(summary: Case) -> Rows:
    head = ("tokens", "rows read in place", "table copied first", "times faster", "GB/s")
    return _cases(
        summary,
        "embedding",
        head,
        lambda case: (
            str(case["tokens"]),
            _ms(case["in_place_s"]),
            _ms(case["copied_s"]),
            f"{case['times_faster']:.1f}",
            _rate(case["bytes_per_second"]),
        ),
    )


def rows(summary: Case) -> Rows:
    head = (
        "tokens",
        "rows",
        "and zeroed",
        "written, GB/s",
        "of the link",
        "with making them, GB/s",
        "`index_copy_`, GB/s",
    )
    return _cases(
        summary,
        "rows",
        head,
        lambda case: (
            *(str(case[key]) for key in ("tokens", "rows", "zeroed_rows")),
            _rate(case["rows_and_zeros"]),
            f"{case['rows_and_zeros_over_link']:.0%}" if "rows_and_zeros_over_link" in case else "",
            _rate(case["whole"]),
            _rate(case["index_copy"]),
        ),
    )


def gradient(summary: Case) -> Rows:
    head = ("tokens", "compute", "transfer", "one kernel", "GB/s", "panels", "GB/s", "best over the larger bound")
    return _cases(
        summary,
        "weight_gradient",
        head,
        lambda case: (
            str(case["tokens"]),
            *(_ms(case[key]) for key in ("compute_s", "transfer_s", "one_kernel_s")),
            _rate(case["one_kernel_bytes_per_second"]),
            _ms(case["panels_s"]),
            _rate(case["panels_bytes_per_second"]),
            f"{case['over_bound']:.2f}",
        ),
    )


def ring(summary: Case) -> Rows:
    head = ("tokens", "", "compute", "copy", "ring", "over the larger", "panels", "same bytes")
    found = summary.get("ring")
    if not _there(found):
        return []
    lines = []
    for case in found:
        for way in ("forward", "input_gradient"):
            panels = case[f"{way}_panels"]
            gathered = f", by {panels['gathered_by']}" if panels["gathered_by"] else ""
            lines.append(
                (
                    str(case["tokens"]),
                    way.replace("_", " "),
                    *(_ms(case[key]) for key in (f"{way}_compute_s", "copy_s", f"{way}_s")),
                    f"{case[f'{way}_over_bound']:.2f}",
                    f"{panels['panel_nbytes'] >> 20} MiB{gathered}",
                    "yes" if case[f"{way}_exact"] else "no",
                )
            )
    return [head, *lines]


def beside(summary: Case) -> Rows:
    return _cases(
        summary,
        "beside",
        ("beside the products", "they take longer by", "its GB/s"),
        lambda case: (case["neighbour"], f"{case['slow_down']:.1%}", _rate(case["bytes_per_second"])),
    )


def models(summary: Case) -> Rows:
    head = ("", "iteration", "device peak", "compute", "link", "host memory", "over the largest")
    lines = [
        (
            name,
            f"{row['iteration_s']:.3f} s",
            f"{row['device_peak_bytes'] / 2**30:.2f} GiB",
            *(
                _seconds(row["bounds_s"], *keys)
                for keys in (("compute",), ("to_device", "from_device"), ("memory",))
            ),
            f"{row['over_bound']:.2f}",
        )
        for name, row in summary.items()
        if isinstance(row, dict) and "over_bound" in row
    ]
    return [head, *lines] if lines else []


def _there(found: Any) -> bool:
    return found is not None and "failed" not in found


def _cases(summary: Case, name: str, head: tuple[str, ...], line: Callable[[Case], tuple[str, ...]]) -> Rows:
    found = summary.get(name)
    return [head, *map(line, found)] if _there(found) else []


def _seconds(bounds: dict[str, float], *keys: str) -> str:
    known = [bounds[key] for key in keys if key in bounds]
    return f"{max(known):.3f} s" if known else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f}"
