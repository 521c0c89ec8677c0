"""The runtime of one offloaded model: what happens before, during and after a step."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from memferry_allocator import (
    Direction,
    Driver,
    HostArena,
    Mode,
    Place,
    ShadowSpace,
    Stream,
)
from memferry_transport import TransferEngine

from ...cache import LayerCache
from ...errors import OffloadError, UnsupportedError
from ...layout import LayerLayout
from ...native import AdamSettings
from ...options import OffloadOptions
from ...staging import StagingRing
from ...trace import AccessTrace
from ...updates import UpdateQueue
from .budget import Budget
from .convert import Materialiser, move_in
from .cut import Cut, find_owners
from .forward import ForwardScopes, scope_of
from .gradients import GradientFlow, GradientSlot
from .guards import ModelGuards
from .layer import DeviceViews, Geometry, LayerState, ViewKey
from .native_adam import trusted_kernel
from .optimizer import AmpScaling, OptimizerPatch
from .saved import SavedWeights
from .slabs import SlabAccess
from .state import ParameterState
from .tensors import TensorFactory
from .torch_adam import single_threaded
from .update import LayerUpdate


@dataclass(frozen=True)
class Report:
    """What is where, in bytes, and what has happened."""

    device: str
    device_name: str
    layers: int
    parameters: int
    weight_nbytes: int
    host_nbytes: int
    device_memory: int
    pool_nbytes: int
    ring_nbytes: int
    device_peak: int
    host_to_device_nbytes: int
    device_to_host_nbytes: int
    steps: int
    skipped_steps: int
    grad_norm: float | None


class Runtime:
    """Drives one offloaded model and its optimizer.  Made by `memferry_rt.offload`.

    Attributes
    ----------
    grad_norm : float or None
        The 2-norm of all gradients in the last step, before clipping: fp64 2-norms of the parameters'
        gradients, their squares added in the order of ``model.parameters()``.
    skipped_steps : int
        Steps not made because the norm was infinite or not a number.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        options: OffloadOptions,
        driver: Driver,
        device: int,
        cuts: list[Cut],
        layouts: list[LayerLayout],
        geometries: list[list[Geometry]],
        budget: Budget,
        materialiser: Materialiser,
    ) -> None:
        self.model = model
        self.options = options
        self.driver = driver
        self.device = device
        self.budget = budget
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.steps = 0
        self._closed = False
        self.factory = TensorFactory(driver, device)
        self._streams: dict[int, Stream] = {}
        self._own_stream = driver.create_stream(device) if self.factory.emulated else None
        self.arena = HostArena(driver, sum(layout.host_nbytes for layout in layouts))
        self.layers = move_in(cuts, layouts, geometries, self.arena, self.factory, materialiser)
        materialiser.materialise_buffers()
        self._home = {
            parameter: (layer, index) for layer in self.layers for index, parameter in enumerate(layer.parameters)
        }
        for owner in model.modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[key] = buffer.to(self.factory.torch_device)
        self._build_memory()
        self._build_training(model, optimizer)

    # -- set-up -----------------------------------------------------------------------------------------
    def _build_memory(self) -> None:
        driver, device = self.driver, self.device
        self.engine = TransferEngine(driver, device)
        self.space = ShadowSpace(driver, device, device_budget=self.budget.pool, copier=self.engine)
        self.weights = self.space.buffer("weights", [layer.weight_span for layer in self.layers])
        for layer, partition in zip(self.layers, self.weights, strict=True):
            partition.name = layer.name
        self.trace = AccessTrace(len(self.layers))
        threads = torch.get_num_threads()
        self.updates = UpdateQueue(start=single_threaded)
        torch.set_num_threads(threads)
        self.cache = LayerCache(
            self.weights, self.trace, ready=self.updates.poll, held=lambda layer: self.layers[layer].held()
        )

    def _build_training(self, model: nn.Module, optimizer: Optimizer) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        trainable = [parameter for parameter in names if parameter.requires_grad]
        self.gradients = GradientFlow(
            self.driver,
            self.engine,
            stream=self.stream,
            settle=self._settle_layer,
            ring_tensor=self.factory.device,
        )
        for parameter in trainable:
            self.gradients.attach(names[parameter], parameter, *self._home[parameter])
        self._new_ring()
        self.saved = SavedWeights(self._bring_back)
        self.scopes = ForwardScopes(
            load=self._load,
            unpin=self._unpin,
            settle=self._settle_layer,
            changed=self._adopt_weight,
            saved=self.saved,
        )
        self.guards = ModelGuards(self.synchronize, self._loaded)
        self.scopes.attach_root(model)
        for owner in find_owners(model):
            attach = self.scopes.attach_in_place if owner.in_place else self.scopes.attach
            attach(owner.module, scope_of(owner.parameters, self._home))
        for module in model.modules():
            self.guards.attach(module)
        self.guards.attach_root(model)
        self.patch = OptimizerPatch(optimizer, self._home, step=self.step, settle=self.synchronize)
        self.slabs = SlabAccess(
            model, self.layers, self._home, self.weights, self.driver, step_of=self.patch.step_of
        )
        self._build_updates()

    def _build_updates(self) -> None:
        group_of, kernel = self.patch.group_of(), trusted_kernel()
        self._updates: dict[LayerState, LayerUpdate] = {}
        for layer in self.layers:
            groups = {
                index: group_of[parameter]
                for index, parameter in enumerate(layer.parameters)
                if layer.layout.slots[index].spec.updated
            }
            if groups:
                self._updates[layer] = LayerUpdate(layer, groups, kernel)

    def _new_ring(self) -> None:
        self.ring = StagingRing(self.space.pool, self.budget.ring, self.stream()) if self.budget.ring else None
        self.gradients.use_ring(self.ring)

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
    def _load(self, layer: LayerState) -> DeviceViews:
        views = self._use(layer, training=torch.is_grad_enabled())
        self.cache.pin(layer.index)
        return views

    def _unpin(self, layer: LayerState) -> None:
        self.cache.unpin(layer.index)

    def _bring_back(self, layer: LayerState, key: ViewKey) -> torch.Tensor:
        return self._use(layer, training=True).saved(key)

    def _use(self, layer: LayerState, *, training: bool) -> DeviceViews:
        self._settle_layer(layer)
        ptr = self.cache.use(layer.index, self.stream(), training=training)
        views = layer.current = layer.views_at(ptr)
        self.saved.watch(views.key, layer)
        return views

    # -- step -------------------------------------------------------------------------------------------
    def step(self) -> None:
        """One optimizer step on the gradients that are there now.

        Nothing live changes before it: not weights, not moments.  With ``async_step`` it returns while
        layers are still being updated; a forward waits for each layer as it comes to it.
        """
        self._require_open()
        self.synchronize()
        self.scopes.reset()
        self._check_parameters()
        scaling = self.patch.amp_scaling()
        present = self.gradients.collect(changed_unseen=scaling is not None and scaling.inverse is None)
        self._refuse_unknown_gradients()
        self.gradients.end_use()
        self.stream().record().synchronize()
        scale = self._scale(present, scaling)
        if scale is None:
            self.skipped_steps += 1
        else:
            self._submit(present, scale)
        self.trace.end_iteration()
        self.steps += 1
        self.patch.tell(grad_norm=self.grad_norm, skipped_steps=self.skipped_steps)
        if not self.options.async_step:
            self._finish_updates()
        self._adapt_pool()

    def _scale(self, present: list[GradientSlot], scaling: AmpScaling | None) -> float | None:
        """The factor that unscales the gradients and clips them; None if the step must be skipped."""
        norms = [slot.norm for slot in present if slot.norm is not None]
        total = 0.0
        for norm in torch.stack(norms).tolist() if norms else ():
            total += norm * norm
        unscale = 1.0 if scaling is None or scaling.inverse is None else scaling.inverse
        self.grad_norm = math.sqrt(total) * unscale if total >= 0 else math.nan
        if not math.isfinite(self.grad_norm) or (scaling is not None and not scaling.finite):
            return None
        if self.options.max_grad_norm is None:
            return unscale
        return unscale * min(1.0, self.options.max_grad_norm / (self.grad_norm + 1e-6))

    def _submit(self, present: list[GradientSlot], scale: float) -> None:
        """Queue the update of every layer that has gradients, with everything it depends on captured now."""
        settings = self.patch.settings()
        indices: dict[LayerState, set[int]] = {}
        for slot in present:
            if slot.layer.layout.slots[slot.index].spec.updated:
                indices.setdefault(slot.layer, set()).add(slot.index)
        updated = [layer for layer in self.layers if layer in indices]
        self._release_weights(updated)
        for layer in updated:
            steps = {index: self.patch.count(layer.parameters[index]) for index in indices[layer]}
            layer.touch(indices[layer])
            self._submit_layer(layer, indices[layer], settings, steps, scale)

    def _submit_layer(
        self,
        layer: LayerState,
        indices: set[int],
        settings: list[AdamSettings],
        steps: dict[int, torch.Tensor],
        scale: float,
    ) -> None:
        weights = self.weights[layer.index].acquire(Place.HOST, Mode.READ_WRITE)
        try:
            state = self.driver.host_access(
                reads=[layer.gradient_span],
                writes=[layer.state_span] if layer.state_span.nbytes else [],
                label=f"update of {layer.name}",
            )
        except BaseException:
            weights.release()
            raise

        def end() -> None:
            state.end()
            weights.release()

        pieces = self._updates[layer].pieces(indices, settings, steps, scale)
        self.updates.submit(layer.index, pieces, end)

    def _release_weights(self, layers: list[LayerState]) -> None:
        """Give up the device copies of layers whose weights are about to change."""
        if any(layer.held() for layer in layers):
            gc.collect()  # a traceback or a cycle may be all that holds them
        for layer in layers:
            if layer.held():
                raise OffloadError(
                    f"a tensor still aliases the device copy of layer {layer.name!r}, whose weights are "
                    "about to change; delete it, or clone() what you keep of a weight"
                )
        for layer in layers:
            self.cache.evict(layer.index)

    def _finish_updates(self) -> None:
        """Wait for the updates in forward order, and start loading each layer as soon as it is new."""
        for layer in self.layers:
            self.updates.wait(layer.index)
            self.cache.load_early(layer.index)

    def _settle_layer(self, layer: LayerState) -> None:
        self.updates.wait(layer.index)

    def synchronize(self) -> None:
        """Block until every update under way is done: parameters, gradients and state may then be read."""
        self.updates.wait_all()

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
        if write:
            self.stream().synchronize()
            self._release_weights(self.layers)
        with self.slabs.open(write=write) as states:
            yield states

    # -- changes by the user ------------------------------------------------------------------------------
    def _check_parameters(self) -> None:
        for layer in self.layers:
            for index, parameter in enumerate(layer.parameters):
                if parameter._version != layer.parameter_versions[index]:
                    self._adopt_weight(layer, index)

    def _loaded(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            self._adopt_weight(*self._home[parameter])

    @torch.no_grad()
    def _adopt_weight(self, layer: LayerState, index: int) -> None:
        """A parameter was written to in place: the host pages have the new weight, other copies get it."""
        self._settle_layer(layer)
        self.stream().synchronize()
        layer.parameter_versions[index] = layer.parameters[index]._version
        if not self.cache.is_pinned(layer.index):
            self.cache.evict(layer.index)
        elif layer.current is not None:
            layer.current.parameters[index].copy_(layer.host_weights[index])
        spec = layer.layout.slots[index].spec
        if spec.updated and spec.master:
            layer.cpu_state(index, "master").copy_(layer.cpu_weight(index))

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
        larger = self.budget.after_first_step()
        if larger is None:
            return
        self.synchronize()
        if any(layer.held() for layer in self.layers):
            return
        self.driver.synchronize(self.device)
        self._drop_device_copies()
        self.budget = larger
        self.space.resize(larger.pool)
        self.budget.apply()
        self._new_ring()
        for layer in self.layers:
            if not self.cache.load_early(layer.index):
                break

    def _drop_device_copies(self) -> None:
        for layer in self.layers:
            self.cache.evict(layer.index)
            layer.forget_places()
        self.saved.forget()
        self.gradients.use_ring(None)
        if self.ring is not None:
            self.ring.close(self.stream())
            self.ring = None

    # -- end --------------------------------------------------------------------------------------------
    def report(self) -> Report:
        """What is where now."""
        moved = self.engine.bytes_moved
        return Report(
            device=f"{self.driver.name}:{self.device}",
            device_name=self.driver.device_info(self.device).name,
            layers=len(self.layers),
            parameters=sum(parameter.numel() for parameter in self._home),
            weight_nbytes=self.weights.nbytes,
            host_nbytes=self.arena.nbytes,
            device_memory=self.options.device_memory,
            pool_nbytes=self.budget.pool,
            ring_nbytes=self.budget.ring,
            device_peak=self.budget.peak(self.space.pool.peak),
            host_to_device_nbytes=moved[Direction.HOST_TO_DEVICE],
            device_to_host_nbytes=moved[Direction.DEVICE_TO_HOST],
            steps=self.steps,
            skipped_steps=self.skipped_steps,
            grad_norm=self.grad_norm,
        )

    def smallest_device_memory(self, torch_nbytes: int) -> int:
        """The smallest `device_memory` in bytes that would leave torch `torch_nbytes` bytes from the start."""
        return self.budget.smallest_for(torch_nbytes)

    @torch.no_grad()
    def master_parameters(self) -> dict[str, torch.Tensor]:
        """The fp32 value of every parameter that is updated, by name: CPU views of the runtime's own state."""
        self.synchronize()
        self._check_parameters()
        return {
            layer.layout.slots[index].spec.name: layer.in_shape(index, layer.cpu_state(index, "master"))
            for layer in self.layers
            for index in range(len(layer.parameters))
            if layer.layout.slots[index].spec.updated
        }

    def _require_open(self) -> None:
        if self._closed:
            raise OffloadError("this model was restored; call memferry_rt.offload again")

    def close(self) -> None:
        """Give model and optimizer back as ordinary objects, and release host pinning and device memory.

        Every part is released even if another fails, for example after an error in a step; the first failure
        is raised at the end.  A second call does nothing.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as last_to_first:
            if self._own_stream is not None:
                last_to_first.callback(self._own_stream.close)
            last_to_first.callback(self.arena.close)
            last_to_first.callback(self.budget.release)
            last_to_first.callback(self.engine.close)
            last_to_first.callback(self.space.close)
            last_to_first.callback(self._drop_device_copies)
            last_to_first.callback(self.patch.restore)
            last_to_first.callback(self._hand_back)
            last_to_first.callback(self.guards.detach)
            last_to_first.callback(self.gradients.detach)
            last_to_first.callback(self.stream().synchronize)
            last_to_first.callback(self.gradients.end_use)
            last_to_first.callback(self.scopes.detach)
            last_to_first.callback(self.updates.close)
            last_to_first.callback(self.updates.wait_all)

    @torch.no_grad()
    def _hand_back(self) -> None:
        """Make the parameters tensors over their host pages, which live on as long as any of them does."""
        for parameter, (layer, index) in self._home.items():
            gradient, parameter.grad = parameter.grad, None
            parameter.data = layer.on_host("weight", index, self.arena)
            if gradient is not None:
                at_home = gradient is layer.gradients[index]
                parameter.grad = layer.on_host("gradient", index, self.arena) if at_home else gradient.to("cpu")
