"""Ranks as processes of this machine: gloo between them and an emulated device each, or NCCL and a GPU each."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.parallel.preload"])
TIMEOUT = 20.0


@dataclass(frozen=True)
class Failure:
    """What a rank has raised."""

    kind: str
    message: str
    trace: str


def run(size: int, program: Callable[..., Any], *arguments: Any, cuda: bool = False, hosts: int = 1) -> list[Any]:
    """What each rank's program returns, or the `Failure` that it has raised; None of one that was killed.

    A program is a function of a module, called with its rank's process group and the arguments.  With `hosts` the
    ranks take each other to be on so many.
    """
    context = multiprocessing.get_context("spawn") if cuda else _context  # CUDA does not survive a fork
    timeout = 120.0 if cuda else TIMEOUT  # to import torch and start NCCL may take most of a minute
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            place = (rank, size, rank * hosts // size, f"{folder}/store", timeout, cuda)
            process = context.Process(target=_rank, args=(*place, sender, program, arguments))
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            results = [_result(pipe, timeout) for pipe in pipes]
            for process in processes:
                process.join(timeout)
                assert process.exitcode is not None, "a rank does not end"
        finally:
            for process in processes:
                if process.exitcode is None:
                    process.kill()
                    process.join()
        return results


def succeed(
    size: int, program: Callable[..., Any], *arguments: Any, cuda: bool = False, hosts: int = 1
) -> list[Any]:
    """As `run`, where every rank must end well."""
    results = run(size, program, *arguments, cuda=cuda, hosts=hosts)
    for rank, result in enumerate(results):
        assert not isinstance(result, Failure), f"rank {rank}: {result.trace}"
    return results


def _result(pipe: Any, timeout: float) -> Any:
    assert pipe.poll(3 * timeout), "a rank neither ends nor raises"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None


def _rank(
    rank: int,
    size: int,
    host: int,
    store: str,
    timeout: float,
    cuda: bool,
    pipe: Any,
    program: Callable[..., Any],
    arguments: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ["MEMFERRY_HOST"] = f"machine-{host}"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # not every machine lets a process use NVLink multicast
    try:
        if cuda:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        pipe.send_bytes(pickle.dumps(program(dist.group.WORLD, *arguments)))
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(Failure(type(error).__name__, str(error), traceback.format_exc())))
        os._exit(1)
    dist.destroy_process_group()
