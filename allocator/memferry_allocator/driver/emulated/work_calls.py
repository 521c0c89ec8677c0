"""Work: copies, fills, and what others do on a stream or on the host."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from ...errors import DriverError
from ..api import COPY_BLOCKS
from ..handles import NO_BRACKET, Bracket, Stream
from ..integers import integers
from ..types import Span
from .core import EmulatedCore
from .memory import HOST_END, MAPPED_OFFSET, Kind, Place
from .order import join
from .state import EmulatedBracket, Touch


class WorkCalls(EmulatedCore):
    """Everything that touches bytes, and which device may."""

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        dst, src, nbytes = integers("copy", dst, src, nbytes)
        with self._lock:
            state = self._state(stream)
            if nbytes == 0:
                return
            target = self._locate(dst, nbytes, "copy")
            source = self._locate(src, nbytes, "copy")
            if target.read_only:
                raise DriverError("CUDA_ERROR_INVALID_VALUE", "copy", f"{dst:#x} is registered read-only")
            for place, ptr in ((source, src), (target, dst)):
                if place.users is not None and state.device not in place.users:
                    raise _not_mapped("copy", ptr, state.device)
            if self._captures.enqueue(state, "copy"):
                return
            to, of = target.real, source.real
            work = self._engine.enqueue(
                state,
                lambda: _ignore(ctypes.memmove(to, of, nbytes)),
                (Touch(source, False), Touch(target, True)),
                link=self._engine.links.between(source, target),
                nbytes=nbytes,
                label=f"copy {source.kind.value} to {target.kind.value}",
            )
            if Kind.PAGEABLE in (source.kind, target.kind):
                self._engine.scheduler.force(work)

    def prepare_kernel_copy(self, device: int) -> None:
        self._device(device)

    def kernel_copy(self, dst: int, src: int, nbytes: int, *, stream: Stream, blocks: int = COPY_BLOCKS) -> None:
        dst, src, nbytes = integers("kernel_copy", dst, src, nbytes)
        with self._lock:
            state = self._state(stream)
            if nbytes == 0:
                return
            source = self._kernel_touch(Span(src, nbytes), False, state.device, "kernel_copy")
            target = self._kernel_touch(Span(dst, nbytes), True, state.device, "kernel_copy")
            if self._captures.enqueue(state, "kernel_copy"):
                return
            to, of = target.place.real, source.place.real
            self._engine.enqueue(
                state,
                lambda: _ignore(ctypes.memmove(to, of, nbytes)),
                (source, target),
                link=self._engine.links.across(state.device, source.place, target.place),
                nbytes=nbytes,
                label=f"kernel copies {source.place.kind.value} to {target.place.kind.value}",
            )

    def fill(self, ptr: int, value: int, nbytes: int, *, stream: Stream) -> None:
        ptr, value, nbytes = integers("fill", ptr, value, nbytes)
        with self._lock:
            state = self._state(stream)
            if nbytes == 0:
                return
            target = self._locate(ptr, nbytes, "fill")
            if not 0 <= value <= 255:
                raise DriverError("CUDA_ERROR_INVALID_VALUE", "fill", f"{value} is not a byte")
            if target.read_only or not self._reachable(target, ptr, state.device):
                raise DriverError(
                    "CUDA_ERROR_INVALID_VALUE", "fill", f"device {state.device} cannot write at {ptr:#x}"
                )
            if self._captures.enqueue(state, "fill"):
                return
            to = target.real
            self._engine.enqueue(
                state,
                lambda: _ignore(ctypes.memset(to, value, nbytes)),
                (Touch(target, True),),
                link=self._engine.links.filling(state.device, target),
                nbytes=nbytes,
                label="fill",
            )

    # -- peers --------------------------------------------------------------------------------------
    def can_access_peer(self, device: int, peer: int) -> bool:
        return self._engine.links.connected(self._device(device), self._device(peer))

    def enable_peer_access(self, device: int, peer: int) -> None:
        with self._lock:
            self._captures.forbid("enable_peer_access")
            if not self.can_access_peer(device, peer):
                raise DriverError("CUDA_ERROR_INVALID_CONTEXT", "enable_peer_access", f"{device} to itself")
            if (device, peer) in self._peers:
                raise DriverError(
                    "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "enable_peer_access", f"{device} to {peer}"
                )
            self._peers.add((device, peer))

    def disable_peer_access(self, device: int, peer: int) -> None:
        with self._lock:
            if (self._device(device), self._device(peer)) not in self._peers:
                raise DriverError(
                    "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "disable_peer_access", f"{device} to {peer}"
                )
            self._peers.remove((device, peer))

    # -- work the driver does not see -----------------------------------------------------------------
    def launch(
        self, stream: Stream, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), label: str = ""
    ) -> Bracket:
        with self._lock:
            state = self._state(stream)
            touches = [self._kernel_touch(span, False, state.device) for span in reads if span.nbytes]
            touches += [self._kernel_touch(span, True, state.device) for span in writes if span.nbytes]
            if self._captures.enqueue(state, "launch"):
                return NO_BRACKET
            opened = self._engine.open(touches, state.actor, self._engine.known(state), label or "launch")
            self._engine.scheduler.force(self._engine.enqueue(state, None, ()))

            def finish() -> None:
                with self._lock:
                    if state.closed:  # who closed the stream has waited for this too
                        self._engine.close(opened, state.actor, state.clock)
                        return
                    work = self._engine.enqueue(state, None, ())
                    self._engine.close(opened, state.actor, state.clock)
                    self._engine.scheduler.force(work)

            return EmulatedBracket(finish)

    def host_access(self, *, reads: Iterable[Span] = (), writes: Iterable[Span] = (), label: str = "") -> Bracket:
        with self._lock:
            touches = [self._host_touch(span, False) for span in reads if span.nbytes]
            touches += [self._host_touch(span, True) for span in writes if span.nbytes]
            known, actor = dict(self._engine.threads.clock), self._engine.threads.actor
            opened = self._engine.open(touches, actor, known, label or "host access")

            def finish() -> None:
                with self._lock:
                    ending = self._engine.threads  # perhaps another thread, which was handed the bytes
                    if ending.actor != actor:
                        join(ending.clock, known)
                        self._engine.recheck(opened, ending.actor, ending.clock)
                    ending.clock[ending.actor] = ending.clock.get(ending.actor, 0) + 1
                    self._engine.close(opened, ending.actor, ending.clock)

            return EmulatedBracket(finish)

    def publish(self) -> Any:
        with self._lock:
            return dict(self._engine.threads.clock)

    def observe(self, token: Any) -> None:
        with self._lock:
            join(self._engine.threads.clock, token)

    # -- inside ------------------------------------------------------------------------------------
    def _reachable(self, place: Place, ptr: int, device: int) -> bool:
        """Whether kernels of `device` may use `ptr` for what is at `place`."""
        if place.users is not None:
            return device in place.users
        if place.kind is not Kind.DEVICE:
            return ptr >= MAPPED_OFFSET
        return place.device == device or (device, place.device) in self._peers

    def _kernel_touch(self, span: Span, write: bool, device: int, call: str = "launch") -> Touch:
        # What a copy refuses beforehand, a kernel that nobody has checked runs into.
        code = "CUDA_ERROR_ILLEGAL_ADDRESS" if call == "launch" else "CUDA_ERROR_INVALID_VALUE"
        span = Span(*integers(call, *span))
        place = self._locate(span.ptr, span.nbytes, call)
        if not self._reachable(place, span.ptr, device):
            if place.users is not None:
                wrong = f"{span.ptr:#x} is mapped for other devices only"
            elif place.kind is Kind.DEVICE:
                wrong = f"{span.ptr:#x} is memory of device {place.device}; enable peer access first"
            else:
                wrong = f"{span.ptr:#x} is a host address; kernels need host_device_pointer(address, device)"
            raise DriverError(code, call, wrong)
        if write and place.read_only:
            raise DriverError(code, call, f"{span.ptr:#x} is registered read-only")
        return Touch(place, write)

    def _host_touch(self, span: Span, write: bool) -> Touch:
        self._alive()
        span = Span(*integers("host_access", *span))
        if not 0 < span.ptr < HOST_END or span.nbytes < 0:
            raise DriverError(
                "CUDA_ERROR_INVALID_VALUE", "host_access", f"{span.nbytes} bytes at {span.ptr:#x} in host memory"
            )
        return Touch(Place(Kind.PINNED, -1, span.ptr, (span,)), write)


def _not_mapped(call: str, ptr: int, device: int) -> DriverError:
    return DriverError("CUDA_ERROR_INVALID_VALUE", call, f"{ptr:#x} is not mapped for device {device}")


def _ignore(_: object) -> None:
    return None
