"""The profiler on the emulated device: what it measures, what it counts, and when it measures again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memferry_rt.adapters.torch.profiling import profile_model, ways
from memferry_rt.errors import UnsupportedError
from memferry_rt.plan.profile import (
    Copy,
    GradientPlace,
    LayerKind,
    LayerProfile,
    Phase,
    Profile,
    Timing,
    WeightPlace,
    load_profile,
)

WIDTH, OUTER, ROWS, TOKENS = 16, 24, 40, 12
ITEMSIZE = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, OUTER)
        self.down = nn.Linear(OUTER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"x": x + scale * self.down(torch.relu(self.up(self.norm(x))))}


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, scale=0.5)["x"]
        scores: torch.Tensor = self.head(x)
        return scores.sum()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "memferry" / "profiles"


def measure(model: nn.Module, told: list[str] | None = None, **options: Any) -> Profile:
    ids = torch.randint(ROWS, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    names = [] if told is None else told
    return profile_model(
        model, (ids,), micro_batch=2, sequence=TOKENS // 2, device="emulated", told=names.append, **options
    )


def timing(layer: LayerProfile, *way: Any) -> Timing:
    found = layer.find(*way)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return measure(Model())


def test_layers_are_described(profile: Profile) -> None:
    assert [layer.name for layer in profile.layers] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    kinds = [layer.kind for layer in profile.layers]
    assert kinds == [LayerKind.EMBEDDING, *[LayerKind.BLOCK] * 3, LayerKind.HEAD]
    assert {layer.tokens for layer in profile.layers} == {TOKENS}
    assert profile.emulated
    assert profile.dtype == "float32"
    assert profile.layers[0].parameters == ROWS * WIDTH
    assert profile.layers[1].shapes == tuple(tuple(p.shape) for p in Block().parameters())
    assert {sample.nbytes for sample in profile.to_device} == {sample.nbytes for sample in profile.from_device}
    assert profile.both_ways is not None


@pytest.mark.parametrize("beside", Copy)
def test_every_way_is_measured(profile: Profile, beside: Copy) -> None:
    for layer in profile.layers:
        places = [WeightPlace.DEVICE, WeightPlace.HOST]
        places += [WeightPlace.RING] if layer.kind is not LayerKind.EMBEDDING else []
        for weights in places:
            assert timing(layer, Phase.FORWARD, weights, GradientPlace.DEVICE, beside).samples
            for gradients in GradientPlace:
                found = timing(layer, Phase.BACKWARD, weights, gradients, beside)
                assert (found.copy_rate is None) == (beside is Copy.NONE)
        assert (layer.find(Phase.FORWARD, WeightPlace.RING) is None) == (layer.kind is LayerKind.EMBEDDING)


def test_ways_that_run_the_plain_kernels_are_exact(profile: Profile) -> None:
    for layer in profile.layers:
        for found in layer.timings:
            if found.weights is not WeightPlace.RING:
                assert found.exact is True


def test_counters_are_what_the_ways_say(profile: Profile) -> None:
    block, matrices = profile.layers[1], 2 * WIDTH * OUTER * ITEMSIZE
    whole = block.parameters * ITEMSIZE
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        plain = timing(block, phase)
        assert (plain.copied_nbytes, plain.in_place_nbytes, plain.pool_nbytes) == (0, 0, 0)
        ring = timing(block, phase, WeightPlace.RING)
        assert ring.copied_nbytes == matrices
        assert ring.pool_nbytes
    in_place = timing(block, Phase.FORWARD, WeightPlace.HOST)
    assert (in_place.copied_nbytes, in_place.in_place_nbytes, in_place.pool_nbytes) == (0, whole, 0)
    written = timing(block, Phase.BACKWARD, WeightPlace.DEVICE, GradientPlace.HOST)
    assert (written.copied_nbytes, written.in_place_nbytes, written.pool_nbytes) == (0, whole, 0)


def test_an_embedding_touches_its_rows_only(profile: Profile) -> None:
    table = profile.layers[0]
    read = timing(table, Phase.FORWARD, WeightPlace.HOST)
    assert (read.copied_nbytes, read.in_place_nbytes) == (0, TOKENS * WIDTH * ITEMSIZE)
    written = timing(table, Phase.BACKWARD, WeightPlace.HOST, GradientPlace.HOST)
    assert written.in_place_nbytes is not None
    assert 0 < written.in_place_nbytes <= TOKENS * WIDTH * ITEMSIZE


def test_layers_that_are_alike_are_measured_once_and_nothing_twice(cache: Path) -> None:
    told: list[str] = []
    first = measure(Model(), told)
    assert told == ["embedding", "blocks.0", "head"]
    assert first.layers[1].timings == first.layers[3].timings
    again = measure(Model(), told)
    assert len(told) == 3
    assert again == first
    (file,) = cache.iterdir()
    assert load_profile(file) == first
    assert measure(Model(), told, anew=True).layers[0].name == "embedding"
    assert len(told) == 6


def test_what_times_depend_on_is_measured_again(cache: Path) -> None:
    told: list[str] = []
    for options in (
        {},
        {"compute_dtype": torch.bfloat16},
        {"machine": {"cpu": "another"}},
        {"checkpointing": True},
        {"layers": ["blocks"]},
    ):
        before = len(told)
        measure(Model(), told, **options)
        assert len(told) > before
    assert len(list(cache.iterdir())) == 5


def test_a_damaged_file_is_measured_again(cache: Path) -> None:
    told: list[str] = []
    measure(Model(), told)
    (file,) = cache.iterdir()
    file.write_text("{")
    measure(Model(), told)
    assert len(told) == 6
    assert load_profile(file).layers


def test_a_cache_that_cannot_be_written_is_done_without(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder would be")
    assert measure(Model()).layers


def test_the_model_is_left_alone_and_may_be_on_meta() -> None:
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measure(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())
    with torch.device("meta"):
        bare = Model()
    assert measure(bare, anew=True).layers[1].timings
    assert all(parameter.is_meta for parameter in bare.parameters())


def test_a_tied_head_counts_for_the_layer_that_has_its_weight() -> None:
    profile = measure(Model(tied=True))
    assert [layer.name for layer in profile.layers] == ["embedding", "blocks.0", "blocks.1", "blocks.2"]
    table = profile.layers[0]
    assert timing(table, Phase.BACKWARD, WeightPlace.RING).exact is not None
    assert table.find(Phase.BACKWARD, WeightPlace.HOST, GradientPlace.HOST) is None, "two modules add to it"


def test_a_way_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "linear_input_gradient", lambda dy, weight, panels, x: dy @ weight + 1)
    head = measure(Model()).layers[-1]
    assert timing(head, Phase.FORWARD, WeightPlace.HOST).exact is True
    assert timing(head, Phase.BACKWARD, WeightPlace.HOST).exact is False


def test_only_inputs_that_get_gradients_in_training_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's input does; the table of positions beside it does not, though it is floating-point."""

    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(ROWS, WIDTH)
            self.blocks = nn.ModuleList(Shifted() for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x, table = self.embedding(ids), torch.ones(ids.shape[1], WIDTH)
            for block in self.blocks:
                x = block(x, table)
            return x.sum()

    class Shifted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            asked.append((x.requires_grad, table.requires_grad))
            return super().forward(x + table)

    asked: list[tuple[bool, bool]] = []
    measure(Positioned())
    assert (True, False) in asked
    assert not any(table for _, table in asked)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Bert"])
def test_models_of_transformers_are_rehearsed(kind: str) -> None:
    """With caches that calls would fill, dropout, and shapes passed by name."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    config = getattr(transformers, f"{kind}Config")(vocab_size=ROWS, bos_token_id=0, eos_token_id=0, **sizes)
    model = getattr(transformers, f"{kind}Model")(config).train()
    profile = measure(model)
    blocks = [layer for layer in profile.layers if layer.kind is LayerKind.BLOCK]
    assert len(blocks) == 2
    assert timing(blocks[1], Phase.BACKWARD, WeightPlace.HOST).exact is True


def test_inputs_that_the_model_does_not_take_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="inputs of a forward"):
        profile_model(Model(), (), micro_batch=1, sequence=1, device="emulated")
