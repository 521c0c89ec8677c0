"""`offload`: the entry point."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from memferry_allocator import Driver, EmulatedOptions, InvalidRequestError, format_size, open_device

from ...device_update import DeviceUpdate, open_device_update
from ...errors import BudgetError, OffloadError, UnsupportedError
from ...options import OffloadOptions
from ...parallel import held_nbytes
from ...plan.plan import Plan
from .budget import Budget
from .convert import Materialiser, ParameterInit, plan_layouts
from .cut import cut_layers
from .early import host_nbytes, spares_within
from .helping import find_help, refuse_helpers
from .layer import Geometry
from .modes import GivenPlan, LayerPlan
from .parallel import Ranks, facts, options_of_rank, refuse_unshared
from .planned import dtype_of
from .planning import Planning
from .rules import AdamRule, UpdateRule, choose_rule, refuse_sharing
from .runtime import Runtime
from .saved import require_hooks
from .tensors import DTYPES

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741 - the usual letter

_ATTRIBUTE = "_memferry_runtime"


def offload(
    model: M,
    optimizer: O,
    *,
    device_memory: str | int,
    device: str = "auto",
    host_memory: str | int | None = None,
    max_grad_norm: float | None = None,
    compute_dtype: torch.dtype | str | None = None,
    layers: Sequence[str] | None = None,
    pool_memory: str | int | None = None,
    async_step: bool = False,
    optimizer_split: str | float = "auto",
    spare_slabs: str | int = "auto",
    accumulate: int = 1,
    accumulate_dtype: torch.dtype | str | None = None,
    param_init_fn: ParameterInit | None = None,
    plan: GivenPlan | None = None,
    numerics: str = "exact",
    helpers: str | Sequence[int] | None = (),
    emulated: EmulatedOptions | None = None,
    process_group: Any = None,
) -> tuple[M, O]:
    """Keep a model's training state in host memory and train it through a budget of device memory.

    Both objects are converted in place and returned; the training loop does not change.  Parameters become
    tensors on the device whose memory is host pages; weights are streamed to the device layer by layer,
    gradients leave it during backward, and ``optimizer.step()`` updates on the CPU in fp32.  Whatever the
    budget, the results are those of plain PyTorch with fp32 master weights and
    ``torch.optim.AdamW(fused=True)``, or another class with ``foreach=False``, on the CPU, bit for bit.

    Parameters
    ----------
    model : nn.Module
        On the CPU, the device, or ``meta``.  Gradients it already has are dropped.
    optimizer : Optimizer
        Over parameters of the model.  Its own settings and schedulers stay in force.  Of any class that updates
        each parameter from its own gradient and state; ``AdamW``, ``Adam``, ``SGD``, ``Adagrad(fused=True)`` and
        `Lion` have native kernels, the others warn that they are slower.
    device_memory : str or int
        Bytes, or text such as ``"24GiB"``: the device pool and what torch reserves together.  The CUDA context
        comes on top.  On the emulated device the pool alone counts.
    device : str
        ``"auto"``, ``"cuda"``, ``"cuda:1"`` or ``"emulated"``; ``"auto"`` emulates only where there is no
        accelerator.
    host_memory : str or int, optional
        Refuse to take more host memory than this.
    max_grad_norm : float, optional
        Clip the gradients' global 2-norm to this.
    compute_dtype : torch.dtype or str, optional
        Dtype of weights and gradients in forward and backward; by default each parameter's own.  Parameters
        that are not fp32 get an fp32 master copy.
    layers : sequence of str, optional
        Names of the modules that are streamed as one piece; found in the module tree by default.
    pool_memory : str or int, optional
        How much of `device_memory` is the pool.  By default it is small in the first step, after which it gets
        what torch has left.  Give it where later steps need more of torch than the first.
    async_step : bool
        Let ``optimizer.step()`` return before the update is complete; a forward waits for each layer as it
        comes to it.  Faster; before reading parameters in any other way, call `synchronize`.
    optimizer_split : str or float
        Who updates.  ``"cpu"``: the CPU alone.  A number from 0 to 1: the device's share of the parameters, as far
        as `device_memory` has room for it; layers whose state can live there first, then layers whose state is
        streamed through it.  ``"auto"``: what has room lives there, and the rest is shared by measured speed.  It
        never changes the result.  For other optimizers than Adam and AdamW ``"auto"`` means ``"cpu"``, and a share
        is refused.
    spare_slabs : str or int
        For how many layers host memory is taken twice, so that their update can be made during backward, while
        clipping does not bite.  ``"auto"``: as many as `host_memory` has room for, and none without it.
    accumulate : int
        How many backwards a step sums the gradients of.  Only the last of them begins updates, and sums are kept
        on the device as far as there is room.  More or fewer give the right result too.
    accumulate_dtype : torch.dtype or str, optional
        ``"float32"``: gradients are summed in fp32, the norm and the update are of that sum, and ``p.grad`` is it.
        By default they are summed in the parameter's dtype, as PyTorch does.
    param_init_fn : callable, optional
        Initialises the parameters that a module itself owns, for models on ``meta``; by default
        ``module.reset_parameters()``.
    plan : str, mapping or Plan, optional
        Modes of layers by hand, as ``{"embed*": "dha", "layers.*": "stream+inplace"}`` or the same as text, with
        patterns of layer names: where weights are read (``resident``, ``stream``, ``dha``, ``dha_then_load``,
        ``ring``) and how gradients leave (``buffer``, ``inplace``).  By default ``stream+buffer``.  Or a
        `memferry_rt.plan.Plan` of this model, of `make_plan` or `load_plan`, which also says who updates each
        layer and how many spare slabs there are.  ``"auto"``: a plan is made after the first step, tried against
        the default and kept if it is faster; see `plan_of` and ``report().plan_notes``.  `set_plan` changes it
        later.
    numerics : str
        ``"exact"``: panels of weights and gradients are used where a trial shows that they give PyTorch's very
        bits; elsewhere the whole is read or made.  ``"relaxed"``: always.
    helpers : sequence of int or "auto"
        Devices that do not train and lend their host links: they carry a share of weights inward and gradients
        outward, over the link between the devices.  ``"auto"``: those that nobody of the group trains on and that
        have peer access, shared out evenly between ranks, each as long as it is idle; none if there are none.
        Devices that are named are used whatever they do.  It never changes the result.
    emulated : EmulatedOptions, optional
        The machine to emulate.
    process_group : ProcessGroup, optional
        Train with the other ranks of this group of ``torch.distributed``, each on its own micro-batches and its
        own device: gradients are averaged, and the ranks of a host share one host state, of which each updates its
        part.  All ranks call this, `load` and ``optimizer.step()`` alike, and on several hosts `save` and
        `restore`; weights begin as those of rank 0.

    Returns
    -------
    (model, optimizer)
        The same objects.

    Raises
    ------
    BudgetError
        A budget is too small; it names the smallest that works.  Nothing was allocated or changed.
    UnsupportedError
        The model or optimizer has something that offloading cannot honour, or a layer cannot do its mode.  Nothing
        was changed.
    PlanError
        `plan` names unknown layers or modes, or is for another model or device.  Nothing was changed.
    DriverError
        No such device, or its driver does not work.
    InvalidRequestError
        A size or number that makes no sense.
    CalibrationError
        What the ways over helpers cost cannot be read or measured.  Nothing was changed.
    RankError
        Another rank has refused, or has something else than this one; nothing was allocated or changed.
    """
    auto = isinstance(plan, str) and plan == "auto"
    if auto:
        plan = None
    ranks = Ranks.join(process_group)
    with contextlib.nullcontext() if ranks is None else ranks.refused_together():
        options = OffloadOptions.build(
            device=device,
            device_memory=device_memory,
            host_memory=host_memory,
            max_grad_norm=max_grad_norm,
            compute_dtype=None if compute_dtype is None else str(compute_dtype).removeprefix("torch."),
            layers=layers,
            pool_memory=pool_memory,
            async_step=async_step,
            optimizer_split=optimizer_split,
            spare_slabs=spare_slabs,
            accumulate=accumulate,
            accumulate_dtype=None if accumulate_dtype is None else str(accumulate_dtype).removeprefix("torch."),
            numerics=numerics,
            helpers=helpers,
            emulated=emulated,
        )
        options = options if ranks is None else options_of_rank(options, ranks)
    if ranks is not None:
        ranks.agree({})  # who is on which host
    with contextlib.nullcontext() if ranks is None else ranks.refused_together():
        prepared = _prepare(model, optimizer, options, plan, param_init_fn, ranks)
    if ranks is not None:
        cuts, layouts = prepared.planning.cuts, prepared.planning.layouts
        alike = facts(options, optimizer, cuts, layouts, prepared.geometries, prepared.budget)
        ranks.agree(alike | {"the modes of layers": repr(prepared.plans)})
    help = find_help(prepared.options, prepared.driver, prepared.device, ranks)
    with contextlib.nullcontext() if ranks is None else ranks.told():
        runtime = Runtime(
            model,
            prepared.options,
            prepared.driver,
            prepared.device,
            prepared.planning,
            prepared.geometries,
            prepared.plans,
            prepared.budget,
            prepared.materialiser,
            prepared.rule,
            prepared.update,
            prepared.spares,
            ranks,
            plan,
            auto,
            help,
        )
    prepared.budget.begin()
    model.__dict__[_ATTRIBUTE] = runtime
    return model, optimizer


@dataclass(frozen=True)
class _Prepared:
    """What is decided before anything is allocated or changed."""

    options: OffloadOptions
    driver: Driver
    device: int
    planning: Planning
    geometries: list[list[Geometry]]
    plans: list[LayerPlan]
    budget: Budget
    materialiser: Materialiser
    rule: UpdateRule
    update: DeviceUpdate | None
    spares: int


def _prepare(
    model: nn.Module,
    optimizer: Optimizer,
    options: OffloadOptions,
    plan: GivenPlan | None,
    init: ParameterInit | None,
    ranks: Ranks | None,
) -> _Prepared:
    dtype = _compute_dtype(options.compute_dtype)
    require_hooks()
    _check_model(model)
    rule = choose_rule(optimizer, model)
    if not rule.shared:
        refuse_sharing(optimizer, options.optimizer_split, options.spare_slabs)
    if ranks is not None:
        refuse_unshared(optimizer, in_parts=rule.in_parts)
    driver, ordinal = open_device(options.device, emulated=_machine(options))
    refuse_helpers(options, driver, ordinal)
    updated = {
        parameter: rule.state_keys(group, parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    cuts = cut_layers(model, options.layers)
    layouts, geometries = plan_layouts(cuts, updated, dtype, _compute_dtype(options.accumulate_dtype))
    split = options.optimizer_split
    update = None
    if isinstance(rule, AdamRule) and split not in ("cpu", 0.0):
        update = open_device_update(driver, ordinal, rule.kernel)
    if ranks is not None:
        ranks.require_backend("gloo" if driver.name == "emulated" else "nccl")
    spares = options.spare_slabs
    if spares is None and isinstance(plan, Plan):
        spares = plan.spare_slabs
        if not rule.shared:
            refuse_sharing(optimizer, split, spares)
    elif spares is None:
        spares = spares_within(layouts, options.host_memory) if rule.shared else 0
    host = host_nbytes(layouts, spares) if ranks is None else held_nbytes(layouts, ranks.share)
    _check_memory(host, options, driver, ordinal)
    planning = Planning(
        model,
        cuts,
        layouts,
        options,
        driver,
        ordinal,
        updates=update is not None,
        ranks=1 if ranks is None else ranks.size,
        dtype=dtype_of(geometries),
    )
    plans = planning.resolve(plan)
    budget = planning.budget(plans)
    materialiser = Materialiser(model, init)
    return _Prepared(
        options, driver, ordinal, planning, geometries, plans, budget, materialiser, rule, update, spares
    )


def is_offloaded(model: nn.Module) -> bool:
    return _ATTRIBUTE in model.__dict__


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime behind an offloaded model.

    Raises
    ------
    OffloadError
        The model is not offloaded.
    """
    runtime = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(runtime, Runtime):
        raise OffloadError("this model is not offloaded; call memferry_rt.offload(model, optimizer, ...) first")
    return runtime


def set_plan(model: nn.Module, plan: GivenPlan) -> None:
    """Change the modes of layers between two steps; see `offload` for `plan`.

    What it says nothing about is streamed.  Device copies, rings and state in device memory move home first, and
    come back as the new plan has it; no result changes.

    Raises
    ------
    OffloadError
        The model is not offloaded, or a tensor still aliases the device copy of a layer.
    PlanError, UnsupportedError, BudgetError
        Something in the plan that is not known, cannot be done, or does not fit.  Nothing was changed.
    Exception
        What failed on the way, such as running out of memory.  The plan before is in force again, or, if an
        `OffloadError` says so, every layer is streamed.
    """
    runtime_of(model).set_plan(plan)


def plan_of(model: nn.Module) -> Plan | None:
    """The plan that an offloaded model trains by, or that ``plan="auto"`` has made of it; None if there is none.

    Raises
    ------
    OffloadError
        The model is not offloaded.
    """
    runtime = runtime_of(model)
    made = None if runtime.autopilot is None else runtime.autopilot.plan
    return runtime.plan or made


def synchronize(model: nn.Module) -> None:
    """Block until the last step's update is complete, so that parameters may be read outside of a forward."""
    runtime_of(model).synchronize()


def restore(model: M) -> M:
    """Undo `offload`: model and optimizer are ordinary objects on the CPU, and nothing is pinned any more.

    The weights, gradients and moments stay where they are in host memory, without a copy.  Moments of
    parameters that are not fp32 are rounded to the parameter's dtype, as PyTorch keeps them.
    """
    runtime = runtime_of(model)
    del model.__dict__[_ATTRIBUTE]
    runtime.close()
    return model


def _machine(options: OffloadOptions) -> EmulatedOptions:
    """The machine to emulate: what the user says, or one with room for the budget."""
    default = EmulatedOptions()
    return options.emulated or replace(default, device_memory=max(default.device_memory, options.device_memory))


def _compute_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise UnsupportedError(f"compute_dtype: {name!r} is not supported; use {', '.join(DTYPES)}")
    return DTYPES[name]


def _check_model(model: nn.Module) -> None:
    if is_offloaded(model):
        raise OffloadError("this model is offloaded already; call memferry_rt.restore(model) first")
    if hasattr(model, "_orig_mod"):
        raise UnsupportedError(
            "this model is the result of torch.compile: hooks inside it would be skipped; offload the model "
            "itself and compile its blocks"
        )


def _check_memory(host: int, options: OffloadOptions, driver: Driver, ordinal: int) -> None:
    if options.host_memory is not None and host > options.host_memory:
        raise BudgetError(
            "host_memory", options.host_memory, host, "weights, gradients and optimizer state take more"
        )
    capacity = driver.device_info(ordinal).capacity
    if options.device_memory > capacity:
        raise InvalidRequestError(
            f"device_memory: {format_size(options.device_memory)} is more than the device has, "
            f"{format_size(capacity)}; give at most {capacity >> 20}MiB"
        )
