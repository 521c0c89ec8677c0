"""The runtime of one offloaded model: what happens before, during and after a step."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from memferry_allocator import Driver, HostArena, Stream, View

from ...device_update import DeviceUpdate
from ...errors import OffloadError, UnsupportedError
from ...options import OffloadOptions
from ...pages import SlabPages
from ...plan.modes import WeightMode
from ...plan.plan import Plan
from ...stalls import StallMeter
from ...updates import UpdateQueue
from .adam_state import AdamPatch
from .autopilot import Autopilot
from .budget import Budget
from .convert import Materialiser, move_in
from .cut import find_owners
from .dispatch import Dispatch
from .early import EarlyUpdates, SpareSlab, cut_spares, host_nbytes
from .exactness import Exactness
from .forward import ForwardScopes, scope_of
from .gradient_slot import GradientSlot
from .gradients import GradientFlow
from .guards import ModelGuards
from .layer import DeviceViews, Geometry, LayerState, ViewKey
from .memory import DeviceMemory
from .modes import GivenPlan, LayerPlan
from .parallel import RankGradients, Ranks, RankUpdates
from .plan_change import InForce, PlanChange, source_of
from .planning import Planning
from .report import Report
from .reporting import report_of
from .rules import AdamRule, UpdateRule
from .saved import SavedWeights, in_backward
from .slabs import SlabAccess
from .state import ParameterState
from .step import StepUpdates, gradient_scale
from .support import Support
from .tensors import TensorFactory
from .torch_adam import single_threaded
from .update import AdamUpdate, LayerUpdate


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
    ) -> None:
        self.model = model
        self.options = options
        self.driver = driver
        self.device = device
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.steps = 0
        self.spares = spares
        self._closed = False
        self.planning = planning
        given = plan if isinstance(plan, Plan) else None
        self.plans = PlanChange(self, InForce(plans, budget, given, source_of(plan)))
        layouts = planning.layouts
        self._last_used: LayerState | None = None
        self.stalls = StallMeter(driver, device)
        self.factory = TensorFactory(driver, device)
        self._streams: dict[int, Stream] = {}
        self._own_stream = driver.create_stream(device) if self.factory.emulated else None
        self.ranks = ranks
        self.arena: SlabPages
        if ranks is None:
            self.arena = HostArena(driver, host_nbytes(layouts, spares))
        else:
            ranks.open(driver, layouts, host_nbytes(layouts, spares))
            self.arena = ranks.arena
        fill = ranks is None or ranks.first
        self.layers = move_in(
            planning.cuts, layouts, geometries, self.arena, self.factory, materialiser, fill=fill
        )
        for layer, each in zip(self.layers, plans, strict=True):
            layer.plan = each
        materialiser.materialise_buffers()
        self._home = {
            parameter: (layer, index) for layer in self.layers for index, parameter in enumerate(layer.parameters)
        }
        for owner in model.modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[key] = buffer.to(self.factory.torch_device)
        threads = torch.get_num_threads()
        self._rule = rule
        queue: Callable[..., UpdateQueue] = (
            UpdateQueue
            if ranks is None
            else functools.partial(RankUpdates, ranks.board, cores=ranks.cores, emulated=self.factory.emulated)
        )
        self.updates = queue(
            start=single_threaded,
            native=rule.native,
            feeder=(update is not None or spares > 0) and not self.factory.emulated,
        )
        torch.set_num_threads(threads)
        self.memory = DeviceMemory(
            driver,
            device,
            self.layers,
            budget,
            self.factory,
            stream=self.stream,
            ready=self.updates.poll,
            settle=self.updates.wait,
            moved=self._state_moved,
            wait=self.stalls.wait,
            update=update,
            read=self._read_panels,
            ahead=self._open_ahead,
        )
        self._build_training(model)
        self._build_updates(update)
        if spares:
            self._update_early(cut_spares(self.arena, layouts, spares))
        self.memory.open()
        self.use_rings()
        self.autopilot = Autopilot(self) if auto else None
        if ranks is not None:
            ranks.fence("offload()")  # the first has filled what all share

    # -- set-up -----------------------------------------------------------------------------------------
    def _build_training(self, model: nn.Module) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        trainable = [parameter for parameter in names if parameter.requires_grad]
        flow: Callable[..., GradientFlow] = GradientFlow
        if self.ranks is not None:
            uses = self.memory.trace.first_uses
            flow = functools.partial(RankGradients, self.ranks, self.factory.torch_device, uses)
        self.gradients = flow(
            driver=self.driver,
            engine=self.memory.engine,
            stream=self.stream,
            settle=self._gradients_change,
            arrived=self._gradient_arrived,
            wait=self.stalls.wait,
            ring_tensor=self.factory.device,
            accumulate=self.options.accumulate,
        )
        for parameter in trainable:
            self.gradients.attach(names[parameter], parameter, *self._home[parameter])
        self.saved = SavedWeights(self._bring_back)
        self.scopes = ForwardScopes(
            load=self._load,
            unpin=self._unpin,
            settle=self._settle_home,
            changed=self._weight_changed,
            saved=self.saved,
        )
        self.guards = ModelGuards(self.synchronize, self._loaded)
        self.scopes.attach_root(model)
        for owner in find_owners(model):
            attach = self.scopes.attach_in_place if owner.in_place else self.scopes.attach
            attach(owner.module, scope_of(owner.module, owner.parameters, self._home))
        exactness = Exactness(self.driver, self.factory, relaxed=self.options.numerics == "relaxed")
        self.dispatch = Dispatch(
            self.planning.operators, self._home, self.gradients, self.memory.panels, exactness
        )
        self.dispatch.apply()
        for module in model.modules():
            self.guards.attach(module)
        self.guards.attach_root(model)
        step = self.step if self.ranks is None else self.ranks.told()(self.step)
        self.patch = self._rule.patch(self._home, step=step, settle=self.synchronize)
        self.slabs = SlabAccess(
            model,
            self.layers,
            self._home,
            self.memory.weights,
            self.driver,
            stream=self.stream,
            state_of=self.patch.open_state,
        )

    def _build_updates(self, update: DeviceUpdate | None) -> None:
        group_of = self.patch.group_of()
        plans: dict[LayerState, LayerUpdate] = {}
        for layer in self.layers:
            groups = {
                index: group_of[parameter]
                for index, parameter in enumerate(layer.parameters)
                if layer.layout.slots[index].spec.updated
            }
            if groups:
                parts = None if self.ranks is None else self.ranks.share.parts(layer.layout)
                plans[layer] = self._rule.plan(layer, groups, parts)
        split = self.options.optimizer_split
        self.step_updates = StepUpdates(
            self.driver,
            self.layers,
            plans,
            self.memory,
            self.patch,
            self.updates,
            update,
            split=split if isinstance(split, float) else None,
            stream=self.stream,
            shared=self.ranks is not None,
        )
        if isinstance(self.updates, RankUpdates):
            self.updates.streamed_until = lambda layer: self.step_updates.streamed_until(self.layers[layer])

    def _update_early(self, spares: list[SpareSlab]) -> None:
        """Make updates during backward, if that is what the native kernel of Adam does here."""
        if not isinstance(self._rule, AdamRule) or self._rule.kernel is None:
            return
        plans = {layer: plan for layer, plan in self.step_updates.plans.items() if isinstance(plan, AdamUpdate)}
        assert isinstance(self.patch, AdamPatch)
        self.step_updates.early = EarlyUpdates(
            self.driver,
            plans,
            self.patch,
            self.updates,
            self._rule.kernel,
            self.gradients.slots,
            spares,
            streamed_until=self.step_updates.streamed_until,
        )

    # -- streams ----------------------------------------------------------------------------------------
    def stream(self) -> Stream:
        """The stream on which kernels of the calling thread run now."""
        if self._own_stream is not None:
            return self._own_stream
        handle = torch.cuda.current_stream(self.device).cuda_stream
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = self.driver.stream_from_handle(self.device, handle)
        return stream

    # -- forward and backward ---------------------------------------------------------------------------
    def _load(self, layer: LayerState, support: Support) -> DeviceViews | None:
        """Bring a layer into device memory and pin it, or None where such a module reads it at home."""
        if self.plans.failure:
            self._require_open()
        training, backward = torch.is_grad_enabled(), in_backward()
        if backward and self.autopilot is not None:
            self.autopilot.recomputes = True
        if layer.plan.reads_at_home(support, backward=backward):
            self._read_at_home(layer, training=training, backward=backward)
            return None
        views = self._use(layer, training=training, backward=backward)
        self.memory.cache.pin(layer.index)
        return views

    def _unpin(self, layer: LayerState) -> None:
        self.memory.cache.unpin(layer.index)

    def _bring_back(self, layer: LayerState, key: ViewKey, at_home: bool) -> torch.Tensor:
        if not at_home or layer.plan.weight is WeightMode.DHA_THEN_LOAD:
            return self._use(layer, training=True, backward=True).saved(key)
        self._read_at_home(layer, training=True, backward=True)
        view = layer.saved_at_home(key)
        layer.traffic.read_in_place += view.numel() * view.element_size()
        return view

    def _use(self, layer: LayerState, *, training: bool, backward: bool) -> DeviceViews:
        stream = self.stream()
        with self._stalling(layer, stream, training=training):
            ptr = self.memory.cache.use(layer.index, stream, training=training, backward=backward)
        views = layer.current = layer.views_at(ptr)
        self.saved.watch(views.key, layer)
        return views

    def _read_at_home(self, layer: LayerState, *, training: bool, backward: bool) -> View:
        """Let the current stream read a layer's host pages, which have its newest weights then."""
        stream = self.stream()
        with self._stalling(layer, stream, training=training):
            view = self.memory.cache.read_in_place(layer.index, stream, training=training, backward=backward)
        self.saved.watch_home(layer)
        return view

    def _read_panels(self, layer: LayerState) -> View:
        return self._read_at_home(layer, training=torch.is_grad_enabled() or in_backward(), backward=in_backward())

    def _open_ahead(self, layer: LayerState) -> View | None:
        """The host pages of a layer that is not used yet, or None while they are being updated."""
        if not self.updates.poll(layer.index):
            return None
        return self.memory.cache.open_at_home(layer.index, self.stream())

    @contextlib.contextmanager
    def _stalling(self, layer: LayerState, stream: Stream, *, training: bool) -> Iterator[None]:
        """Wait until a layer's update is made or enqueued, and measure that and what `stream` waits for then."""
        begin = self.stalls.mark(stream) if training and layer is not self._last_used else None
        blocked = time.perf_counter()
        self._settle_layer(layer)
        blocked = time.perf_counter() - blocked
        yield
        if begin is not None:
            self._last_used = layer
            self.stalls.stalled(begin, stream, math.inf if self.step_updates.first_use(layer) else blocked)

    # -- step -------------------------------------------------------------------------------------------
    def step(self) -> None:
        """One optimizer step on the gradients that are there now.

        Nothing live changes before it: not weights, not moments.  With ``async_step`` it returns while
        layers are still being updated; a forward waits for each layer as it comes to it.
        """
        self._require_open()
        self.updates.wait_all()
        self.scopes.reset()
        self._check_parameters()
        self.patch.adopt_replaced()
        scaling = self.patch.amp_scaling()
        unseen = scaling is not None and scaling.inverse is None
        present = self.gradients.collect(changed_unseen=unseen)
        if unseen or not self.patch.scaler_tells:
            self.step_updates.forget_early()
        self._refuse_unknown_gradients()
        self.gradients.end_use()
        self.gradients.deliver(present, changed_unseen=unseen)
        self.stalls.iteration(self.stream())
        if self.ranks is not None:
            scaling = self.ranks.agree_on_step(scaling, self.patch.settings())
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
        self._last_used = None
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
            self._settle_home(layer)
            self.step_updates.settle(layer)
            self.memory.cache.load_early(layer.index)

    def _settle_layer(self, layer: LayerState) -> None:
        """Block until a layer's update is made or, on the device, enqueued: its weights may then be acquired."""
        self.gradients.in_backward()
        self.updates.wait(layer.index)

    def _gradients_change(self, layer: LayerState) -> None:
        self.updates.wait(layer.index)
        if self.step_updates.may_still_read(layer):
            self.step_updates.settle(layer)
        if self.step_updates.early is not None:
            self.step_updates.early.changing(layer)

    def _gradient_arrived(self, slot: GradientSlot) -> None:
        if self.step_updates.early is not None:
            self.step_updates.early.arrived(slot)

    def _settle_home(self, layer: LayerState) -> None:
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
    def state_at_home(self, *, write: bool = False) -> Iterator[list[ParameterState]]:
        """All training state as live CPU tensors, in the order of ``model.named_parameters()``.

        No update is under way while it is open.  With `write` every layer's device copy is given up first, and
        what was written is the state from then on; whoever writes a master writes its weight too.

        Raises
        ------
        OffloadError
            The model was restored, or, with `write`, a tensor still aliases the device copy of a layer.
        """
        self._require_open()
        self.synchronize()
        self.scopes.reset()
        self._check_parameters()
        self.patch.adopt_replaced()
        if write:
            self.stream().synchronize()
            self.step_updates.forget_early()
            self.step_updates.release_weights(self.layers)
        with self._all_ranks() if write else contextlib.nullcontext(), self.slabs.open(write=write) as states:
            yield states

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

    # -- changes by the user ------------------------------------------------------------------------------
    def _check_parameters(self) -> None:
        for layer in self.layers:
            for index, parameter in enumerate(layer.parameters):
                if parameter._version != layer.parameter_versions[index]:
                    self._weight_changed(layer, index)

    def _weight_changed(self, layer: LayerState, index: int) -> None:
        """A parameter was written to in place, not by a state dict that all ranks load."""
        if self.ranks is not None:
            self.ranks.refuse_write(layer.layout.slots[index].spec.name)
        self._adopt_weight(layer, index)

    def _loaded(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            self._adopt_weight(*self._home[parameter])

    @torch.no_grad()
    def _adopt_weight(self, layer: LayerState, index: int) -> None:
        """A parameter was written to in place: the host pages have the new weight, other copies get it."""
        self._settle_home(layer)
        self.step_updates.settle(layer)
        self.stream().synchronize()
        self.memory.panels.forget()
        layer.parameter_versions[index] = layer.parameters[index]._version
        if not self.memory.cache.is_pinned(layer.index):
            self.memory.cache.evict(layer.index)
        elif layer.current is not None:
            layer.current.parameters[index].copy_(layer.host_weights[index])
        spec = layer.layout.slots[index].spec
        if spec.updated and spec.master:
            layer.state(index, "master").copy_(layer.cpu_weight(index))

    def _refuse_unknown_gradients(self) -> None:
        for parameter, (layer, index) in self._home.items():
            if parameter.grad is not None and not layer.layout.slots[index].spec.trainable:
                name = layer.layout.slots[index].spec.name
                raise UnsupportedError(
                    f"{name} has a gradient but was frozen when the model was offloaded; "
                    "set requires_grad before offload()"
                )

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
        self._require_open()
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
        runtime's own state, or copies where it lives on the device."""
        self.synchronize()
        self._check_parameters()
        return {
            layer.layout.slots[index].spec.name: layer.in_shape(index, layer.state(index, "master").cpu())
            for layer in self.layers
            for index in range(len(layer.parameters))
            if layer.layout.slots[index].spec.updated
        }

    def _require_open(self) -> None:
        if self._closed:
            raise OffloadError("this model was restored; call memferry_rt.offload again")
        if self.plans.failure:
            raise OffloadError(f"{self.plans.failure}; call memferry_rt.restore(model)")

    def close(self) -> None:
        """Give model and optimizer back as ordinary objects, and release host pinning and device memory.

        Every part is released even if another fails, for example after an error in a step; the first failure
        is raised at the end.  A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self.autopilot is not None:
            self.autopilot.stop("the model was restored")
        with contextlib.ExitStack() as last_to_first:
            if self.ranks is not None:
                last_to_first.callback(self.ranks.close)
            if self._own_stream is not None:
                last_to_first.callback(self._own_stream.close)
            last_to_first.callback(self.arena.close)
            last_to_first.callback(self.memory.budget.release)
            last_to_first.callback(self.memory.engine.close)
            last_to_first.callback(self.memory.space.close)
            if self.ranks is not None:
                last_to_first.callback(self._own_state)
            last_to_first.callback(self.patch.restore)
            last_to_first.callback(self._hand_back)
            last_to_first.callback(self.drop_device_copies)
            last_to_first.callback(self.guards.detach)
            last_to_first.callback(self.gradients.detach)
            last_to_first.callback(self.dispatch.restore)
            last_to_first.callback(self.stream().synchronize)
            last_to_first.callback(self.gradients.end_use)
            last_to_first.callback(self.scopes.detach)
            last_to_first.callback(self.updates.close)
            last_to_first.callback(self.step_updates.skip)
            last_to_first.callback(self.patch.adopt_replaced)
            last_to_first.callback(self.synchronize)

    @torch.no_grad()
    def _hand_back(self) -> None:
        """Make the parameters tensors over their host pages, which live on as long as any of them does."""
        for parameter, (layer, index) in self._home.items():
            gradient, parameter.grad = parameter.grad, None
            parameter.data = self._unshared(layer.on_host("weight", index, self.arena))
            if gradient is not None:
                at_home = gradient is layer.gradients[index]
                plain = layer.on_host("gradient", index, self.arena) if at_home else gradient.to("cpu")
                parameter.grad = self._unshared(plain).to(parameter.dtype)

    def _unshared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of this process alone, where other ranks have the tensor's too."""
        return tensor if self.ranks is None else tensor.clone()

    def _own_state(self) -> None:
        for state in self.patch.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = self._unshared(value)
