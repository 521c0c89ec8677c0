"""The arms of a model: planned here, trained by in processes of their own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from memferry_allocator import parse_size
from memferry_rt.adapters.torch.autopilot import HOST_KINDS
from memferry_rt.errors import BudgetError, PlanError
from memferry_rt.plan import (
    H200,
    Batch,
    Plan,
    PlanOptions,
    StateMode,
    compare_plans,
    format_modes,
    load_profile,
    machine_from_profile,
    make_plan,
    save_plan,
    transformer,
)
from memferry_rt.plan.arms import ablation
from memferry_rt.plan.choice import Choice, LayerChoice, torch_nbytes
from memferry_rt.plan.planner import plan_as_offload
from memferry_tools.plan.target import dimensions
from memferry_tools.train.presets import find_preset

from .. import records
from ..budgets import itemsize, parameters, scaled_device

HOST_BYTES = 24.5  # of a parameter: room for spare slabs
TORCH_ROOM = 512 << 20  # for torch, beyond what is counted, where the pool has a size of its own


@dataclass(frozen=True)
class Job:
    """A model and its memory.

    Attributes
    ----------
    device_memory : str, optional
        The budget; without it MemFerry's pool is `pool_share` of the weights, and torch has what it needs.
    """

    preset: str
    micro_batch: int
    seq: int
    device_memory: str | None = None
    pool_share: float = 0.0
    recompute: bool = True


MODELS = {
    "llama-1b": Job("llama-1b", 8, 1024, "6GiB"),
    "large-vocabulary": Job("large-vocabulary", 1, 1024, "6GiB"),
    "bert-base-size": Job("bert-base-size", 1, 384, pool_share=1 / 3, recompute=False),
}
LADDER = {
    "serial": "serial",
    "pipelined": "pipelined loads",
    "embedding": "embeddings read in place",
    "no-contention": "planner without contention",
    "contention": "contention-aware planner",
    "reload": "reload for backward",
    "ring": "ring of panels (relaxed numerics)",
    "overlap": "update beside the next forward",
    "early": "updates during backward",
    "split": "updates shared with the device",
}
GRADIENTS = {f"gradients-{round(100 * share)}": share for share in (1.0, 0.75, 0.5, 0.25, 0.0)}
AS_THEY_ARE = ("serial", "pipelined", "embedding", "no-contention")  # the others are the best so far
NOT_OVERLAPPED = (*AS_THEY_ARE, "contention", "reload", "ring")
ALONE = ("serial", "no-contention")  # nothing is built upon them
BY_ITSELF, BY_HAND, PLANNER = "default", "by-hand", "planner"
ARMS = (*LADDER, *GRADIENTS, BY_ITSELF, BY_HAND, PLANNER)
EMBEDDING = "embedding=dha+inplace"
WORTH = (
    *(PLANNER, BY_ITSELF, BY_HAND, "pipelined", "embedding", "split", "overlap", "early", "no-contention"),
    *("contention", "ring", "reload", *GRADIENTS, "serial"),
)
ROWS = [f"{model}/{arm}" for model in MODELS for arm in ARMS]


@dataclass(frozen=True)
class Arm:
    """Predicted seconds, and what to train by: a plan, or modes, or neither where the runtime decides.

    Attributes
    ----------
    overlap : bool
        Whether the next forward begins beside the update.
    """

    seconds: float
    plan: Plan | None = None
    modes: str = ""
    overlap: bool = True


class Bench:
    """The arms of one model: planned here, measured in processes of their own."""

    def __init__(self, job: Job, device: str, preset: str | None, profiles: Path | None) -> None:
        self.job = job if preset is None else replace(job, preset=preset, micro_batch=1, seq=64)
        self._device = device
        dtype = "float32" if device.startswith("emulated") else "bfloat16"
        batch = Batch(self.job.micro_batch, self.job.seq, dtype, recompute=job.recompute)
        self.workload = transformer(self.job.preset, dimensions(find_preset(self.job.preset).shape), batch)
        name = f"{self.job.preset}-{batch.micro_batch}x{batch.sequence}.json"
        file = None if profiles is None else profiles / name
        self._profile = None if file is None or not file.exists() else load_profile(file)
        self.source = "formulas" if self._profile is None else "a profile"
        self._machine = H200 if self._profile is None else machine_from_profile(self._profile)
        self._host_memory = int(HOST_BYTES * parameters(self.job.preset))
        usual = Choice(tuple(LayerChoice(recompute=bool(layer.recompute)) for layer in self.workload.layers))
        self._torch = torch_nbytes(self.workload, usual)
        self._pool, self._budget = self._memory(job)

    def _memory(self, job: Job) -> tuple[int | None, int]:
        """The pool, where it has a size of its own, and the planner's budget."""
        if job.device_memory is None:
            pool = int(job.pool_share * itemsize(self._device) * parameters(self.job.preset))
            return pool, self._torch + pool
        if self._device.startswith("emulated"):  # where the pool alone counts
            pool = scaled_device(job.device_memory, job.preset, self.job.preset, self._device)
            return pool, self._torch + pool
        return None, parse_size(job.device_memory)

    @property
    def _options(self) -> PlanOptions:
        return PlanOptions(self._budget, self._host_memory, early=True, host_kinds=HOST_KINDS)

    @cached_property
    def arms(self) -> Mapping[str, Arm | str]:
        """By name; or why an arm cannot be planned."""
        found: dict[str, Arm | str] = {}
        try:
            found |= self._ladder()
        except (BudgetError, PlanError) as error:
            found |= dict.fromkeys(LADDER, str(error))
        on_host = replace(self._options, early=False, state_modes=frozenset({StateMode.CPU}))
        for name, share in GRADIENTS.items():
            found[name] = self._planned(replace(on_host, reserve=share))
        found[BY_ITSELF] = self._by_itself("")
        found[BY_HAND] = self._by_itself(EMBEDDING)
        found[PLANNER] = self._planned(self._options)
        return found

    def _ladder(self) -> dict[str, Arm]:
        arms = {arm.name: arm for arm in ablation(self.workload, self._options, self._machine, self._profile)}
        found: dict[str, Arm] = {}
        best: Plan | None = None
        for name, title in LADDER.items():
            planned = arms[title].planned
            plan = None if planned is None else planned.plan
            if plan is not None and name not in ALONE:
                best = plan if best is None or plan.seconds < best.seconds else best
            trained = plan if name in AS_THEY_ARE else best
            found[name] = Arm(arms[title].seconds, trained, overlap=name not in NOT_OVERLAPPED)
        return found

    def _planned(self, options: PlanOptions) -> Arm | str:
        try:
            plan = make_plan(self.workload, options, self._machine, self._profile).plan
        except (BudgetError, PlanError) as error:
            return str(error)
        return Arm(plan.seconds, plan)

    def _by_itself(self, modes: str) -> Arm | str:
        """What the runtime decides, beside modes by hand."""
        options = replace(self._options, early=False, modes=modes)
        try:
            planned = plan_as_offload(self.workload, options, self._machine, self._profile)
        except (BudgetError, PlanError) as error:
            return str(error)
        return Arm(planned.plan.seconds, modes=modes)

    def measure(self, name: str, steps: int, limit_s: float, *, deterministic: bool = False) -> records.Row:
        """A row."""
        arm = self.arms[name]
        row: records.Row = {"job": {**asdict(self.job), "arm": name, "steps": steps}, "source": self.source}
        if isinstance(arm, str):
            return {**row, "status": "skipped", "message": arm}
        row["predicted_s"] = arm.seconds
        if name == "serial":
            return {**row, "status": "skipped", "message": "the runtime always loads ahead"}
        twin = None if arm.plan is None else self._twin(name, arm.plan, arm.overlap)
        if twin is not None:
            return {**row, "status": "same", "as": twin}
        with tempfile.TemporaryDirectory() as folder:
            command = self.command(steps, overlap=arm.overlap)
            command += ["--deterministic"] * deterministic
            if arm.plan is not None:
                row["modes"] = format_modes(arm.plan.modes)
                save_plan(arm.plan, Path(folder, "plan.json"))
                command += ["--plan", str(Path(folder, "plan.json"))]
            elif arm.modes:
                command += ["--mode", arm.modes]
            if arm.plan is not None and arm.plan.spare_slabs:
                command += ["--host-memory", str(self._host_memory)]
            found = records.measured_apart(command, limit_s)
        if found["status"] == "ok":
            del found["result"]["report"]["per_layer"]
        return {**row, **found}

    def _twin(self, name: str, plan: Plan, overlap: bool) -> str | None:
        """An arm of more worth that trains in the same way."""
        for other in WORTH[: WORTH.index(name)]:
            found = self.arms[other]
            if isinstance(found, str) or found.plan is None or found.overlap != overlap:
                continue
            if not compare_plans(found.plan, plan):
                return other
        return None

    def command(self, steps: int, *, overlap: bool) -> list[str]:
        """What trains it, without the plan."""
        job = self.job
        command = [
            sys.executable,
            "-m",
            "memferry_tools",
            "train",
            "--preset",
            job.preset,
            "--device",
            self._device,
        ]
        command += ["--micro-batch", str(job.micro_batch), "--seq", str(job.seq), "--steps", str(steps)]
        command += ["--checkpointing" if job.recompute else "--no-checkpointing", "--max-grad-norm", "0"]
        command += ["--async-step" if overlap else "--no-async-step"]
        if self._pool is None:
            return [*command, "--device-memory", str(self._budget)]
        return [*command, "--device-memory", str(self._budget + TORCH_ROOM), "--pool-memory", str(self._pool)]
