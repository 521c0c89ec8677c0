"""Moving a model's weights into host slabs, a layer at a time."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from ...errors import UnsupportedError
from ...layout import LayerLayout, ParameterSpec, lay_out
from ...pages import SlabPages
from ...parallel import Part
from .cut import Cut
from .layer import Geometry, LayerState
from .tensors import DTYPES, TensorFactory

ParameterInit = Callable[[nn.Module], None]
OWN_MAPPING = 1 << 20  # bytes of a tensor that gets pages of its own


def plan_layouts(
    cuts: Sequence[Cut],
    updated: Mapping[nn.Parameter, tuple[str, ...]],
    compute_dtype: torch.dtype | None,
    gradient_dtype: torch.dtype | None = None,
) -> tuple[list[LayerLayout], list[list[Geometry]]]:
    """Where every parameter will lie.

    Parameters
    ----------
    updated : mapping of Parameter to tuple of str
        What the optimizer keeps for each element of the parameters that it updates.
    compute_dtype, gradient_dtype : torch.dtype or None
        Of weights, and of summed gradients; by default each parameter's own, and that of its weight.

    Raises
    ------
    UnsupportedError
        A trainable parameter of a dtype that cannot be updated, or one whose elements overlap.
    """
    layouts, geometries = [], []
    for cut in cuts:
        forms = [_geometry(name, parameter, compute_dtype, gradient_dtype) for name, parameter in cut.parameters]
        specs = [
            ParameterSpec(
                name=name,
                numel=parameter.numel(),
                itemsize=form.dtype.itemsize,
                trainable=parameter.requires_grad,
                updated=parameter.requires_grad and parameter in updated,
                master=form.dtype is not torch.float32,
                gradient_itemsize=form.gradient_dtype.itemsize,
                state=updated.get(parameter, ()),
            )
            for (name, parameter), form in zip(cut.parameters, forms, strict=True)
        ]
        layouts.append(lay_out(cut.name, specs))
        geometries.append(forms)
    return layouts, geometries


def _geometry(
    name: str, parameter: nn.Parameter, compute_dtype: torch.dtype | None, gradient_dtype: torch.dtype | None
) -> Geometry:
    dtype = parameter.dtype
    if compute_dtype is not None and dtype.is_floating_point:
        dtype = compute_dtype
    if parameter.requires_grad and dtype not in DTYPES.values():
        raise UnsupportedError(f"{name}: {dtype} cannot be trained; use float32, bfloat16 or float16")
    if parameter.is_contiguous() or not _is_dense(parameter):
        stride = torch.empty(parameter.shape, device="meta").stride()
    else:
        stride = parameter.stride()
    return Geometry(dtype, tuple(parameter.shape), tuple(stride), gradient_dtype or dtype)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def move_in(
    cuts: Sequence[Cut],
    layouts: Sequence[LayerLayout],
    geometries: Sequence[list[Geometry]],
    arena: SlabPages,
    factory: TensorFactory,
    materialiser: Materialiser,
    *,
    fill: Callable[[torch.Tensor], torch.Tensor | None],
    held: Callable[[LayerLayout], Sequence[Part] | None],
) -> list[LayerState]:
    """Copy the weights into the slabs and make the parameters views of them, a layer at a time.

    The fp32 master copy takes the value before it is rounded to the compute dtype.

    Parameters
    ----------
    fill : callable
        What to fill the place of a parameter with, given its own value; None where somebody else fills it.
    held : callable
        The elements of a layer whose state this host has; None for all.
    """
    states = []
    for index, (cut, layout, forms) in enumerate(zip(cuts, layouts, geometries, strict=True)):
        materialiser.materialise(parameter for _, parameter in cut.parameters)
        parameters = [parameter for _, parameter in cut.parameters]
        state = LayerState(index, layout, parameters, forms, arena, factory, held(layout))
        for position, parameter in enumerate(parameters):
            _move(state, position, parameter, fill=fill)
        states.append(state)
    return states


@torch.no_grad()
def _move(
    state: LayerState,
    position: int,
    parameter: nn.Parameter,
    *,
    fill: Callable[[torch.Tensor], torch.Tensor | None],
) -> None:
    source = fill(parameter.data)
    spec = state.layout.slots[position].spec
    if source is not None:
        if spec.updated and spec.master:
            state.put_state(position, "master", source)
        state.in_shape(position, state.cpu_weight(position)).copy_(source)
    parameter.grad = None
    parameter.data = state.host_weights[position]
    state.parameter_versions[position] = parameter._version


class Materialiser:
    """Gives modules on the ``meta`` device memory and values, as late as their layer needs them.

    Parameters
    ----------
    model : nn.Module
    init : callable, optional
        Initialises the parameters and buffers that a module itself owns; ``module.reset_parameters()`` by default.

    Raises
    ------
    UnsupportedError
        A module has something on ``meta`` and no way to initialise it.
    """

    def __init__(self, model: nn.Module, init: ParameterInit | None) -> None:
        self._init = init
        self._owners: dict[nn.Parameter, list[nn.Module]] = {}
        self._buffers_only: list[nn.Module] = []
        for name, module in model.named_modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if not any(tensor.is_meta for tensor in own):
                continue
            if init is None and not hasattr(module, "reset_parameters"):
                raise UnsupportedError(
                    f"{name or 'the model'} ({type(module).__name__}) is on the meta device and has no "
                    "reset_parameters(); pass param_init_fn"
                )
            parameters = list(module.parameters(recurse=False))
            for parameter in parameters:
                self._owners.setdefault(parameter, []).append(module)
            if not parameters:
                self._buffers_only.append(module)

    def materialise(self, parameters: Iterable[nn.Parameter]) -> None:
        """The modules that own these parameters, each once."""
        modules = [module for parameter in parameters for module in self._owners.get(parameter, ())]
        for module in dict.fromkeys(modules):
            self._fill(module)

    def materialise_buffers(self) -> None:
        """The modules that own nothing but buffers."""
        for module in self._buffers_only:
            self._fill(module)

    @torch.no_grad()
    def _fill(self, module: nn.Module) -> None:
        meta = [parameter for parameter in module.parameters(recurse=False) if parameter.is_meta]
        for parameter in meta:
            fresh = nn.Parameter(_memory_like(parameter), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, fresh)  # the optimizer's parameter stays the same object
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device="cpu")
                meta.append(buffer)  # type: ignore[arg-type]
        if not meta:
            return
        if self._init is not None:
            self._init(module)
        else:
            module.reset_parameters()  # type: ignore[operator]


def _memory_like(parameter: torch.Tensor) -> torch.Tensor:
    """Memory on the CPU for a parameter's first values, which goes back to the system with the tensor.

    That of the C library's allocator stays with the process: what is freed there is seldom large enough, with its
    alignment, for the next tensor of the same size.
    """
    nbytes = parameter.numel() * parameter.element_size()
    if nbytes < OWN_MAPPING or not parameter.is_contiguous():
        return torch.empty_like(parameter, device="cpu")
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=parameter.dtype).view(parameter.shape)
