"""Embeddings: rows read in place against copying the table first, and gradients by rows against the link."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from memferry_rt.adapters.torch.operators import (
    clear_rows,
    embedding_forward,
    embedding_gradient_rows,
    gradient_of_rows,
    unique_rows,
    write_rows,
)
from memferry_rt.adapters.torch.profiling import Home

from .common import Bench, check_close, check_same

BLOCKS = (2, 4, 8, 16)


def embedding(bench: Bench) -> dict[str, Any]:
    """Forward over a table in host memory."""
    stand = bench.stand
    table = bench.far(bench.normal(*bench.sizes.table))
    copy = stand.buffer(bench.sizes.table, bench.sizes.dtype)
    cases = []
    for tokens in bench.sizes.lookups:
        ids = bench.ids(tokens)

        def copied(ids: torch.Tensor = ids) -> torch.Tensor:
            stand.copy_in(copy, table)
            return F.embedding(ids, copy.tensor)

        found = embedding_forward(ids, table.mapped)
        stand.settle()
        check_same(found.cpu(), F.embedding(ids.cpu(), table.host), "embedding in place")
        cases.append(
            {
                "tokens": tokens,
                "nbytes": tokens * bench.sizes.table[1] * bench.sizes.dtype.itemsize,
                "in_place": bench.measure(lambda ids=ids: embedding_forward(ids, table.mapped)),
                "copied": bench.measure(copied),
            }
        )
    stand.settle()
    table.close()
    return {"table": list(bench.sizes.table), "table_nbytes": table.span.nbytes, "cases": cases}


def gradient(bench: Bench) -> dict[str, Any]:
    """Rows of gradients written to host memory; those of the step before are zeroed."""
    stand = bench.stand
    home = stand.home(bench.sizes.table, bench.sizes.dtype)
    home.host.zero_()
    cases = [_rows(bench, home, tokens) for tokens in bench.sizes.lookups[1:]]
    stand.settle()
    home.close()
    return {"table": list(bench.sizes.table), "cases": cases}


def _rows(bench: Bench, home: Home, tokens: int) -> dict[str, Any]:
    width = bench.sizes.table[1]
    ids, dy = bench.ids(tokens), bench.normal(tokens, width)
    rows, places = unique_rows(ids)
    before = bench.ids(tokens).unique()
    row_nbytes = width * bench.sizes.dtype.itemsize
    stale = int((~torch.isin(before, rows)).sum())
    _check(bench, home, ids, dy, before)

    def whole() -> None:
        """Rows of the step before are cleared while the gradient is computed."""
        with bench.beside() as other:
            clear_rows(home.mapped, rows, before, moves=bench.moves, stream=other)
        made = gradient_of_rows(rows, places, dy)
        write_rows(home.mapped, rows, made, moves=bench.moves, stream=bench.stand.stream)
        bench.stand.stream.wait(other.record())

    values = gradient_of_rows(rows, places, dy)

    def by_blocks(blocks: int) -> None:
        bench.moves.scatter_rows(
            home.mapped.data_ptr(), rows.data_ptr(), values.data_ptr(), 0, row_nbytes, len(rows),
            stream=bench.stand.stream, blocks=blocks,
        )  # fmt: skip

    cuda = not bench.stand.emulated  # elsewhere torch's memory is not the driver's
    return {
        "tokens": tokens,
        "rows": len(rows),
        "zeroed_rows": stale,
        "nbytes": (len(rows) + stale) * row_nbytes,
        "written_nbytes": len(rows) * row_nbytes,
        "unique": bench.measure(lambda: unique_rows(ids)),
        "compute": bench.measure(lambda: gradient_of_rows(rows, places, dy)),
        "rows_and_zeros": bench.measure(
            lambda: write_rows(home.mapped, rows, values, before, moves=bench.moves, stream=bench.stand.stream)
        ),
        "whole": bench.measure(whole),
        "index_copy": bench.measure(lambda: home.mapped.index_copy_(0, rows, values)),
        "kernel": {str(n): bench.measure(lambda n=n: by_blocks(n)) for n in BLOCKS if cuda},
    }


def _check(bench: Bench, home: Home, ids: torch.Tensor, dy: torch.Tensor, before: torch.Tensor) -> None:
    """Bytes against torch's dense gradient, and values against float64; the home's old rows hold poison."""
    count, width = bench.sizes.table
    bench.stand.settle()
    home.host.zero_()
    home.host[before.cpu()] = float("nan")
    rows, values = embedding_gradient_rows(ids, dy, count)
    write_rows(home.mapped, rows, values, before, moves=bench.moves, stream=bench.stand.stream)
    bench.stand.settle()
    dense = torch.ops.aten.embedding_dense_backward(dy, ids, count, -1, False)
    check_same(home.host, dense.cpu(), "gradient by rows")
    exact = torch.zeros(len(rows), width, dtype=torch.float64, device=dy.device)
    exact.index_add_(0, torch.searchsorted(rows, ids), dy.double())
    check_close(values, exact, "gradient by rows")
