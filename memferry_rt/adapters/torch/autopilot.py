"""``plan="auto"``: a plan made of what the first step shows, tried against the default, kept if it is faster."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from memferry_allocator import MemFerryError

from ...errors import PlanError
from ...plan.acceptance import Acceptance
from ...plan.choice import Choice, LayerChoice, torch_nbytes
from ...plan.machine import H200, machine_from_profile
from ...plan.model import Workload
from ...plan.modes import StateMode
from ...plan.options import PlanOptions
from ...plan.plan import Plan
from ...plan.planner import DEFAULT_ARM, make_plan
from ...plan.profile import LayerKind, Profile
from ...plan.profiled import workload_from_profile
from ...plan.recognise import recognise
from ...plan.shapes import Batch
from ...stalls import IterationTimes
from .profiling.store import find_profile

if TYPE_CHECKING:
    from .runtime import Runtime

HOST_KINDS = frozenset({LayerKind.EMBEDDING, LayerKind.LINEAR, LayerKind.BLOCK, LayerKind.HEAD})


class Timed(Protocol):
    """What knows how long iterations take."""

    @property
    def last(self) -> IterationTimes: ...


class Autopilot:
    """Plans beside training, and changes plans between steps.  All but the planning is by the thread that steps.

    The first step is the default's; it shows the micro-batch, whether blocks recompute, and what torch needs.

    Parameters
    ----------
    runtime : Runtime

    Attributes
    ----------
    plan : Plan or None
        The one that was made.
    source : str
        What it was made from.
    reason : str
        Why there is none, or why it is not used; empty while there is nothing to say.
    acceptance : Acceptance or None
        The trial of the plan against the default; None where nothing is tried.
    measured : bool
        Whether plans are tried: not on the emulated device, whose times mean nothing.
    times : Timed
        Of the last iteration.
    recomputes : bool
        Whether a forward was seen in backward.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.plan: Plan | None = None
        self.source = ""
        self.reason = ""
        self.acceptance: Acceptance | None = None
        self.recomputes = False
        self.measured = runtime.memory.budget.device is not None
        self.times: Timed = runtime.stalls
        self._batch: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._taken_up = False
        self._hook: Any = None
        options = runtime.options
        if runtime.ranks is not None:
            self.reason = "ranks would have to change plans together: they train by default"
        elif options.accumulate > 1:
            self.reason = "steps of several backwards are not planned: they train by default"
        else:
            self._hook = runtime.model.register_forward_pre_hook(self._see, with_kwargs=True)

    def after_step(self) -> None:
        """A step is over: plan, take up what was planned, or go on with a trial."""
        if self.reason and self.acceptance is None:
            return
        if self._thread is None:
            self._begin()
        elif not self._taken_up:
            if not self._thread.is_alive():
                self._take_up()
        elif self.acceptance is not None:
            self.acceptance.learn(self.times.last.total)
            self._use(self.acceptance.planned)

    def wait(self) -> None:
        """Block until the planning is over; the next step takes the plan up."""
        if self._thread is not None:
            self._thread.join()

    def stop(self, reason: str) -> None:
        """Change nothing any more."""
        self._unhook()
        self.wait()
        self.acceptance, self.reason = None, reason

    # -- what the first step shows -------------------------------------------------------------------------
    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.dim() == 2 and not x.is_floating_point():
                self._batch = (x.shape[0], x.shape[1])
                return

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _begin(self) -> None:
        self._unhook()
        if self._batch is None:
            self.reason = "no micro-batch of tokens was seen: there is no default plan for such inputs"
            return
        workload, profile = self._workload(*self._batch)
        if workload is None:
            self.reason = (
                "formulas do not know this kind of model, and it was not profiled with this micro-batch on this "
                "device: it trains by default; memferry profile, or profile_model, lets it be planned"
            )
            return
        self.source = "formulas" if profile is None else "a profile"
        arguments = workload, self._options(workload), profile
        self._thread = threading.Thread(target=self._make, args=arguments, name="memferry-plan", daemon=True)
        self._thread.start()

    def _workload(self, micro_batch: int, sequence: int) -> tuple[Workload | None, Profile | None]:
        runtime = self._runtime
        ability = runtime.planning.ability
        shapes = {
            layer.name: tuple(tuple(parameter.shape) for parameter in layer.parameters) for layer in runtime.layers
        }
        profile = find_profile(
            runtime.driver.device_info(runtime.device).name,
            ability.dtype,
            micro_batch * sequence,
            shapes,
            emulated=ability.device is None,
        )
        if profile is not None:
            profile = replace(profile, checkpointing=self.recomputes, torch_nbytes=self._reserved())
            return workload_from_profile(profile, "this model"), profile
        try:
            batch = Batch(micro_batch, sequence, ability.dtype, recompute=self.recomputes)
        except PlanError:
            return None, None
        found = recognise(shapes, batch)
        return None if found is None else replace(found, measured_nbytes=self._reserved()), None

    def _reserved(self) -> int | None:
        """What torch has reserved in the first step, where it computes on the device."""
        device = self._runtime.memory.budget.device
        return None if device is None else torch.cuda.max_memory_reserved(device)

    def _options(self, workload: Workload) -> PlanOptions:
        """What the runtime can do, within what its user allows."""
        runtime, options = self._runtime, self._runtime.options
        nbytes = options.device_memory
        if runtime.memory.budget.device is None:  # where the pool alone counts
            usual = Choice(tuple(LayerChoice(recompute=bool(layer.recompute)) for layer in workload.layers))
            nbytes += torch_nbytes(workload, usual)
        shares = runtime.planning.ability.updates and options.optimizer_split == "auto"
        return PlanOptions(
            nbytes,
            host_memory=options.host_memory,
            numerics=options.numerics,
            early=runtime.spares > 0,
            spares=runtime.spares,
            state_modes=frozenset(StateMode) if shares else frozenset({StateMode.CPU}),
            host_kinds=HOST_KINDS,
            overlap=options.async_step,
        )

    # -- planning, by a thread of its own ------------------------------------------------------------------
    def _make(self, workload: Workload, options: PlanOptions, profile: Profile | None) -> None:
        machine = H200 if profile is None else machine_from_profile(profile)
        name = self._runtime.driver.device_info(self._runtime.device).name
        try:
            self.plan = make_plan(workload, options, replace(machine, name=name), profile).plan
        except BaseException as error:  # the thread that trains is told
            self._failure = error

    # -- between steps -------------------------------------------------------------------------------------
    def _take_up(self) -> None:
        self._taken_up = True
        if isinstance(self._failure, MemFerryError):
            self.reason = f"there is no plan: {self._failure}"
            return
        if self._failure is not None:
            raise self._failure
        assert self.plan is not None
        if self.measured:
            self.acceptance = Acceptance()
            self._use(planned=True)
        elif self.plan.seconds < self.plan.arms.get(DEFAULT_ARM, float("inf")):
            self._use(planned=True)
        else:
            self.reason = "the default is predicted to be as fast"

    def _use(self, planned: bool) -> None:
        """Let the next step be by the plan or by default, if it is not already."""
        runtime, plan = self._runtime, self.plan if planned else None
        if plan is runtime.plan:
            return
        try:
            runtime.plans.to(plan, f"auto, from {self.source}" if planned else "default")
        except (
            Exception
        ) as error:  # this step is made already; it is told, and training goes on by what is in force
            self.acceptance = None
            self.reason = f"plans are exchanged no more: {type(error).__name__}: {error}"
            if runtime.plans.failure:
                raise
