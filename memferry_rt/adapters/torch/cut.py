"""Cutting a model into layers: what is loaded, evicted and updated as one piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ...errors import UnsupportedError

SMALL_LAYER = 256 << 10
IN_PLACE = 1 << 20


@dataclass(frozen=True, eq=False)
class Cut:
    """One layer: its name and its parameters with theirs, each parameter in one layer only."""

    name: str
    parameters: tuple[tuple[str, nn.Parameter], ...]

    @property
    def nbytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for _, parameter in self.parameters)


def cut_layers(model: nn.Module, names: Sequence[str] | None = None) -> list[Cut]:
    """The layers of a model, in the order in which its modules are registered.

    The children of outermost ``ModuleList``s (and of ``Sequential``s at the top) are layers, the blocks of a
    transformer for example.  What is outside them makes a layer for every module that owns parameters; very
    small ones are merged with each other.  Parameters shared by several layers belong to the first.

    Parameters
    ----------
    names : sequence of str, optional
        Names of the modules that shall be layers, instead.

    Raises
    ------
    UnsupportedError
        A name is not a module's, or the model has no parameters.
    """
    if names is None:
        roots = list(_find_roots(model, ""))
    else:
        modules = dict(model.named_modules())
        unknown = [name for name in names if name not in modules]
        if unknown:
            raise UnsupportedError(f"layers: the model has no module {unknown[0]!r}")
        roots = [(name, modules[name]) for name in names]
    cuts = _assign(model, roots)
    if not cuts:
        raise UnsupportedError("the model has no parameters: there is nothing to offload")
    return _merge_small(cuts, {name for name, _ in roots}) if names is None else cuts


@dataclass(frozen=True, eq=False)
class Owner:
    """A module whose own forward reads parameters.

    Attributes
    ----------
    in_place : bool
        Whether it reads them in host memory: a container with a little of its own, which would otherwise keep
        device memory for as long as everything inside it runs.
    """

    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    in_place: bool


def find_owners(model: nn.Module) -> list[Owner]:
    """Every module of the model that reads parameters of its own, or of children that it never calls."""
    owners = []
    for module in model.modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        for child in module.children():
            if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
                own += list(child.parameters())
        if isinstance(module, nn.MultiheadAttention):
            own += list(module.out_proj.parameters())
        if own:
            unique = dict.fromkeys(own)
            nbytes = sum(parameter.numel() * parameter.element_size() for parameter in unique)
            container = any(parameter not in unique for parameter in module.parameters())
            owners.append(Owner(module, tuple(unique), in_place=container and nbytes <= IN_PLACE))
    return owners


def _find_roots(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList) and _holders(child) > 1:
            yield from ((f"{inner}.{key}", block) for key, block in child.named_children())
        else:
            yield from _find_roots(child, inner)


def _holders(module: nn.Module) -> int:
    return sum(any(True for _ in child.parameters()) for child in module.children())


def _assign(model: nn.Module, roots: Sequence[tuple[str, nn.Module]]) -> list[Cut]:
    """Every parameter to the first root that holds it, else to the module that owns it, in model order."""
    root_of: dict[int, str] = {}
    for name, root in roots:
        for module in root.modules():
            root_of.setdefault(id(module), name)
    members: dict[str, list[tuple[str, nn.Parameter]]] = {}
    taken: set[int] = set()
    for path, module in model.named_modules():
        layer = root_of.get(id(module), path or "(root)")
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in taken:
                taken.add(id(parameter))
                name = f"{path}.{key}" if path else key
                members.setdefault(layer, []).append((name, parameter))
    return [Cut(name, tuple(parameters)) for name, parameters in members.items()]


def _merge_small(cuts: list[Cut], blocks: set[str]) -> list[Cut]:
    """What is outside of the blocks and tiny beside them becomes one layer."""
    total = sum(cut.nbytes for cut in cuts)
    limit = min(SMALL_LAYER, total // (4 * len(cuts)))
    small = [cut for cut in cuts if cut.nbytes < limit and cut.name not in blocks]
    if len(small) < 2:
        return cuts
    merged = Cut("(small)", tuple(pair for cut in small for pair in cut.parameters))
    position = cuts.index(small[0])
    rest = [cut for cut in cuts if cut not in small]
    return [*rest[:position], merged, *rest[position:]]
