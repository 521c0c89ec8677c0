"""Saved-tensor hooks: what autograd keeps of a streamed weight is where it lies, not a tensor over it.

Autograd saves views of the storage that a weight has during forward; when that device memory is given to
another layer, the view would silently read the wrong weights in backward.  Packing turns such a view into
layer, offset and form; unpacking brings the layer back and rebuilds it.  Hooks that are active already
(checkpointing's, a user's) go on seeing every other tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UnsupportedError
from .layer import LayerState, ViewKey

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


def require_hooks() -> None:
    """Refuse a torch that does not tell which saved-tensor hooks are active: ours could not be put over them.

    Raises
    ------
    UnsupportedError
        Before torch 2.8.
    """
    if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
        raise UnsupportedError(
            f"torch {torch.__version__} does not tell which saved-tensor hooks are active, and offloading "
            "needs to know; install torch 2.8 or newer (2.11 and 2.13 are tested)"
        )


def in_backward() -> bool:
    """Whether the calling thread is running a backward, recomputed forwards included."""
    return torch._C._current_graph_task_id() != -1


def require_version(layer: LayerState, parameter: torch.Tensor, version: int) -> None:
    """Refuse a backward after weights have changed, as PyTorch does.

    Raises
    ------
    RuntimeError
    """
    if parameter._version != version:
        raise RuntimeError(
            f"backward needs a weight of layer {layer.name!r} as it was during forward, but it has been modified "
            "by an inplace operation since, perhaps an optimizer step; call backward() before step()"
        )


class _SavedWeight:
    """A view of a parameter in its layer's slab, by place; `at_home` if it was one of host pages."""

    __slots__ = ("at_home", "key", "layer", "parameter", "version")

    def __init__(self, layer: LayerState, key: ViewKey, at_home: bool) -> None:
        self.layer = layer
        self.key = key
        self.at_home = at_home
        self.parameter = layer.parameter_at(key[1] * key[0].itemsize)
        self.version = self.parameter._version


class SavedWeights:
    """Pushes and pops the hooks, one pair for each scope of a module that owns weights.

    Parameters
    ----------
    bring_back : callable
        Gives the view of a layer's weights for backward, with the layer in device memory or, for one that was
        saved at home, where its mode reads it.
    """

    def __init__(self, bring_back: Callable[[LayerState, ViewKey, bool], torch.Tensor]) -> None:
        self._bring_back = bring_back
        self._slabs: dict[int, tuple[LayerState, int, bool]] = {}
        self._plain = self._hooks(None)

    def watch(self, storage: int, layer: LayerState) -> None:
        """Tensors over the storage at this address are weights of `layer` from now on."""
        self._slabs[storage] = (layer, 0, False)

    def watch_home(self, layer: LayerState) -> None:
        """Tensors over the host pages of a layer's weights are what it reads in place from now on."""
        for slot, home in zip(layer.layout.slots, layer.host_weights, strict=True):
            if slot.spec.numel:
                self._slabs[home.untyped_storage().data_ptr()] = (layer, slot.weight, True)

    def forget(self) -> None:
        """Forget every address: the device pool is going away."""
        self._slabs.clear()

    def push(self) -> bool:
        """Put the hooks on top, over those that are there; False if they are on top already.

        The hooks of another offloaded model know nothing of this one's weights: they count as a user's.
        """
        below = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if below is not None and getattr(below[0], "_weights_of", None) is self._slabs:
            return False
        pack, unpack = self._plain if below is None else self._hooks(below)
        try:
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        except RuntimeError as error:
            raise UnsupportedError(
                "an offloaded model needs saved-tensor hooks, and something has disabled them; "
                "torch.func transforms such as torch.func.grad are not supported, use backward()"
            ) from error
        return True

    @staticmethod
    def pop() -> None:
        torch._C._autograd._pop_saved_tensors_default_hooks()

    def _hooks(self, below: tuple[Pack, Unpack] | None) -> tuple[Pack, Unpack]:
        slabs = self._slabs
        bring_back = self._bring_back
        lower_pack, lower_unpack = below if below is not None else (None, None)

        def pack(tensor: torch.Tensor) -> Any:
            try:
                found = slabs.get(tensor.untyped_storage().data_ptr())
            except (RuntimeError, NotImplementedError):  # no storage of its own: sparse, or a subclass
                found = None
            if found is not None:
                layer, base, at_home = found
                offset = int(tensor.storage_offset()) + base // tensor.dtype.itemsize
                key = (tensor.dtype, offset, tuple(tensor.shape), tensor.stride())
                return _SavedWeight(layer, key, at_home)
            return _Kept(tensor) if lower_pack is None else _Lower(lower_pack(tensor))

        def unpack(packed: Any) -> torch.Tensor:
            if type(packed) is _SavedWeight:
                require_version(packed.layer, packed.parameter, packed.version)
                return bring_back(packed.layer, packed.key, packed.at_home)
            if type(packed) is _Lower:
                assert lower_unpack is not None
                return lower_unpack(packed.packed)
            kept: _Kept = packed
            return kept.unchanged()

        pack._weights_of = slabs  # type: ignore[attr-defined]
        return pack, unpack


class _Kept:
    """Any other tensor.  PyTorch itself does not look at the versions of what hooks have packed."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = tensor._version

    def unchanged(self) -> torch.Tensor:
        tensor = self.tensor
        if tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}; expected version "
                f"{self.version} instead"
            )
        return tensor


class _Lower:
    """What the hooks below have packed."""

    __slots__ = ("packed",)

    def __init__(self, packed: Any) -> None:
        self.packed = packed
