"""torch's CUDA memory from the C pool, each case in a process of its own: a global allocator stays."""

from __future__ import annotations

import pytest

from ..allocator.test_open_driver import in_a_process

pytestmark = pytest.mark.gpu

PRELUDE = """
import gc, random, sys
import torch
from memferry_allocator.interop import torch_pool

MIB = 1 << 20

def as_global(budget):
    allocator = torch_pool.pluggable_allocator(device_budget=budget)
    torch.cuda.memory.change_current_allocator(allocator)
    return allocator

def through_pool(budget):
    pool = torch_pool.mem_pool(device_budget=budget)
    return pool, pool.memferry

def reason(error):
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__context__
    return " | ".join(texts)
"""
ROUNDS = """
def rounds(allocator):
    random.seed(5)
    streams = [torch.cuda.Stream() for _ in range(3)]
    held, wrong = [], 0
    for turn in range(1000):
        stream = random.choice(streams)
        with torch.cuda.stream(stream):
            size = random.randrange(1, 300_000)
            tensor = torch.full((size,), turn % 113, dtype=torch.int32, device="cuda")
            held.append((turn % 113, tensor, stream))
            del tensor
        if len(held) > 24 or random.random() < 0.3:
            value, tensor, owner = held.pop(random.randrange(len(held)))
            reader = random.choice(streams)
            reader.wait_stream(owner)
            with torch.cuda.stream(reader):
                tensor.record_stream(reader)
                wrong = wrong + (tensor != value).sum()
            del tensor
            for other in streams:
                other.wait_stream(reader)
    held.clear()
    torch.cuda.synchronize()
    return int(wrong)
"""


def test_rounds_through_a_mem_pool() -> None:
    said = in_a_process(
        PRELUDE + ROUNDS + "pool, allocator = through_pool('512MiB')\n"
        "with torch.cuda.use_mem_pool(pool):\n"
        "    print(rounds(allocator))\n"
        "found = allocator.statistics()\n"
        "print(found.allocations > 0, found.used <= found.peak <= found.budget == 512 * MIB)\n"
        "gc.collect()\n"
        "del pool\n"
        "gc.collect()\n"
        "torch.cuda.empty_cache()\n"
        "found = allocator.statistics()\n"
        "print(found.live, found.used, found.allocations == found.frees)\n"
        "allocator.trim()\n"
        "print(allocator.statistics().reserved)\n"
    )
    assert said.splitlines() == ["0", "True True", "0 0 True", "0"]


def test_rounds_as_the_global_allocator() -> None:
    said = in_a_process(
        PRELUDE + ROUNDS + "allocator = as_global('128MiB')\n"
        "print(rounds(allocator))\n"
        "gc.collect()\n"
        "found = allocator.statistics()\n"
        "print(found.live, found.used, found.allocations == found.frees > 1000, found.peak <= found.budget)\n"
        "torch.cuda.empty_cache()\n"
        "print(allocator.statistics().reserved)\n"
        "print(int(torch.ones(10, device='cuda').sum()))\n"
    )
    assert said.splitlines() == ["0", "0 0 True True", "0", "10"]


def test_running_out_of_a_mem_pool_and_going_on() -> None:
    said = in_a_process(
        PRELUDE + "pool, allocator = through_pool('64MiB')\n"
        "with torch.cuda.use_mem_pool(pool):\n"
        "    kept = torch.full((44 * MIB,), 7, dtype=torch.uint8, device='cuda')\n"
        "    try:\n"
        "        torch.empty(44 * MIB, dtype=torch.uint8, device='cuda')\n"
        "    except torch.OutOfMemoryError as error:\n"
        "        print(str(error).startswith('CUDA out of memory. Tried to allocate 44.00 MiB'))\n"
        "    print(int(kept.min()), int(kept.max()))\n"
        "    del kept\n"
        "    print(torch.empty(44 * MIB, dtype=torch.uint8, device='cuda').numel() // MIB)\n"
        "print(allocator.statistics().peak <= 64 * MIB)\n"
    )
    assert said.splitlines() == ["True", "7 7", "44", "True"]


def test_running_out_as_the_global_allocator_and_going_on() -> None:
    said = in_a_process(
        PRELUDE + "allocator = as_global('64MiB')\n"
        "kept = torch.full((40 * MIB,), 7, dtype=torch.uint8, device='cuda')\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        torch.empty(40 * MIB, dtype=torch.uint8, device='cuda')\n"
        "    except torch.OutOfMemoryError as error:\n"
        "        text = str(error)\n"
        "        print(text.startswith('CUDA out of memory. Tried to allocate 41943040 bytes on device 0.'),\n"
        "              'asked for 40.00 MiB, 40.00 MiB of 64.00 MiB in use' in text)\n"
        "print(int(kept.min()), int(kept.max()))\n"
        "del kept\n"
        "print(torch.empty(64 * MIB, dtype=torch.uint8, device='cuda').numel() // MIB)\n"
        "print(allocator.statistics().live)\n"
    )
    assert said.splitlines() == ["True True", "True True", "7 7", "64", "0"]


def test_record_stream_keeps_memory_from_its_next_owner() -> None:
    """A slow reader on another stream; the writer's stream gets the memory again only behind it."""
    said = in_a_process(
        PRELUDE + "allocator = as_global('64MiB')\n"
        "side = torch.cuda.Stream()\n"
        "wrong = 0\n"
        "for turn in range(20):\n"
        "    source = torch.full((16 * MIB,), turn % 100, dtype=torch.int8, device='cuda')\n"
        "    side.wait_stream(torch.cuda.current_stream())\n"
        "    with torch.cuda.stream(side):\n"
        "        torch.cuda._sleep(20_000_000)\n"
        "        seen = (source != turn % 100).any()\n"
        "        source.record_stream(side)\n"
        "    del source\n"
        "    torch.full((16 * MIB,), 101, dtype=torch.int8, device='cuda')\n"
        "    side.synchronize()\n"
        "    wrong += int(seen)\n"
        "print(wrong, allocator.statistics().waits >= 20)\n"
    )
    assert said == "0 True"


def test_graphs_replay_on_memory_of_a_mem_pool() -> None:
    said = in_a_process(
        PRELUDE + "pool, allocator = through_pool('64MiB')\n"
        "with torch.cuda.use_mem_pool(pool):\n"
        "    data = torch.zeros(MIB, device='cuda')\n"
        "torch.cuda.synchronize()\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n"
        "    data.add_(1)\n"
        "for _ in range(3):\n"
        "    graph.replay()\n"
        "torch.cuda.synchronize()\n"
        "print(int(data.sum()) // MIB)\n"
    )
    assert said == "3"


@pytest.mark.parametrize("how", ["global", "pool"])
def test_allocations_inside_a_capture_are_refused_clearly(how: str) -> None:
    start = "allocator = as_global('64MiB')\nplace = {}\n"
    if how == "pool":
        start = "pool, allocator = through_pool('64MiB')\nplace = {'pool': pool.id}\n"
    said = in_a_process(
        PRELUDE + start + "data = torch.zeros(1, device='cuda')\n"
        "torch.cuda.synchronize()\n"
        "try:\n"
        "    with torch.cuda.graph(torch.cuda.CUDAGraph(), **place):\n"
        "        data.add_(1)\n"
        "        torch.zeros(MIB, device='cuda')\n"
        "except RuntimeError as error:\n"
        "    print('is being captured into a graph' in reason(error))\n"
    )
    assert said == "True"


def test_threads_allocate_in_one_and_free_in_another() -> None:
    said = in_a_process(
        PRELUDE + "import queue, threading\n"
        "allocator = as_global('256MiB')\n"
        "torch.zeros(1, device='cuda')\n"
        "shelf, wrong = queue.Queue(), []\n"
        "def make(number):\n"
        "    with torch.cuda.stream(torch.cuda.Stream()) as stream:\n"
        "        for turn in range(200):\n"
        "            tensor = torch.full((50_000 + turn,), number, dtype=torch.int32, device='cuda')\n"
        "            torch.cuda.current_stream().synchronize()\n"
        "            shelf.put((number, tensor))\n"
        "def check():\n"
        "    with torch.cuda.stream(torch.cuda.Stream()):\n"
        "        for _ in range(200):\n"
        "            number, tensor = shelf.get()\n"
        "            wrong.append(int((tensor != number).sum()))\n"
        "threads = [threading.Thread(target=make, args=(n,)) for n in range(4)]\n"
        "threads += [threading.Thread(target=check) for _ in range(4)]\n"
        "[thread.start() for thread in threads]\n"
        "[thread.join() for thread in threads]\n"
        "gc.collect()\n"
        "print(sum(wrong), len(wrong), allocator.statistics().used <= 512)\n"
    )
    assert said == "0 800 True"


def test_the_context_is_torch_s_own() -> None:
    """Torch's pools, ours and torch's own allocations share the primary context; no other is made."""
    said = in_a_process(
        PRELUDE + "from cuda.bindings import driver as cu\n"
        "pool, allocator = through_pool('64MiB')\n"
        "own = torch.ones(MIB, device='cuda')\n"
        "with torch.cuda.use_mem_pool(pool):\n"
        "    ours = torch.ones(MIB, device='cuda')\n"
        "before = int(cu.cuCtxGetCurrent()[1])\n"
        "print(int((own + ours).sum()) // MIB, int(cu.cuCtxGetCurrent()[1]) == before)\n"
        "print(sum(int(cu.cuDevicePrimaryCtxGetState(d)[2]) for d in range(torch.cuda.device_count())))\n"
    )
    assert said.splitlines() == ["2 True", "1"]
