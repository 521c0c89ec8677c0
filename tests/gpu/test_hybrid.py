"""An unmodified kernel over a tensor that is only partly resident."""

from __future__ import annotations

import pytest

from memferry_allocator import HybridBuffer, Span, open_driver

pytestmark = pytest.mark.gpu


class _Array:
    """A view of device memory, as other libraries take it."""

    def __init__(self, buffer: HybridBuffer, shape: tuple[int, ...]) -> None:
        self.buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (buffer.ptr, False),
            "strides": None,
            "version": 3,
        }


def test_a_matmul_over_a_weight_that_is_partly_on_the_host() -> None:
    import torch

    driver = open_driver("cuda")
    stream = driver.stream_from_handle(0, torch.cuda.current_stream().cuda_stream)
    rows, columns = 4096, 3072
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(256, columns, device="cuda", generator=generator)
    weight = torch.randn(rows, columns, device="cuda", generator=generator)
    expected = x @ weight.T
    with HybridBuffer(driver, 0, rows * columns * 4, resident=0.6) as buffer:
        assert 0 < buffer.host_nbytes < buffer.device_nbytes
        tensor = torch.as_tensor(_Array(buffer, (rows, columns)), device="cuda")
        assert tensor.data_ptr() == buffer.ptr
        tensor.copy_(weight)
        for resident in (0.6, 0.0, 1.0, [Span(0, 100), Span(30 << 20, 10 << 20)]):
            buffer.record_use(stream)
            buffer.repartition(resident, stream=stream)
            assert torch.equal(x @ tensor.T, expected)
            assert torch.equal(tensor, weight)
        tensor.mul_(2)
        assert torch.equal(tensor, weight * 2)
        buffer.record_use(stream)
        del tensor
