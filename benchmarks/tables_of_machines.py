"""Tables of machines that were simulated, from what `benchmarks.machines` writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Rows = list[tuple[str, ...]]
_WORDS = {
    "to_device": "link to each device, alone or shared",
    "peers": "between devices, both ways at once",
    "host_memory": "host memory",
    "cpu_update": "CPU's update, alone",
    "matmul": "matrix products in bf16",
    "device_memory": "device memory",
}


def machines(summary: dict[str, Any]) -> Rows:
    """Iterations as DeepSpeed's and as MemFerry's, without helpers and with them, beside what was published."""
    head = (
        "machine",
        "each device",
        "DeepSpeed-like",
        "MemFerry: default, planned",
        "with ScaleUp",
        "against DeepSpeed-like",
        "with ScaleUp",
        "published",
    )
    return [head, *(_machine(row) for row in summary["rows"].values())]


def _machine(row: dict[str, Any]) -> tuple[str, ...]:
    seconds = row["seconds"]
    pairs = [[f"{name}{helped}" for name in ("default", "planned")] for helped in ("", ", helped")]
    there = [[name for name in pair if name in seconds] for pair in pairs]
    return (
        _where(row),
        f"{_what(row)}, {row['device_memory'] >> 30} GiB",
        _seconds(seconds.get("deepspeed")),
        *(", ".join(_seconds(seconds[name]) for name in pair) for pair in there),
        *(_against(seconds, pair) for pair in there),
        row["published"],
    )


def _what(row: dict[str, Any]) -> str:
    adapters = ", adapters" if row["adapters"] else ""
    return f"{row['preset']}{adapters}, {row['micro_batch']} x {row['sequence']}"


def _against(seconds: dict[str, float], names: list[str]) -> str:
    if "deepspeed" not in seconds:
        return ""
    return ", ".join(f"{seconds[name] / seconds['deepspeed'] - 1:+.1%}" for name in names)


def _where(row: dict[str, Any]) -> str:
    return _ranks(row) + (f" + {row['helpers']}" if row["helpers"] else "")


def _ranks(row: dict[str, Any]) -> str:
    return f"`{row['fixture']}`, {row['ranks']}"


def machine_loads(summary: dict[str, Any]) -> Rows:
    """Whole loads against gathered ones, where several ranks train."""
    head = ("machine", "tokens a device", "default: whole", "gathered", "", "planned: whole", "gathered", "")
    rows = [row for row in summary["rows"].values() if row["ranks"] > 1]
    return [head, *((_ranks(row), *_loads(row)) for row in rows)]


def _loads(row: dict[str, Any]) -> Iterable[str]:
    seconds = row["seconds"]
    yield _what(row)
    for name in ("default", "planned"):
        gathered = seconds[f"{name}, gathered"]
        yield from (_seconds(seconds[name]), _seconds(gathered), f"{gathered / seconds[name] - 1:+.1%}")


def machine_numbers(summary: dict[str, Any]) -> Rows:
    """What predictions were made of, machine by machine: of the case with most devices."""
    most: dict[str, dict[str, Any]] = {}
    for row in summary["rows"].values():
        if row["fixture"] not in most or row["ranks"] > most[row["fixture"]]["ranks"]:
            most[row["fixture"]] = row
    rows, known = list[tuple[str, ...]](), set[tuple[str, ...]]()
    for row in most.values():
        for name, (number, source) in row["numbers"].items():
            said = (_WORDS[name], _rate(name, number), source)
            if said not in known and (name != "peers" or row["ranks"] > 1):
                known.add(said)
                rows.append((_ranks(row), *said))
    return [("machine", "", "number", "where from"), *rows]


def machine_hosts(summary: dict[str, Any]) -> Rows:
    """The plan's time against DeepSpeed's, where the host were another one than assumed."""
    rows = [row for row in summary["rows"].values() if row["other_hosts"]]
    factors = [f"{factor} x the host" for factor in rows[0]["other_hosts"]]
    head = ("machine", "each device", *factors)
    return [
        head,
        *(
            (
                _ranks(row),
                _what(row),
                *(f"{change:+.1%}" for change in row["other_hosts"].values()),
            )
            for row in rows
        ),
    ]


def _rate(name: str, number: float) -> str:
    return f"{number / 1e12:.0f} TFLOPS" if name == "matmul" else f"{number / 1e9:.0f} GB/s"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s"
