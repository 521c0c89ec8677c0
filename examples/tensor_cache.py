"""A cache of tensors that may be larger than the device: what is used least spills to host memory.

    python examples/tensor_cache.py

The whole cache is the class below; everything else is a demonstration with more bytes than the device budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from memferry_allocator import Mode, Partition, Place, ShadowSpace, Stream, open_device
from memferry_allocator.interop import BorrowedStreams, as_device, as_host
from memferry_allocator.interop.torch_tensor import as_tensor

Result = TypeVar("Result")


class TensorCache:
    """Tensors by name.  Reading one brings it to the device, or reads it where it is."""

    def __init__(self, device_budget: str, host_budget: str) -> None:
        self.driver, device = open_device("auto")
        self.space = ShadowSpace(self.driver, device, device_budget=device_budget, host_budget=host_budget)
        self._streams = BorrowedStreams(self.driver, device)
        self._own = None if self.driver.name == "cuda" else self.driver.create_stream(device)
        self._known: dict[str, tuple[Partition, torch.dtype, torch.Size]] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of a CPU tensor."""
        [partition] = self.space.allocate(name, tensor.nbytes)
        with partition.acquire(Place.HOST, Mode.WRITE) as view:
            as_tensor(as_host(view, tensor.dtype, tensor.shape)).copy_(tensor)
        self._known[name] = (partition, tensor.dtype, tensor.shape)

    def apply(self, name: str, use: Callable[[torch.Tensor], Result], *, in_place: bool = False) -> Result:
        """What `use` makes of a tensor, in device memory or, `in_place`, read from host memory by its kernels."""
        partition, dtype, shape = self._known[name]
        place = Place.MAPPED if in_place else Place.DEVICE
        with partition.acquire(place, Mode.READ, stream=self._stream()) as view:
            return use(as_tensor(as_device(view, dtype, shape, promise_not_to_write=True)))

    def _stream(self) -> Stream:
        return self._own or self._streams[torch.cuda.current_stream()]

    def close(self) -> None:
        self.space.close()


def main() -> None:
    cache = TensorCache(device_budget="8MiB", host_budget="64MiB")
    weights = [torch.randn(512, 1024) for _ in range(16)]  # 2 MiB each, 32 MiB in all
    for number, weight in enumerate(weights):
        cache.put(f"layer{number}", weight)
    device = "cuda" if cache.driver.name == "cuda" else "cpu"
    x = torch.randn(4, 1024, device=device)
    for number, weight in enumerate(weights):
        seldom = number % 4 == 3  # too seldom used to be worth a place on the device
        y = cache.apply(f"layer{number}", lambda w: x @ w.T, in_place=seldom)
        torch.testing.assert_close(y, x @ weight.to(device).T)
    print(f"{len(weights)} tensors of 2 MiB used in {cache.space.pool.nbytes >> 20} MiB of device memory")
    cache.close()


if __name__ == "__main__":
    main()
