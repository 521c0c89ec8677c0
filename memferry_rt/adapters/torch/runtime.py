"""The runtime of one offloaded model: what happens before, during and after a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from memferry_allocator import DeviceLostError, Driver, HostArena, Stream

from ...device_update import DeviceUpdate
from ...errors import OffloadError
from ...helpers import NO_HELP, Help
from ...options import OffloadOptions
from ...pages import SlabPages
from ...plan.plan import Plan
from ...stalls import StallMeter
from .autopilot import Autopilot
from .budget import Budget
from .closing import close
from .convert import Materialiser, move_in
from .cut import find_owners
from .dispatch import Dispatch
from .early import cut_spares, host_nbytes
from .exactness import Exactness
from .forward import ForwardScopes, scope_of
from .gradient_scale import gradient_scale
from .gradient_slot import GradientSlot
from .guards import ModelGuards
from .helping import require_arrived
from .layer import Geometry, LayerState
from .loading import Loading
from .memory import DeviceMemory
from .modes import GivenPlan, LayerPlan
from .parallel import Ranks, WholeState, agree_on_step, refused_by_all
from .plan_change import InForce, PlanChange, source_of
from .planning import Planning
from .report import Report
from .reporting import report_of
from .rules import UpdateRule
from .saved import SavedWeights
from .set_up import early_updates, gradient_flow, step_updates, update_queue
from .slabs import SlabAccess
from .state import ParameterState
from .tensors import TensorFactory
from .writes import UserWrites


class Runtime:
    """Drives one offloaded model and its optimizer.  Made by `memferry_rt.offload`.

    Attributes
    ----------
    grad_norm : float or None
        The 2-norm of all gradients in the last step, before clipping: fp64 2-norms of the pieces of the
        parameters' gradients (`norm`), their squares added in the order of ``model.parameters()``.
    skipped_steps : int
        Steps not made because the norm was infinite or not a number.
    """

    def __init__(
        self,
        model: nn.Module,
        options: OffloadOptions,
        driver: Driver,
        device: int,
        planning: Planning,
        geometries: list[list[Geometry]],
        plans: list[LayerPlan],
        budget: Budget,
        materialiser: Materialiser,
        rule: UpdateRule,
        update: DeviceUpdate | None,
        spares: int,
        ranks: Ranks | None = None,
        plan: GivenPlan | None = None,
        auto: bool = False,
        help: Help = NO_HELP,
    ) -> None:
        self.model = model
        self.options = options
        self.driver = driver
        self.device = device
        self.help = help
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.steps = 0
        self.spares = spares
        self._closed = False
        self.planning = planning
        given = plan if isinstance(plan, Plan) else None
        self.plans = PlanChange(self, InForce(plans, budget, given, source_of(plan)))
        layouts = planning.layouts
        self.loading = Loading(self)
        self.writes = UserWrites(self)
        self.stalls = StallMeter(driver, device)
        self.factory = TensorFactory(driver, device)
        self._streams: dict[int, Stream] = {}
        self.own_stream = driver.create_stream(device) if self.factory.emulated else None
        self.ranks = ranks
        self.arena: SlabPages
        if ranks is None:
            self.arena = HostArena(driver, host_nbytes(layouts, spares))
        else:
            ranks.open(driver, layouts, host_nbytes(layouts, spares))
            self.arena = ranks.arena
        self.layers = move_in(
            planning.cuts,
            layouts,
            geometries,
            self.arena,
            self.factory,
            materialiser,
            fill=(lambda own: own) if ranks is None else ranks.first_value,
            held=(lambda _: None) if ranks is None else ranks.held,
        )
        for layer, each in zip(self.layers, plans, strict=True):
            layer.plan = each
        materialiser.materialise_buffers()
        self.home = {
            parameter: (layer, index) for layer in self.layers for index, parameter in enumerate(layer.parameters)
        }
        for owner in model.modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[key] = buffer.to(self.factory.torch_device)
        if ranks is not None:
            ranks.fence("the first weights")  # resident layers are loaded before this returns
        self.updates = update_queue(self, rule, feeder=update is not None or spares > 0)
        self.memory = DeviceMemory(
            driver,
            device,
            self.layers,
            budget,
            self.factory,
            help=help,
            stream=self.stream,
            ready=self.updates.poll,
            settle=self.updates.wait,
            moved=self._state_moved,
            wait=self.stalls.wait,
            update=update,
            read=self.loading.read_panels,
            ahead=self.loading.open_ahead,
        )
        self._build_training(model, rule)
        self.step_updates = step_updates(self, rule, update)
        if spares:
            self.step_updates.early = early_updates(self, rule, cut_spares(self.arena, layouts, spares))
        self.memory.open()
        self.use_rings()
        self.autopilot = Autopilot(self) if auto else None
        if ranks is not None:
            ranks.fence("offload()")  # what one fails in here, all do

    # -- set-up -----------------------------------------------------------------------------------------
    def _build_training(self, model: nn.Module, rule: UpdateRule) -> None:
        self.gradients = gradient_flow(self, settle=self._gradients_change, arrived=self._gradient_arrived)
        self.saved = SavedWeights(self.loading.bring_back)
        self.scopes = ForwardScopes(
            load=self.loading.load,
            unpin=self.loading.unpin,
            settle=self.loading.settle_in_place,
            changed=self.writes.changed,
            saved=self.saved,
        )
        self.guards = ModelGuards(self.synchronize, self.writes.loaded)
        self.scopes.attach_root(model, self.gradients.forward_begins)
        for owner in find_owners(model):
            attach = self.scopes.attach_in_place if owner.in_place else self.scopes.attach
            attach(owner.module, scope_of(owner.module, owner.parameters, self.home))
        exactness = Exactness(self.driver, self.factory, relaxed=self.options.numerics == "relaxed")
        self.dispatch = Dispatch(self.planning.operators, self.home, self.gradients, self.memory.panels, exactness)
        self.dispatch.apply()
        for module in model.modules():
            self.guards.attach(module)
        self.guards.attach_root(model)
        step = self.step if self.ranks is None else self.ranks.told()(self.step)
        self.patch = rule.patch(self.home, step=step, settle=self.synchronize)
        self.whole = None
        if self.ranks is not None and self.ranks.several_hosts:
            self.whole = WholeState(self.ranks, self.layers, self.gradients.require_ended)
            self.patch.show_whole(self.whole.begin, self.whole.whole)
        self.slabs = SlabAccess(
            model,
            self.layers,
            self.home,
            self.memory.weights,
            self.driver,
            stream=self.stream,
            state_of=self.patch.open_state,
        )

    # -- streams ----------------------------------------------------------------------------------------
    def stream(self) -> Stream:
        """The stream on which kernels of the calling thread run now."""
        if self.own_stream is not None:
            return self.own_stream
        handle = torch.cuda.current_stream(self.device).cuda_stream
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = self.driver.stream_from_handle(self.device, handle)
        return stream

    # -- step -------------------------------------------------------------------------------------------
    def step(self) -> None:
        """One optimizer step on the gradients that are there now.

        Nothing live changes before it: not weights, not moments.  With ``async_step`` it returns while
        layers are still being updated; a forward waits for each layer as it comes to it.
        """
        self.require_open()
        self.updates.wait_all()
        self.scopes.reset()
        self.writes.check()
        self.patch.adopt_replaced()
        scaling = self.patch.amp_scaling()
        unseen = scaling is not None and scaling.inverse is None
        present = self.gradients.collect(changed_unseen=unseen)
        if unseen or not self.patch.scaler_tells:
            self.step_updates.forget_early()
        self.writes.refuse_unknown_gradients()
        self.gradients.end_use()
        self.gradients.deliver(present, changed_unseen=unseen)
        self.stalls.iteration(self.stream())
        require_arrived(self)
        if self.ranks is not None:
            scaling = agree_on_step(self.ranks.gather, scaling, self.patch.settings())
        scale = gradient_scale(present, scaling, self.options.max_grad_norm)
        self.grad_norm = scale.norm
        if scale.factor is None:
            self.skipped_steps += 1
            self.step_updates.skip()
        else:
            self.step_updates.submit(present, scale.factor)
        self.memory.trace.end_iteration()
        self.memory.panels.end_iteration()
        self.stalls.submitted(self.stream())
        self.loading.end_iteration()
        self.steps += 1
        self.patch.tell(grad_norm=self.grad_norm, skipped_steps=self.skipped_steps)
        if not self.options.async_step:
            self._finish_updates()
        self._adapt_pool()
        if self.autopilot is not None:
            self.autopilot.after_step()

    def _finish_updates(self) -> None:
        """Wait for the updates in forward order, and start loading each layer as soon as it is new."""
        for layer in self.step_updates.streamed:  # to enqueue takes the lock that a wait for weights at home keeps
            self.updates.wait(layer.index)
        for layer in self.layers:
            self.settle_home(layer)
            self.step_updates.settle(layer)
            self.memory.cache.load_early(layer.index)

    def _gradients_change(self, layer: LayerState) -> None:
        self.updates.wait(layer.index)
        if self.step_updates.may_still_read(layer):
            self.step_updates.settle(layer)
        if self.step_updates.early is not None:
            self.step_updates.early.changing(layer)

    def _gradient_arrived(self, slot: GradientSlot) -> None:
        if self.step_updates.early is not None:
            self.step_updates.early.arrived(slot)

    def settle_home(self, layer: LayerState) -> None:
        """Block until a layer's update is over and its host pages hold the newest weights."""
        self.updates.wait(layer.index)
        self.memory.bring_home(layer)

    def synchronize(self) -> None:
        """Block until every update under way is done: parameters, gradients and state may then be read."""
        self.updates.wait_all()
        for layer in self.layers:
            self.memory.bring_home(layer)
            self.step_updates.settle(layer)

    @contextlib.contextmanager
    def state_at_home(self, *, write: bool = False, save: bool = False) -> Iterator[list[ParameterState]]:
        """All training state as live CPU tensors, in the order of ``model.named_parameters()``.

        No update is under way while it is open.  With `write` every layer's device copy is given up first, and
        what was written is the state from then on; whoever writes a master writes its weight too.  With `save`
        what other hosts have may be read, too.

        Raises
        ------
        OffloadError
            The model was restored, or, with `write`, a tensor still aliases the device copy of a layer.
        """
        self.require_open()
        self.gradients.require_ended()
        self.synchronize()
        self.scopes.reset()
        self.writes.check()
        self.patch.adopt_replaced()
        if write:
            self.stream().synchronize()
            self.step_updates.forget_early()
            self.step_updates.release_weights(self.layers)
        asking = self.whole.asking("save()") if save and self.whole is not None else contextlib.nullcontext()
        whole = None if self.whole is None else self.whole.ask
        with self._all_ranks() if write else asking, self.slabs.open(write=write, whole=whole) as states:
            yield states

    def help_save(self) -> None:
        """Give the rank that saves what this host has of the state, if it is this rank that does so."""
        self.gradients.require_ended()
        if self.whole is not None and self.ranks is not None and self.ranks.leads:
            self.require_open()
            self.synchronize()
            with self.ranks.told():
                self.whole.serve("save()")

    def checked(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Of several ranks all refuse what one refuses in here."""
        self.gradients.require_ended()
        return contextlib.nullcontext() if self.ranks is None else refused_by_all(self.ranks.gather, what)

    @contextlib.contextmanager
    def _all_ranks(self) -> Iterator[None]:
        """Of several ranks every one is here, and none goes on before all have ended this."""
        if self.ranks is None:
            yield
            return
        with self.ranks.told():
            self.ranks.fence("their load()")
            yield
            self.ranks.fence("the end of their load()")

    # -- device memory ------------------------------------------------------------------------------------
    def _adapt_pool(self) -> None:
        """After the first step it is known what torch needs: the pool gets the rest of the budget."""
        if self.steps != 1:
            return
        larger = self.memory.budget.after_first_step()
        if larger is None:
            return
        self.synchronize()
        if not any(layer.held() for layer in self.layers):
            self.plans.grow(larger)

    def set_plan(self, plan: GivenPlan) -> None:
        """Change the modes of layers between two steps; see `memferry_rt.set_plan`."""
        self.require_open()
        self.plans.to(plan)
        if self.autopilot is not None:
            self.autopilot.stop("set_plan() has said otherwise")

    @property
    def plan(self) -> Plan | None:
        """The planner's plan that is in force, if it is one of those."""
        return self.plans.in_force.plan

    def rest(self) -> None:
        """No update is under way on return, and nobody else uses device copies: they may be dropped.

        Raises
        ------
        OffloadError
            A tensor aliases one of them.
        """
        self.synchronize()
        self.scopes.reset()
        self.step_updates.refuse_aliases(self.layers)
        self.step_updates.forget_early()
        self.gradients.end_use()

    def drain(self) -> None:
        """Wait for the device and its helpers: for copies, too, whose event a failure has kept from us."""
        self.driver.synchronize(self.device)
        for helper in self.help.helpers:
            with contextlib.suppress(DeviceLostError):  # its copies will never run
                self.driver.synchronize(helper)

    def drop_device_copies(self) -> None:
        """Bring everything home that is newer on the device, and give its memory back to the pool."""
        self.saved.forget()
        self.gradients.use()
        self.memory.drop()

    def use_rings(self) -> None:
        """Let gradients leave through the rings that the pool has now."""
        self.gradients.use(self.memory.ring, self.memory.outgoing, self.memory.moves)

    def _state_moved(self, layer: LayerState) -> None:
        self.gradients.move_home(layer)
        self.patch.repoint(layer)

    # -- end --------------------------------------------------------------------------------------------
    def report(self) -> Report:
        """What is where now."""
        return report_of(self)

    @property
    def saves(self) -> bool:
        """Whether it is this process that writes checkpoints: alone, or the first of several ranks."""
        return self.ranks is None or self.ranks.first

    def smallest_device_memory(self, torch_nbytes: int) -> int:
        """The smallest `device_memory` in bytes that would leave torch `torch_nbytes` bytes from the start."""
        return self.memory.budget.smallest_for(torch_nbytes)

    @torch.no_grad()
    def master_parameters(self) -> dict[str, torch.Tensor]:
        """The fp32 value of every parameter that is updated, by name, on the CPU: views of the
        runtime's own state, or copies where it lives on the device or on several hosts, whose ranks call it alike.
        """
        self.synchronize()
        self.writes.check()
        if self.whole is not None:
            self.whole.begin("master_parameters()")
        return {
            layer.layout.slots[index].spec.name: self._master(layer, index)
            for layer in self.layers
            for index in range(len(layer.parameters))
            if layer.layout.slots[index].spec.updated
        }

    def _master(self, layer: LayerState, index: int) -> torch.Tensor:
        if self.whole is not None and layer.layout.slots[index].spec.master:
            return self.whole.whole(layer, index, "master")
        return layer.in_shape(index, layer.state(index, "master").cpu())

    def require_open(self) -> None:
        if self._closed:
            raise OffloadError("this model was restored; call memferry_rt.offload again")
        if self.plans.failure:
            raise OffloadError(f"{self.plans.failure}; call memferry_rt.restore(model)")

    def close(self) -> None:
        """Give model and optimizer back as ordinary objects, and release host pinning and device memory.

        Every part is released even if another fails, for example after an error in a step; the first failure
        is raised at the end.  A second call does nothing.
        """
        if not self._closed:
            self._closed = True
            close(self)
