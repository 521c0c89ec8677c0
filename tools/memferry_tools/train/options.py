"""What ``memferry train`` can be told, checked once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from memferry_allocator import parse_size
from memferry_rt.errors import PlanError
from memferry_rt.plan import Plan, load_plan

from ..errors import ToolError
from .recipe import Recipe
from .shapes import find_model

DEFAULT = "tiny"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
_DEVICES = re.compile(r"\d{1,9}(,\d{1,9})*")
_DEVICE = re.compile(r"auto|cuda(:\d+)?|emulated(:\d+)?")


@dataclass(frozen=True)
class TrainOptions:
    """Settings of one run of ``memferry train``.  Sizes are bytes; None leaves a choice to the run.

    Attributes
    ----------
    model : str
        Its name.
    recipe : Recipe
        What is trained, as far as the options decide it: `settle` has the rest.
    dtype : str
        ``"auto"``, ``"fp32"`` or ``"bf16"``.
    data, tokenizer, json : Path or None
    device : str
        ``"auto"``, ``"cuda:N"`` or ``"emulated"``.
    device_memory, host_memory, pool_memory : int or None
    mode : str or None
        Modes of layers, as `memferry_rt.offload` reads them.
    plan : Plan or "auto" or None
    plan_file : Path or None
        Where it is from.
    async_step, deterministic, verify : bool
    save, resume : Path or None
        Folders of checkpoints.
    save_every : int or None
        Steps between two saves; None saves at the end only.
    helpers : tuple of int, or "auto"
        Devices that lend their links, for all processes of this host together.
    """

    model: str
    recipe: Recipe
    dtype: str
    data: Path | None
    tokenizer: Path | None
    device: str
    device_memory: int | None
    host_memory: int | None
    pool_memory: int | None
    mode: str | None
    plan: Plan | str | None
    plan_file: Path | None
    async_step: bool
    deterministic: bool
    verify: bool
    save: Path | None
    save_every: int | None
    resume: Path | None
    json: Path | None
    helpers: tuple[int, ...] | Literal["auto"] = ()

    @classmethod
    def build(
        cls,
        *,
        preset: str | None = None,
        config: str | None = None,
        shape: str | None = None,
        tied: bool = False,
        data: str | None = None,
        tokenizer: str | None = None,
        device: str = "auto",
        device_memory: str | None = None,
        host_memory: str | None = None,
        pool_memory: str | None = None,
        mode: str | None = None,
        plan: str | None = None,
        dtype: str = "auto",
        micro_batch: int | None = None,
        seq: int | None = None,
        accumulate: int = 1,
        accumulate_dtype: str = "auto",
        steps: int = 100,
        lr: float | None = None,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
        checkpointing: bool | None = None,
        async_step: bool = True,
        seed: int = 0,
        deterministic: bool = False,
        verify: bool = False,
        save: str | None = None,
        save_every: int | None = None,
        resume: str | None = None,
        json: str | None = None,
        helpers: str | None = None,
        adapters: int | None = None,
    ) -> TrainOptions:
        """Options from what a user writes.

        Raises
        ------
        ToolError, InvalidRequestError
            Something that makes no sense; the message begins with the option's name.
        """
        if preset is not None and config is not None:
            raise ToolError("--preset: give it, or --config, but not both")
        model, known = find_model(preset or DEFAULT, _path(config, "--config"), shape)
        if _DEVICE.fullmatch(device) is None:
            raise ToolError(f"--device: {device!r} is none; write auto, cuda:0 or emulated")
        if dtype not in ("auto", *DTYPES):
            raise ToolError(f"--dtype: {dtype!r} is not known; write auto, {' or '.join(DTYPES)}")
        if accumulate_dtype not in ("auto", "fp32"):
            raise ToolError(f"--accumulate-dtype: {accumulate_dtype!r} is not known; write auto or fp32")
        if save_every is not None and save is None:
            raise ToolError("--save-every: there is no --save DIR to save to")
        if plan is not None and mode is not None:
            raise ToolError("--plan: it has the modes of all layers; leave --mode out, or plan with --modes")
        if adapters is not None and adapters > known.shape.hidden:
            raise ToolError(f"--adapters: {adapters} is more than {known.shape.hidden}, the model's hidden size")
        recipe = Recipe(
            shape=replace(known.shape, tied=tied or known.shape.tied),
            checkpointing=known.checkpointing if checkpointing is None else checkpointing,
            dtype=DTYPES.get(dtype, "float32"),
            micro_batch=_at_least(1, micro_batch, known.micro_batch, "--micro-batch"),
            seq=_at_least(1, seq, known.seq, "--seq"),
            accumulate=_at_least(1, accumulate, 1, "--accumulate"),
            steps=_at_least(1, steps, 1, "--steps"),
            lr=_positive(known.lr if lr is None else lr, "--lr"),
            weight_decay=_finite(weight_decay, "--weight-decay"),
            max_grad_norm=_finite(max_grad_norm, "--max-grad-norm") or None,
            seed=_at_least(0, seed, 0, "--seed"),
            accumulate_dtype=DTYPES.get(accumulate_dtype),
            adapters=None if adapters is None else _at_least(1, adapters, 1, "--adapters"),
        )
        file = None if plan == "auto" else _path(plan, "--plan")
        return cls(
            model=model,
            recipe=recipe,
            dtype=dtype,
            data=_path(data, "--data"),
            tokenizer=_path(tokenizer, "--tokenizer"),
            device=device,
            device_memory=_size(device_memory, "--device-memory"),
            host_memory=_size(host_memory, "--host-memory"),
            pool_memory=_size(pool_memory, "--pool-memory"),
            mode=mode,
            plan=plan if file is None else _plan(file, recipe),
            plan_file=file,
            async_step=async_step,
            deterministic=deterministic or verify,
            verify=verify,
            save=_path(save, "--save"),
            save_every=None if save_every is None else _at_least(1, save_every, 1, "--save-every"),
            resume=_path(resume, "--resume"),
            json=_path(json, "--json"),
            helpers=_helpers(helpers),
        )

    def settle(self, *, emulated: bool, vocabulary: int) -> Recipe:
        """The recipe, once the device and the data are known.

        Parameters
        ----------
        emulated : bool
            Whether the device is; it computes on the CPU, where bf16 is many times slower than fp32.
        vocabulary : int
            Tokens that occur in the data; the model's vocabulary becomes at least as large.
        """
        recipe = self.recipe
        dtype = ("float32" if emulated else "bfloat16") if self.dtype == "auto" else recipe.dtype
        shape = replace(recipe.shape, vocabulary=max(recipe.shape.vocabulary, vocabulary))
        return replace(recipe, dtype=dtype, shape=shape)


def _plan(file: Path, recipe: Recipe) -> Plan:
    """The plan in a file, for these micro-batches."""
    try:
        plan = load_plan(file)
    except PlanError as error:
        raise ToolError(f"--plan: {error}") from None
    if (plan.micro_batch, plan.sequence) != (recipe.micro_batch, recipe.seq):
        raise ToolError(
            f"--plan: it is for micro-batches of {plan.micro_batch} x {plan.sequence} tokens, and these have "
            f"{recipe.micro_batch} x {recipe.seq}; give --micro-batch and --seq as the plan has them, or plan anew"
        )
    return plan


def _size(text: str | None, name: str) -> int | None:
    return None if text is None else parse_size(text, name=name)


def _path(text: str | None, name: str) -> Path | None:
    if text == "":
        raise ToolError(f"{name}: the name is empty; leave the option out, or name a file")
    return None if text is None else Path(text)


def _at_least(least: int, number: int | None, default: int, name: str) -> int:
    number = default if number is None else number
    if number < least:
        raise ToolError(f"{name}: {number} is less than {least}, the smallest that makes sense")
    return number


def _finite(number: float, name: str) -> float:
    if not (math.isfinite(number) and number >= 0):
        raise ToolError(f"{name}: {number} is not a number from 0 up")
    return number


def _positive(number: float, name: str) -> float:
    if _finite(number, name) == 0:
        raise ToolError(f"{name}: it must be more than 0")
    return number


def _helpers(text: str | None) -> tuple[int, ...] | Literal["auto"]:
    if text is None:
        return ()
    if text == "auto":
        return "auto"
    if _DEVICES.fullmatch(text) is None:
        raise ToolError(f"--helpers: {text!r} is neither auto nor a list of devices; write for example 1,2")
    found = tuple(int(number) for number in text.split(","))
    if len(set(found)) < len(found):
        raise ToolError(f"--helpers: {text} names a device twice")
    return found
