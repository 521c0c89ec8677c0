"""Single ways between host memory and a device: the direct link, and relays over other devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from memferry_allocator import Direction, Span, Stream, UnsupportedError
from memferry_allocator.driver import COPY_BLOCKS

from ..carriers import Carrier, DirectLink, KernelRelay, Relay, device_relay
from ..options import SLICE_BYTES
from ..paths import Path
from ..pieces import Piece, slices
from .bench import Bench, Load

STAGING_BUFFERS = 2
_SAMPLE_BYTES = 256 << 20


def helpers_of(bench: Bench, device: int) -> list[int]:
    """The other devices of the bench that read and write `device`'s memory."""
    others = (other for other in bench.devices if other != device)
    return [other for other in others if bench.buffers.can_reach(other, device)]


def ways_of(bench: Bench, device: int) -> list[Path]:
    """The direct link first, then the relays that stage, then those by a kernel."""
    helpers = helpers_of(bench, device)
    kernels = [helper for helper in helpers if runs_kernels(bench, helper)]
    return [
        Path(device),
        *(Path(device, helper) for helper in helpers),
        *(Path(device, helper, "kernel") for helper in kernels),
    ]


def runs_kernels(bench: Bench, device: int) -> bool:
    """Whether a device copies by kernels; the first time this takes a while."""
    try:
        bench.driver.prepare_kernel_copy(device)
    except UnsupportedError:
        return False
    return True


def slice_bytes_of(bench: Bench) -> int:
    """What relays cut transfers into: the engine's own size, unless the bench measures small things only."""
    return min(SLICE_BYTES, max(4096, bench.options.largest // 8))


def few_copies(bench: Bench, nbytes: int) -> int:
    """Copies in a sample where each is many driver calls, which a device's queue has to hold all at once."""
    return max(1, min(bench.options.copies, _SAMPLE_BYTES // nbytes))


def ends(bench: Bench, device: int, direction: Direction, nbytes: int) -> tuple[Span, Span]:
    """Destination and source of a copy between a device and the host memory near it."""
    buffers = bench.buffers
    if direction is Direction.HOST_TO_DEVICE:
        dst, src = buffers.device(device, "target"), buffers.host(device, "source").ptr
    else:
        dst, src = buffers.host(device, "home").ptr, buffers.device(device, "source")
    return Span(dst, nbytes), Span(src, nbytes)


@contextmanager
def way_load(bench: Bench, path: Path, direction: Direction, nbytes: int, slice_bytes: int) -> Iterator[Load]:
    """Copies of `nbytes` that take one way, for as long as the block lasts.

    They go as the transfer engine's do: on streams of their own, between two events, relays slice by slice.
    """
    stream, times = bench.buffers.stream(path.device, direction.value), few_copies(bench, nbytes)
    dst, src = ends(bench, path.device, direction, nbytes)
    piece = Piece(dst.ptr, src.ptr, nbytes)
    if path.helper is None:
        link = DirectLink(bench.driver, bench.buffers.stream(path.device, f"lane {direction.value}"))
        yield Load(stream, lambda: _carry(link, [piece], stream), times)
        return
    bench.buffers.can_reach(path.helper, path.device)
    relay: KernelRelay | Relay
    if path.by_kernel:
        relay, parts = KernelRelay(bench.driver, path.helper, direction, COPY_BLOCKS), [piece]
    else:
        relay = device_relay(bench.driver, path.helper, STAGING_BUFFERS, slice_bytes)
        parts = list(slices([piece], slice_bytes))
    try:
        yield Load(stream, lambda: _carry(relay, parts, stream), times)
    finally:
        relay.close()


def _carry(carrier: Carrier, pieces: Sequence[Piece], stream: Stream) -> None:
    """Send pieces over a way, in the order of `stream`."""
    begin, used = stream.record(), []
    for piece in pieces:
        lane = carrier.next_stream()
        if lane not in used:
            lane.wait(begin)
            used.append(lane)
        carrier.submit(piece)
    for lane in used:
        stream.wait(lane.record())
