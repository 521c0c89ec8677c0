"""What a save leaves on disk: whole or not at all, readable by others, and damage is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model
from torch import nn

import memferry_rt
from memferry_rt import CheckpointError
from memferry_rt.adapters.torch import pieces as pieces_module
from memferry_rt.adapters.torch.pieces import DTYPE_NAMES, Source, as_bytes
from memferry_rt.checkpoint import CheckpointReader, TensorFile, TensorSpec, write_checkpoint
from memferry_rt.checkpoint import folder as folder_module
from memferry_rt.checkpoint.manifest import read_manifest

from .models import Decoder, next_token_loss

MIB = 1 << 20
OTHER = {"memferry": "", "torch": "", "optimizer": {}, "extra": None}


def trained(seed: int = 0, build: Callable[[], nn.Module] = Decoder) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    next_token_loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    moments = [value for entry in optimizer.state.values() for value in entry.values()]
    return [bytes(piece) for tensor in [*model.state_dict().values(), *moments] for piece in as_bytes(tensor)]


def tensor_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


# -- the format -----------------------------------------------------------------------------------------------
def test_the_safetensors_package_reads_the_files(tmp_path: Path) -> None:
    model, optimizer = trained(build=lambda: Decoder(tied=True))
    model.position.data = model.position.data.t().contiguous().t()
    model.blocks[0].register_buffer("odd", torch.ones(3, dtype=torch.uint8))
    memferry_rt.save(tmp_path, model, optimizer)
    model_file, optimizer_file = tensor_files(tmp_path)
    assert (model_file.name[:6], optimizer_file.name[:10]) == ("model-", "optimizer-")
    other = Decoder(tied=True)
    other.blocks[0].register_buffer("odd", torch.zeros(3, dtype=torch.uint8))
    load_model(other, model_file)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    moments = load_file(optimizer_file)
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(moments.pop(f"{key}.{name}"), optimizer.state[parameter][key])
    assert not moments


def test_every_file_is_aligned_to_its_elements(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("a", torch.ones(3, dtype=torch.uint8))
    model.register_buffer("b", torch.ones(3, dtype=torch.int64))
    memferry_rt.save(tmp_path, model, torch.optim.AdamW(model.parameters()))
    (path, _) = tensor_files(tmp_path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + length]).items():
        if name != "__metadata__":
            itemsize = {"U8": 1, "F32": 4, "I64": 8}[entry["dtype"]]
            assert (8 + length + entry["data_offsets"][0]) % itemsize == 0


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any supported dtype, up to three dimensions in any order in memory, and slices."""
    dtype = draw(st.sampled_from(list(DTYPE_NAMES)))
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    numel = 2 * torch.Size(shape).numel()
    tensor = torch.randint(0, 2, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    if draw(st.booleans()):
        tensor = tensor[::2]
    tensor = tensor[: numel // 2].reshape(shape) if shape else tensor[:1].reshape(())
    order = draw(st.permutations(range(len(shape))))
    contiguous = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    return contiguous.permute([order.index(dimension) for dimension in range(len(shape))])


@given(tensor=tensors(), piece=st.integers(8, 64))
def test_any_tensor_goes_to_bytes_and_back(tensor: torch.Tensor, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "PIECE", piece)
        parts = [bytes(part) for part in as_bytes(tensor)]
        assert all(len(part) <= piece for part in parts)
        content = b"".join(parts)
        expected = tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []
        assert list(content) == expected

        def read(offset: int, out: memoryview) -> None:
            out[:] = content[offset : offset + out.nbytes]

        copy = torch.empty_like(tensor)
        Source(read, tensor.dtype).fill(copy)
        assert list(b"".join(map(bytes, as_bytes(copy)))) == expected


# -- damage ---------------------------------------------------------------------------------------------------
def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _flipped(position: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(position * (len(content) - 1))] ^= 0x10
        path.write_bytes(content)

    return flip


@pytest.mark.parametrize("pattern", ["model-*", "optimizer-*"])
@pytest.mark.parametrize(
    "damage",
    [_cut, _empty, _longer, Path.unlink, *(_flipped(position) for position in (0, 1e-4, 0.01, 0.4, 0.77, 1))],
)
def test_a_damaged_file_is_noticed_before_anything_changes(
    pattern: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    memferry_rt.save(tmp_path, *trained())
    (path,) = tmp_path.glob(pattern)
    damage(path)
    other = trained(1)
    before = bits(*other)
    with pytest.raises(CheckpointError, match=rf"(?s)damaged.*{path.name}"):
        memferry_rt.load(tmp_path, *other)
    assert bits(*other) == before


def test_a_changed_manifest_is_noticed(tmp_path: Path) -> None:
    """Every byte of it: what a change leaves loadable is what was saved."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    memferry_rt.save(tmp_path, model, optimizer, extra={"step": 7})
    path = tmp_path / "checkpoint.json"
    whole, content = path.read_bytes(), read_manifest(tmp_path)
    noticed = 0
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x01]) + whole[position + 1 :])
        try:
            assert read_manifest(tmp_path) == content
        except CheckpointError:
            noticed += 1
    assert noticed > 0.5 * len(whole.split()) > 20


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no checkpoint in"),
        ("", "damaged"),
        ("[]", "damaged"),
        ('{"format": "other", "format_version": 1}', "its format is 'other'"),
        ('{"format": "memferry.checkpoint", "format_version": 2}', "version 2.*newer"),
        ('{"format": "memferry.checkpoint", "format_version": 1, "content": {}, "crc32": 1}', "damaged"),
        (
            '{"format": "memferry.checkpoint", "format_version": 1, "content": {}, "crc32": 2745614147}',
            "lacks extra",
        ),
    ],
)
def test_a_folder_that_is_none(content: str | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "checkpoint.json").write_text(content)
    for call in (lambda: memferry_rt.load(tmp_path, *trained()), lambda: memferry_rt.checkpoint_info(tmp_path)):
        with pytest.raises(CheckpointError, match=words):
            call()


def test_paths_that_are_no_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            memferry_rt.load(path, *trained())
    with pytest.raises(CheckpointError, match="could not be written"):
        memferry_rt.save(tmp_path / "file", *trained())


def test_a_file_that_cannot_be_read_any_more_half_way_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memferry_rt.save(tmp_path, *trained())
    verify = CheckpointReader.verify

    def then_fail(reader: CheckpointReader) -> None:
        verify(reader)
        monkeypatch.setattr(folder_module.os, "preadv", _raise(OSError(5, "Input/output error")))

    monkeypatch.setattr(CheckpointReader, "verify", then_fail)
    with pytest.raises(CheckpointError, match=r"Input/output error.*part of the state is replaced"):
        memferry_rt.load(tmp_path, *trained(1))


def _raise(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


# -- whole or not at all --------------------------------------------------------------------------------------
def small() -> nn.Module:
    return Decoder(layers=0)


class Failing:
    """Counts calls of what a save does with the disk, and fails before or after one of them."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, error: BaseException, *, late: bool) -> None:
        self.calls = 0
        self._late = late
        for owner, name in (
            (folder_module, "_write"),
            (folder_module.os, "fsync"),
            (folder_module.os, "replace"),
        ):
            patch.setattr(owner, name, self._counted(getattr(owner, name), at, error))

    def _counted(self, original: Callable[..., Any], at: int, error: BaseException) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls += 1
            now = self.calls == at
            if now and not self._late:
                raise error
            result = original(*arguments)
            if now:
                raise error
            return result

        return call


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("late", [False, True])
def test_a_save_that_fails_leaves_the_last_one_and_nothing_else(
    error: BaseException, late: bool, tmp_path: Path
) -> None:
    first, second = trained(build=small), trained(1, small)
    messages: set[str] = set()
    memferry_rt.save(tmp_path, *first, extra=1)
    files = sorted(os.listdir(tmp_path))
    (tmp_path / "mine.txt").touch()
    failed = 0
    while True:
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, failed + 1, error, late=late)
            try:
                memferry_rt.save(tmp_path, *second, extra=2)
            except (CheckpointError, KeyboardInterrupt) as caught:
                messages.add(str(caught).partition("; ")[0])
                failed += 1
            if memferry_rt.checkpoint_info(tmp_path).extra == 2:
                break
        assert sorted(os.listdir(tmp_path)) == sorted([*files, "mine.txt"])
        assert memferry_rt.load(tmp_path, *trained(2, small)) == 1
    assert failed > 20  # every tensor is a write of its own
    assert messages <= {"", f"the checkpoint could not be written to {tmp_path}: No space left on device"}
    assert memferry_rt.load(tmp_path, *trained(2, small)) == 2
    assert failing.calls - failed <= 1
    memferry_rt.save(tmp_path, *second, extra=3)
    assert len(os.listdir(tmp_path)) == 4


def test_what_a_killed_save_has_left_goes_with_the_next(tmp_path: Path) -> None:
    stale = ["model-0123456789abcdef.safetensors", ".checkpoint-0123456789abcdef.json"]
    others = ["model-of-mine.safetensors", "notes"]
    for name in (*stale, *others):
        (tmp_path / name).touch()
    memferry_rt.save(tmp_path, *trained())
    names = os.listdir(tmp_path)
    assert not set(stale) & set(names)
    assert set(others) <= set(names)


def test_a_save_does_not_disturb_a_reader(tmp_path: Path) -> None:
    specs = [TensorSpec("x", "U8", (4,))]

    def write(byte: int) -> None:
        data = memoryview(bytes([byte] * 4))
        write_checkpoint(tmp_path, [TensorFile("model", specs, lambda: iter([data]))], OTHER)

    write(1)
    with CheckpointReader(tmp_path) as reader:
        write(2)
        reader.verify()
        out = bytearray(2)
        reader.read_into("model", "x", 1, memoryview(out))
    assert out == b"\1\1"


def test_bytes_that_do_not_fit_the_tensors_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="bytes were given"):
        write_checkpoint(
            tmp_path, [TensorFile("model", [TensorSpec("x", "U8", (4,))], lambda: iter([memoryview(b"abc")]))], {}
        )
    assert os.listdir(tmp_path) == []


_KILLED = """
import os, random, signal, sys, time
import torch
import memferry_rt
from torch import nn
torch.set_num_threads(1)
folder, kills = sys.argv[1], int(sys.argv[2])
random.seed(kills)

def pair(offloaded):
    model = nn.ModuleList([nn.Linear(256, 256) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters())
    if offloaded:
        memferry_rt.offload(model, optimizer, device="emulated", device_memory="4MiB")
    return model, optimizer

def save_for_ever(ready):
    # Every number in the n-th save is n.
    model, optimizer = pair(True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    number = memferry_rt.checkpoint_info(folder).extra if os.path.exists(folder + "/checkpoint.json") else 0
    while True:
        number += 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
                optimizer.state[parameter]["exp_avg"].fill_(number)
        memferry_rt.save(folder, model, optimizer, extra=number)
        os.write(ready, b"x")

before = 0
for _ in range(kills):
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        save_for_ever(told)
    os.read(ready, 1)
    time.sleep(random.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    model, optimizer = pair(False)
    number = memferry_rt.load(folder, model, optimizer)
    assert number > before, (number, before)
    before = number
    for parameter in model.parameters():
        assert bool((parameter == number).all()) and bool((optimizer.state[parameter]["exp_avg"] == number).all())
    os.close(ready), os.close(told)
print("whole", before)
"""


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_a_process_killed_while_it_saves_leaves_a_whole_checkpoint(kills: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path / "saved"), str(kills)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout.split()[1]) >= kills


_KILLED_AT = """
import os, sys
from pathlib import Path
from memferry_rt.checkpoint import TensorFile, TensorSpec, write_checkpoint
from memferry_rt.checkpoint import folder
left = int(sys.argv[2])

def dying(original):
    def call(*arguments):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)
        return original(*arguments)
    return call

for name in ("fsync", "replace", "unlink", "listdir"):
    setattr(os, name, dying(getattr(os, name)))
folder._write = dying(folder._write)
specs = [TensorSpec("x", "U8", (3,))]
files = [TensorFile(kind, specs, lambda: iter([memoryview(b"new")])) for kind in ("model", "optimizer")]
write_checkpoint(Path(sys.argv[1]), files, {"memferry": "", "torch": "", "optimizer": {}, "extra": 2})
"""


@pytest.mark.slow
def test_killed_before_each_call_to_the_disk_in_turn(tmp_path: Path) -> None:
    specs = [TensorSpec("x", "U8", (3,))]
    files = [TensorFile(kind, specs, lambda: iter([memoryview(b"old")])) for kind in ("model", "optimizer")]
    content = {**OTHER, "extra": 1}
    outcomes = []
    for at in range(1, 100):
        write_checkpoint(tmp_path, files, content)
        status = subprocess.run([sys.executable, "-c", _KILLED_AT, str(tmp_path), str(at)]).returncode
        with CheckpointReader(tmp_path) as reader:
            reader.verify()
            out = bytearray(3)
            for kind in ("model", "optimizer"):
                reader.read_into(kind, "x", 0, memoryview(out))
                assert out == (b"old" if reader.content["extra"] == 1 else b"new")
        outcomes.append((status, reader.content["extra"]))
        if status == 0:
            break
    assert outcomes[0] == (-9, 1)
    assert outcomes[-2] == (-9, 2)  # while it cleared up
    assert outcomes[-1] == (0, 2)
    assert [number for _, number in outcomes] == sorted(number for _, number in outcomes)


# -- memory ---------------------------------------------------------------------------------------------------
def _peak_rss() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.fixture
def large() -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """150 MB of state, in bf16 with masters, nearly all of one weight that is not in the order of its elements."""
    model = nn.ModuleList(nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(2))
    model[0].weight = nn.Parameter(torch.ones(4096, 3072, dtype=torch.bfloat16).t())
    optimizer = torch.optim.AdamW(model.parameters())
    memferry_rt.offload(model, optimizer, device="emulated", device_memory="32MiB")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    yield model, optimizer
    memferry_rt.restore(model)


def test_saving_and_loading_take_no_second_copy_of_the_state(
    large: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    runtime = memferry_rt.runtime_of(large[0])
    moved, used = runtime.memory.bytes_moved, runtime.memory.space.pool.peak
    memferry_rt.save(tmp_path / "warm", *large)
    for work in (memferry_rt.save, memferry_rt.load):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before = _peak_rss()
        tracemalloc.start()
        work(tmp_path / "saved", *large)
        traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert traced < 16 * MIB
        assert _peak_rss() - before < 64 * MIB
    assert memferry_rt.checkpoint_info(tmp_path / "saved").nbytes > 140 * MIB
    assert runtime.memory.bytes_moved == moved
    assert runtime.memory.space.pool.peak == used
