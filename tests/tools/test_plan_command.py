"""``memferry plan`` and ``memferry simulate``: what they say, keep, compare and refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memferry_rt.plan import Profile, load_plan, save_profile
from memferry_transport.topology import dump, machine
from tests.plan.machines import decoder
from tests.plan.test_planner import profile_of

from .conftest import Command

LLAMA = ("--preset", "llama-1b", "--device-memory", "6GiB")


def values(text: str, label: str) -> list[str]:
    """What lines of this label say."""
    return [line[13:] for line in text.splitlines() if line.startswith(f"  {label:<11}")]


# -- plan -------------------------------------------------------------------------------------------------
def test_a_plan_says_what_every_layer_does_and_why(memferry: Command) -> None:
    outcome = memferry("plan", *LLAMA)
    assert outcome.status == 0
    assert outcome.err == ""
    assert values(outcome.out, "model") == ["llama-1b, 1.26 B parameters, bfloat16"]
    assert values(outcome.out, "batch") == ["8 x 1024 tokens"]
    rows = re.findall(r"^  blocks\.(\d+)(?: to blocks\.(\d+))? ", outcome.out, re.MULTILINE)
    covered = [number for first, last in rows for number in range(int(first), int(last or first) + 1)]
    assert covered == list(range(22))
    for word in ("embedding", "norm", "head", "weights", "gradient", "state", "forward", "next best", "formula"):
        assert word in outcome.out
    assert values(outcome.out, "iteration")[0].endswith("predicted")
    assert "6.00 GiB" in values(outcome.out, "device")[1]
    assert values(outcome.out, "host") == ["18.80 GiB registered"]
    assert "no profile: times are by formula" in values(outcome.out, "note")[0]
    assert values(outcome.out, "bound by")[0].split(";")[0] in ("DRAM", "H2D", "D2H", "CPU", "compute")
    assert "of device memory would save" in values(outcome.out, "1 GiB more")[0]


def test_both_budgets_are_one_question(memferry: Command) -> None:
    outcome = memferry("plan", *LLAMA, "--host-memory", "64GiB", "--early")
    assert outcome.status == 0
    assert "spare slabs of it" in values(outcome.out, "host")[0]
    assert len(values(outcome.out, "1 GiB more")) == 2


def test_the_large_vocabulary_is_read_in_place_and_the_gain_is_shown(memferry: Command, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "intermediate_size": 5632}
    config |= {"num_attention_heads": 16, "vocab_size": 256000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    outcome = memferry("plan", "--config", str(tmp_path), "--device-memory", "6GiB", "--micro-batch", "1")
    assert outcome.status == 0
    line = next(line for line in outcome.out.splitlines() if "model.embed_tokens" in line)
    assert line.split()[1] == "dha"
    assert "+" in line, "what the next best would take longer"


def test_the_largest_model_of_two_memories_is_named(memferry: Command) -> None:
    outcome = memferry(
        "plan", "--largest", "--device-memory", "24GiB", "--host-memory", "128GiB", "--micro-batch", "1"
    )
    assert outcome.status == 0
    name, parameters = values(outcome.out, "model")[0].split(",")[:2]
    assert name == "llama-8.58b"
    assert float(parameters.split()[0]) >= 8


def test_everything_is_kept(memferry: Command, tmp_path: Path) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("save", "json")}
    outcome = memferry("plan", *LLAMA, "--save", str(files["save"]), "--json", str(files["json"]))
    assert outcome.status == 0
    assert values(outcome.out, "written") == [str(file) for file in files.values()]
    plan, document = load_plan(files["save"]), json.loads(files["json"].read_text())
    assert document["schema"] == "memferry.plan_report"
    assert document["seconds"] == pytest.approx(plan.seconds)
    assert document["machine"]["sources"]["to_device"]
    assert {bound["name"] for bound in document["bounds"]} == {"compute", "H2D", "D2H", "CPU", "DRAM"}
    assert max(nbytes for _, nbytes in document["memory"]["device"]) <= plan.device_peak_nbytes <= 6 << 30
    kinds = {span["kind"] for span in document["timeline"]}
    assert {"F", "B", "U", "L"} <= kinds <= {"F", "B", "U", "L", "G"}
    assert all(0 <= span["start"] < span["end"] <= plan.seconds * (1 + 1e-9) for span in document["timeline"])


def test_the_timeline_is_drawn(memferry: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ranks = ("simulate", *LLAMA, "--ranks", "4", "--helpers", "--fixture", "cloudmatrix384-node")
    for number, command in enumerate((("plan", *LLAMA), ("simulate", *LLAMA), ranks)):
        path = tmp_path / f"{number}.png"
        assert memferry(*command, "--plot", str(path)).status == 0
        assert path.read_bytes().startswith(b"\x89PNG")


def test_plans_are_compared(memferry: Command, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first.json"), str(tmp_path / "second.json")
    assert memferry("plan", *LLAMA, "--save", first).status == 0
    assert memferry("plan", *LLAMA, "--modes", "head=dha", "--save", second).status == 0
    same = memferry("plan", "--compare", first, first)
    assert (same.status, values(same.out, "equal")) == (0, ["both decide the same"])
    other = memferry("plan", "--compare", first, second)
    assert other.status == 1
    assert any(line.startswith("head: ") and "dha" in line for line in values(other.out, "differ"))


def test_a_profile_is_used_and_said(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile_of(decoder(), "blocks.1"), path)
    assert memferry("plan", "--preset", "tiny", "--device-memory", "1GiB", "--profile", str(path)).status == 2
    other = Profile(**{**vars(profile_of(decoder(), "blocks.1")), "device": "Emulated accelerator"})
    save_profile(other, path)
    refused = memferry("plan", *LLAMA, "--profile", str(path), "--fixture", "h200-x1")
    assert refused.status == 2
    assert "--profile: it is of Emulated accelerator, and device 0 of the topology is NVIDIA H200" in refused.err


def test_a_profile_alone_is_a_model(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile_of(decoder(), "blocks.1"), path)
    outcome = memferry("plan", "--profile", str(path), "--device-memory", "1GiB")
    assert outcome.status == 0
    assert values(outcome.out, "model")[0].startswith("the profile's model")
    line = next(line for line in outcome.out.splitlines() if line.startswith("  blocks.1 "))
    assert " 500 ms " in line
    assert line.endswith("profile")


def test_a_topology_is_a_machine(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    dump(machine("a100-x8"), path)
    slow = memferry("plan", *LLAMA, "--topology", str(path), "--device", "2")
    assert slow.status == 0
    assert "A100" in values(slow.out, "device")[0]
    fast = memferry("simulate", *LLAMA, "--fixture", "hgx-h200-x8", "--helpers")
    alone = memferry("simulate", *LLAMA, "--fixture", "hgx-h200-x8")
    assert fast.status == alone.status == 0
    assert fast.out != alone.out


# -- simulate ---------------------------------------------------------------------------------------------
def test_a_plan_is_simulated_here_and_elsewhere(memferry: Command, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    assert memferry("plan", *LLAMA, "--save", path).status == 0
    here = memferry("simulate", "--preset", "llama-1b", "--plan", path)
    assert here.status == 0
    assert values(here.out, "the plan's")[0].endswith("here +0.0%")
    there = memferry("simulate", "--preset", "llama-1b", "--plan", path, "--fixture", "a100-x8")
    assert "here +" in values(there.out, "the plan's")[0]
    assert not values(there.out, "the plan's")[0].endswith("+0.0%")


def test_modes_by_hand_are_simulated(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    modes = "embedding=dha, blocks.*=ring+inplace+streamed"
    outcome = memferry("simulate", *LLAMA, "--modes", modes, "--json", str(path))
    assert outcome.status == 0
    document = json.loads(path.read_text())
    layers = {layer["name"]: layer for layer in document["plan"]["layers"]}
    assert (layers["blocks.7"]["weight"], layers["blocks.7"]["gradient"]) == ("ring", "inplace")
    assert 0 < document["usage"]["H2D"] <= 1


def test_what_the_runtime_does_by_itself_is_simulated(memferry: Command) -> None:
    by_itself, streamed = memferry("simulate", *LLAMA, "--auto"), memferry("simulate", *LLAMA)
    assert by_itself.status == streamed.status == 0
    times = [float(values(outcome.out, "iteration")[0].split()[0]) for outcome in (by_itself, streamed)]
    assert times[0] < times[1]


def test_several_ranks_share_the_host(memferry: Command) -> None:
    outcome = memferry("simulate", *LLAMA, "--fixture", "hgx-h200-x8", "--ranks", "8")
    assert outcome.status == 0
    assert values(outcome.out, "machine")[0].startswith("8 x NVIDIA H200")


def test_ranks_load_whole_layers_or_gather_them(memferry: Command) -> None:
    command = ("simulate", *LLAMA, "--auto", "--ranks", "8")
    times = [
        float(values(memferry(*command, "--loads", loads).out, "iteration")[0].split()[0])
        for loads in ("whole", "gathered")
    ]
    assert times[1] < times[0]


def test_idle_devices_help_ranks(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    outcome = memferry(
        "simulate", "--preset", "llama-13b", "--device-memory", "40GiB", "--micro-batch", "1", "--auto",
        "--fixture", "cloudmatrix384-node", "--ranks", "4", "--helpers", "--json", str(path),
    )  # fmt: skip
    assert outcome.status == 0
    spans = json.loads(path.read_text())["timeline"]
    assert {"peers", "relay in", "relay out"} <= {span["queue"] for span in spans}
    assert {"X", "S"} <= {span["kind"] for span in spans}
    assert values(outcome.out, "machine") == [
        "4 x Ascend 910C, each with such a batch; 1 idle for each: loads and gradients relayed"
    ]


def test_another_system_is_simulated(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "system.json"
    outcome = memferry("simulate", *LLAMA[:2], "--system", "deepspeed", "--ranks", "2", "--json", str(path))
    assert outcome.status == 0
    document = json.loads(path.read_text())
    assert document["system"] == "deepspeed"
    parts = sum(document[name] for name in ("computing", "updating", "returning"))
    assert document["seconds"] == pytest.approx(parts)
    assert values(outcome.out, "machine")[0].startswith("2 x NVIDIA H200")


def test_a_plan_for_ranks_is_simulated_with_so_many(memferry: Command, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    tiny = ("--preset", "tiny")
    made = memferry("plan", *tiny, "--ranks", "2", "--device-memory", "1GiB", "--save", path)
    assert values(made.out, "device")[0] == "2 x NVIDIA H200"
    assert load_plan(path).ranks == 2
    again = memferry("simulate", *tiny, "--plan", path, "--ranks", "2")
    assert values(again.out, "the plan's")[0].endswith("here +0.0%")
    other = memferry("simulate", *tiny, "--plan", path)
    assert other.status == 2
    assert "for a group of 2 ranks, and here one rank trains" in other.err


def test_what_each_idea_gains_is_shown(memferry: Command, tmp_path: Path) -> None:
    path = tmp_path / "arms.json"
    outcome = memferry("simulate", *LLAMA, "--ablation", "--json", str(path))
    assert outcome.status == 0
    arms = json.loads(path.read_text())["arms"]
    assert [arm["name"] for arm in arms][:2] == ["serial", "pipelined loads"]
    assert arms[0]["seconds"] > arms[-1]["seconds"] > 0
    for arm in arms:
        assert arm["name"] in outcome.out


# -- mistakes ---------------------------------------------------------------------------------------------
PLAN = ("plan", *LLAMA)
MISTAKES: list[tuple[tuple[str, ...], list[str]]] = [
    (("plan", "--preset", "llama-1b"), ["--device-memory: give the budget"]),
    (("plan", "--device-memory", "24GB"), ["--device-memory", "ambiguous", "GiB"]),
    (("plan", "--preset", "llama-2b", "--device-memory", "6GiB"), ["no 'llama-2b'", "llama-1b"]),
    ((*PLAN, "--config", "x"), ["--preset: give it, or --config"]),
    (
        ("plan", "--config", "/nowhere/config.json", "--device-memory", "6GiB"),
        ["/nowhere/config.json cannot be read"],
    ),
    (
        ("plan", "--preset", "llama-1b", "--device-memory", "1GiB"),
        ["device_memory", "smallest that works is", "MiB"],
    ),
    ((*PLAN, "--host-memory", "1GiB"), ["host_memory", "smallest that works is"]),
    ((*PLAN, "--modes", "layers.*=dha"), ["no layer is called 'layers.*'", "blocks"]),
    ((*PLAN, "--modes", "head=direct"), ["'direct'", "dha_then_load"]),
    ((*PLAN, "--modes", "head=ring"), ["head cannot have ring", "relaxed"]),
    ((*PLAN, "--numerics", "fast"), ["--numerics: 'fast'", "exact"]),
    ((*PLAN, "--reserve", "3"), ["--reserve: 3"]),
    ((*PLAN, "--spare-slabs", "-1"), ["--spare-slabs: -1"]),
    ((*PLAN, "--reserve", "0.5", "--gradient-memory", "1GiB"), ["--gradient-memory: "]),
    ((*PLAN, "--dtype", "int8"), ["--dtype: 'int8'", "bf16"]),
    ((*PLAN, "--micro-batch", "0"), ["--micro-batch: 0"]),
    ((*PLAN, "--checkpointing", "maybe"), ["--checkpointing: 'maybe'", "auto"]),
    ((*PLAN, "--profile", "/nowhere.json"), ["--profile", "/nowhere.json cannot be read"]),
    ((*PLAN, "--topology", "/nowhere.json"), ["--topology", "/nowhere.json cannot be read"]),
    ((*PLAN, "--fixture", "dgx"), ["--fixture: 'dgx'", "h200-x1"]),
    ((*PLAN, "--fixture", "h200-x1", "--device", "4"), ["--fixture", "device 4"]),
    ((*PLAN, "--topology", "x", "--fixture", "h200-x1"), ["--topology: give it, or --fixture"]),
    ((*PLAN, "--helpers"), ["--helpers", "--topology or --fixture"]),
    ((*PLAN, "--device", "3"), ["--device", "--topology or --fixture"]),
    ((*PLAN, "--helpers", "--fixture", "h200-x2", "--ranks", "2"), ["helpers", "no time to relay"]),
    ((*PLAN, "--helpers", "--fixture", "h200-x1"), ["helpers", "no time to relay"]),
    ((*PLAN, "--helpers", "--fixture", "a100-x8", "--ranks", "4"), ["no idle device", "each of 4 ranks"]),
    ((*PLAN, "--ranks", "2", "--early"), ["early: 2 ranks make no updates during backward"]),
    ((*PLAN, "--ranks", "0"), ["--ranks: 0"]),
    ((*PLAN, "--save", "/nowhere/plan.json"), ["--save", "no folder /nowhere"]),
    ((*PLAN, "--plot", "/"), ["--plot", "folder"]),
    ((*PLAN, "--largest", "--host-memory", "64GiB"), ["--largest", "leave --preset"]),
    (("plan", "--largest", "--device-memory", "24GiB"), ["--host-memory: the largest model depends on it"]),
    (("plan", "--compare", "/nowhere.json", "/nowhere.json"), ["--compare", "/nowhere.json cannot be read"]),
    (("simulate", "--preset", "llama-1b"), ["--device-memory: give the budget", "--plan"]),
    (("simulate", "--plan", "/nowhere.json"), ["--plan", "/nowhere.json cannot be read"]),
    (("simulate", "--plan", ""), ["--plan: the name is empty"]),
    (("simulate", *LLAMA, "--auto", "--modes", "head=dha"), ["--auto", "leave --plan, --modes"]),
    (("simulate", *LLAMA, "--ablation", "--modes", "head=dha"), ["--ablation", "leave --plan and --modes out"]),
    (("simulate", *LLAMA, "--ablation", "--plot", "x.png"), ["--plot: it draws one iteration"]),
    (("simulate", *LLAMA, "--loads", "half", "--ranks", "2"), ["--loads: 'half'", "gathered"]),
    (("simulate", *LLAMA, "--loads", "gathered"), ["loads: 'gathered' is for several ranks"]),
    (("simulate", *LLAMA, "--system", "fsdp"), ["--system: 'fsdp'", "memferry, deepspeed"]),
    (("simulate", *LLAMA, "--system", "deepspeed", "--auto"), ["--auto: --system deepspeed has no such thing"]),
    (
        ("simulate", *LLAMA, "--system", "deepspeed", "--ranks", "2", "--loads", "gathered"),
        ["--loads: --system deepspeed has no such thing"],
    ),
]


@pytest.mark.parametrize(("arguments", "parts"), MISTAKES, ids=lambda each: " ".join(each)[:60])
def test_mistakes_are_one_line(memferry: Command, arguments: tuple[str, ...], parts: list[str]) -> None:
    outcome = memferry(*arguments)
    assert outcome.status == 2
    assert outcome.err.startswith("memferry: error: ")
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err


def test_a_plan_for_another_model_is_refused(memferry: Command, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    assert memferry("plan", *LLAMA, "--save", path).status == 0
    outcome = memferry("simulate", "--preset", "llama-3b", "--plan", path)
    assert outcome.status == 2
    assert "--plan: the plan is for llama-1b" in outcome.err
    assert "this is llama-3b" in outcome.err
    assert "give --preset llama-1b, --dtype bf16 and --micro-batch 8 --seq 1024" in outcome.err


def test_a_plan_of_a_preset_names_its_model(memferry: Command, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    assert memferry("plan", "--preset", "tiny", "--device-memory", "1GiB", "--save", path).status == 0
    outcome = memferry("simulate", "--plan", path)
    assert outcome.status == 0, outcome.err
    assert values(outcome.out, "model") == ["tiny, 4 x 256 tokens"]


def test_a_sequence_is_no_longer_than_the_model_has_positions(memferry: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    command = ("plan", "--config", str(tmp_path), "--device-memory", "8GiB")
    assert values(memferry(*command).out, "batch") == ["8 x 512 tokens"]
    refused = memferry(*command, "--seq", "1024")
    assert refused.status == 2
    assert "--seq: 1024 is more than the 512 positions" in refused.err


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ({"model_type": "mamba"}, ["model_type 'mamba' is not known", "llama, mistral, gpt2, bert", "--preset"]),
        ({}, ["model_type None is not known"]),
        ([], ["model_type None is not known"]),
        ({"model_type": "llama"}, ["hidden_size", "None is not a number"]),
        ({"model_type": "gpt2", "n_layer": "many"}, ["n_layer", "'many' is not a number"]),
        ({"model_type": "gpt2", "tie_word_embeddings": 1}, ["tie_word_embeddings", "neither true nor false"]),
        ({"model_type": "bert", "is_decoder": True}, ["is_decoder: True makes a model of unknown shape"]),
    ],
)
def test_a_config_of_no_known_shape_is_refused(
    memferry: Command, tmp_path: Path, content: Any, parts: list[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    outcome = memferry("plan", "--config", str(path), "--device-memory", "6GiB")
    assert outcome.status == 2
    for part in ("--config", str(path), *parts):
        assert part in outcome.err


def test_heads_that_do_not_divide_a_model_are_refused(memferry: Command, tmp_path: Path) -> None:
    config = {"hidden_size": 65, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 10}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 100, **config}))
    outcome = memferry("plan", "--config", str(path), "--device-memory", "1GiB")
    assert outcome.status == 2
    assert "4 heads do not divide a hidden_size of 65" in outcome.err
