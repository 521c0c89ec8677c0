"""What `offload` can be told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from memferry_allocator import EmulatedOptions, InvalidRequestError, parse_size


@dataclass(frozen=True)
class OffloadOptions:
    """Settings of `memferry_rt.offload`; see there.  Sizes are bytes."""

    device: str = "auto"
    device_memory: int = 0
    host_memory: int | None = None
    max_grad_norm: float | None = None
    compute_dtype: str | None = None
    layers: tuple[str, ...] | None = None
    pool_memory: int | None = None
    async_step: bool = False
    optimizer_split: str | float = "auto"
    spare_slabs: int | None = None
    accumulate: int = 1
    accumulate_dtype: str | None = None
    numerics: str = "exact"
    helpers: Literal["auto"] | tuple[int, ...] = ()
    emulated: EmulatedOptions | None = None

    @classmethod
    def build(
        cls,
        *,
        device: str,
        device_memory: str | int,
        host_memory: str | int | None,
        max_grad_norm: float | None,
        compute_dtype: str | None,
        layers: Sequence[str] | None,
        pool_memory: str | int | None,
        async_step: bool,
        optimizer_split: str | float,
        spare_slabs: str | int,
        accumulate: int = 1,
        accumulate_dtype: str | None = None,
        numerics: str = "exact",
        helpers: str | Sequence[int] | None = (),
        emulated: EmulatedOptions | None,
    ) -> OffloadOptions:
        """Options from what a user writes.

        Raises
        ------
        InvalidRequestError
            A size, a norm, a share or a list of devices makes no sense.
        """
        if max_grad_norm is not None and not (max_grad_norm > 0 and math.isfinite(max_grad_norm)):
            raise InvalidRequestError(
                f"max_grad_norm: {max_grad_norm} is not a positive number; leave it out for no clipping"
            )
        return cls(
            device=device,
            device_memory=parse_size(device_memory, name="device_memory"),
            host_memory=None if host_memory is None else parse_size(host_memory, name="host_memory"),
            max_grad_norm=max_grad_norm,
            compute_dtype=compute_dtype,
            layers=None if layers is None else tuple(layers),
            pool_memory=None if pool_memory is None else parse_size(pool_memory, name="pool_memory"),
            async_step=async_step,
            optimizer_split=_split(optimizer_split),
            spare_slabs=_spare_slabs(spare_slabs),
            accumulate=_micro_steps(accumulate),
            accumulate_dtype=_accumulate_dtype(accumulate_dtype),
            numerics=_numerics(numerics),
            helpers=_helpers(helpers),
            emulated=emulated,
        )


def _split(split: str | float) -> str | float:
    if isinstance(split, str):
        if split in ("auto", "cpu"):
            return split
    elif 0 <= split <= 1:
        return float(split)
    raise InvalidRequestError(
        f"optimizer_split: {split!r} is neither 'auto' nor 'cpu' nor the device's share, a number from 0 to 1"
    )


def _spare_slabs(slabs: str | int) -> int | None:
    """How many, or None for as many as host memory has room for."""
    if slabs == "auto":
        return None
    if isinstance(slabs, int) and slabs >= 0:
        return slabs
    raise InvalidRequestError(f"spare_slabs: {slabs!r} is neither 'auto' nor a number of layers")


def _micro_steps(number: int) -> int:
    if isinstance(number, int) and not isinstance(number, bool) and number >= 1:
        return number
    raise InvalidRequestError(f"accumulate: {number!r} is not a number of backwards before a step, 1 or more")


def _accumulate_dtype(name: str | None) -> str | None:
    if name in (None, "float32"):
        return name
    raise InvalidRequestError(
        f"accumulate_dtype: {name!r} is not supported; give 'float32', or leave it out for each parameter's own"
    )


def _numerics(name: str) -> str:
    if name in ("exact", "relaxed"):
        return name
    raise InvalidRequestError(f"numerics: {name!r} is neither 'exact' nor 'relaxed'")


def _helpers(helpers: Any) -> Literal["auto"] | tuple[int, ...]:
    if helpers is None:
        return ()
    if isinstance(helpers, str):
        if helpers == "auto":
            return "auto"
    elif isinstance(helpers, Sequence) and not isinstance(helpers, bytes):
        found = tuple(helpers)
        if all(isinstance(device, int) and not isinstance(device, bool) and device >= 0 for device in found):
            if len(set(found)) < len(found):
                raise InvalidRequestError(f"helpers: {list(found)} names a device twice; name each once")
            return found
    raise InvalidRequestError(
        f"helpers: {helpers!r} is neither 'auto' nor a sequence of device numbers; write for example [1, 2]"
    )
