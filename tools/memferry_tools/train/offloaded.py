"""Training through the runtime."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import memferry_rt
from memferry_rt import BudgetError, CheckpointError, PlanError, Report, UnsupportedError
from memferry_rt.plan import Plan

from ..errors import ToolError
from .data import Batches
from .device import Target
from .initial import FirstWeights, model_on_meta
from .interrupts import Interrupts
from .loop import StepResult, run_micro_batches
from .memory import default_device_memory, explain_out_of_memory
from .recipe import Recipe
from .workers import ALONE, Workers


@dataclass(frozen=True)
class Placement:
    """Where a run's state may lie, in bytes, and a plan or the modes of layers; None takes the default.

    Attributes
    ----------
    helpers : str or tuple of int
        Devices that help the one of this process, as `memferry_rt.offload` reads them.
    """

    target: Target
    device_memory: int | None = None
    host_memory: int | None = None
    pool_memory: int | None = None
    plan: str | Plan | None = None
    async_step: bool = True
    workers: Workers = ALONE
    helpers: str | tuple[int, ...] = ()


class OffloadedTraining:
    """A model under `memferry_rt.offload`.  A context manager: at its end nothing is left registered.

    Parameters
    ----------
    recipe : Recipe
    batches : Batches
    placement : Placement
    resume : Path, optional
        A checkpoint to begin with.

    Raises
    ------
    BudgetError
        The memory the user allows is too little.
    ToolError
        It held the weights, and not what torch computes with them; or the checkpoint cannot be loaded.
    """

    def __init__(self, recipe: Recipe, batches: Batches, placement: Placement, resume: Path | None = None) -> None:
        self._recipe = recipe
        self._batches = batches
        self._placement = placement
        self._resume = resume
        self._interrupts = Interrupts()
        self._helped = 0  # bytes that helpers have carried so far

    def __enter__(self) -> OffloadedTraining:
        self._interrupts.__enter__()
        try:
            self._build()
        except BaseException:
            self._interrupts.__exit__()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._runtime.close()
        except Exception as failure:
            if error is None:
                raise
            raise error from failure  # what went wrong first is what the user must hear
        finally:
            self._interrupts.__exit__()
            del self._model, self._optimizer, self._runtime
            gc.collect()
            if not self._placement.target.emulated:
                torch.cuda.empty_cache()

    def report(self) -> Report:
        """What is where, and what was moved."""
        self._runtime.synchronize()
        return self._runtime.report()

    def step(self, number: int) -> StepResult:
        """See `Training`."""
        self._interrupts.check()
        device = self._placement.target.torch_device
        try:
            losses = run_micro_batches(
                self._model, self._batches, self._recipe, number, device, self._interrupts.check
            )
            self._optimizer.step()
            self._optimizer.zero_grad()
            # the update goes on meanwhile: what it takes shows in the next step
            values = self._placement.workers.gather(losses).tolist()
        except torch.OutOfMemoryError as error:
            raise explain_out_of_memory(error, self._placement.target, self._recipe, self._runtime) from error
        report = self._runtime.report()
        before, self._helped = self._helped, report.helper_nbytes
        return StepResult(values, report.grad_norm, report.device_peak, self._helped - before)

    def finish(self) -> None:
        """See `Training`."""
        self._runtime.updates.wait_all()

    def parameters(self) -> dict[str, torch.Tensor]:
        """See `Training`."""
        return {name: value.clone() for name, value in self._runtime.master_parameters().items()}

    def save(self, path: Path, extra: Any) -> None:
        """Save everything that going on needs, and `extra`.

        Raises
        ------
        ToolError
            It could not be written; what was saved before still is.
        """
        try:
            memferry_rt.save(path, self._model, self._optimizer, extra=extra)
        except CheckpointError as error:
            raise ToolError(f"--save: {error}") from error

    def _build(self) -> None:
        recipe, placement = self._recipe, self._placement
        self._model = model_on_meta(recipe)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)
        budget = placement.device_memory or placement.workers.least(
            default_device_memory(placement.target, recipe)
        )
        try:
            self._offload(budget)
        except (PlanError, UnsupportedError) as error:
            if isinstance(placement.plan, Plan):
                raise ToolError(f"--plan: {error}") from error
            raise
        except BudgetError as error:
            if placement.device_memory is not None or error.budget != "device_memory":
                raise
            self._offload(error.smallest)  # refused before anything was changed
        self._runtime = memferry_rt.runtime_of(self._model)
        if self._resume is not None:
            self._load(self._resume)

    def _load(self, path: Path) -> None:
        try:
            memferry_rt.load(path, self._model, self._optimizer)
        except CheckpointError as error:
            self._runtime.close()
            raise ToolError(f"--resume: {error}") from error

    def _offload(self, device_memory: int) -> None:
        first = FirstWeights(self._model, self._recipe.seed)

        def initialise(module: nn.Module) -> None:
            self._interrupts.check()
            if self._resume is None:
                first(module)

        memferry_rt.offload(
            self._model,
            self._optimizer,
            device=self._placement.target.text,
            device_memory=device_memory,
            host_memory=self._placement.host_memory,
            pool_memory=self._placement.pool_memory,
            max_grad_norm=self._recipe.max_grad_norm,
            compute_dtype=self._recipe.dtype,
            async_step=self._placement.async_step,
            accumulate=self._recipe.accumulate,
            accumulate_dtype=self._recipe.accumulate_dtype,
            param_init_fn=initialise,
            process_group=self._placement.workers.group,
            plan=self._placement.plan,
            helpers=self._placement.helpers,
            emulated=self._placement.target.machine,
        )
