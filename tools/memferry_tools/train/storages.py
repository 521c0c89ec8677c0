"""The lives of torch's storages: which are made, and when each of them goes."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageLives(TorchDispatchMode):
    """Tells of every storage that an operation inside it makes, and of its end, in their order.

    Parameters
    ----------
    made : callable of (int, int)
        Called with a number of the storage's own and its size in bytes.
    gone : callable of (int, int)
        Called with the same when the storage is freed.
    known : iterable of torch.Tensor
        Tensors whose storages do not count when a view of them is seen.
    """

    def __init__(
        self,
        made: Callable[[int, int], None],
        gone: Callable[[int, int], None],
        known: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = made
        self._gone = gone
        self._numbers = itertools.count()
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        for tensor in known:
            self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known.add(storage)
            number, nbytes = next(self._numbers), storage.nbytes()
            self._made(number, nbytes)
            weakref.finalize(storage, self._gone, number, nbytes).atexit = False
