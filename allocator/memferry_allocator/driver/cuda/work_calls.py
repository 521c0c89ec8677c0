"""Copies and fills, and which device reaches which."""

from __future__ import annotations

from cuda.bindings import driver as cu

from ...errors import DriverError
from ..handles import Stream
from .core import CudaCore
from .errors import SUCCESS, check, require_size
from .library import rows_structure


class WorkCalls(CudaCore):
    """What moves bytes."""

    def copy(self, dst: int, src: int, nbytes: int, *, stream: Stream) -> None:
        handle = self._stream(stream)
        if nbytes == 0:
            return
        require_size("copy", nbytes)
        if self._addresses is not None:
            self._require_mapped("copy", (dst, src), nbytes)
        code = self._answer(stream.device, self._library.cuMemcpyAsync, dst, src, nbytes, handle)
        if code != SUCCESS:
            raise self._error(stream.device, code, "copy", f"{nbytes} bytes from {src:#x} to {dst:#x}")

    def copy_rows(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, *, stream: Stream
    ) -> None:
        self._require_pitches(dst_pitch, src_pitch, width, rows)
        handle = self._stream(stream)
        if width == 0 or rows == 0:
            return
        require_size("copy_rows", rows * width)
        if self._addresses is not None:
            for ptr, pitch in ((dst, dst_pitch), (src, src_pitch)):
                self._require_mapped("copy_rows", (ptr,), (rows - 1) * pitch + width)
        told = rows_structure(dst, dst_pitch, src, src_pitch, width, rows)
        code = self._answer(stream.device, self._library.cuMemcpy2DAsync_v2, told, handle)
        if code != SUCCESS:
            raise self._error(
                stream.device, code, "copy_rows", f"{rows} rows of {width} bytes from {src:#x} to {dst:#x}"
            )

    def fill(self, ptr: int, value: int, nbytes: int, *, stream: Stream) -> None:
        handle = self._stream(stream)
        if nbytes == 0:
            return
        require_size("fill", nbytes)
        if not 0 <= value <= 255:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "fill", f"{value} is not a byte")
        if self._addresses is not None:
            self._require_mapped("fill", (ptr,), nbytes)
        code = self._answer(stream.device, self._library.cuMemsetD8Async, ptr, value, nbytes, handle)
        if code != SUCCESS:
            raise self._error(stream.device, code, "fill", f"{nbytes} bytes at {ptr:#x}")

    def _require_mapped(self, call: str, pointers: tuple[int, ...], nbytes: int) -> None:
        """Refuse reserved addresses with nothing behind them: touching those would end the device's context."""
        with self._lock:
            assert self._addresses is not None
            for ptr in pointers:
                self._addresses.check_access(call, ptr, nbytes)

    # -- peers --------------------------------------------------------------------------------------
    def can_access_peer(self, device: int, peer: int) -> bool:
        self._known(device)
        self._known(peer)
        return device != peer and bool(check("can_access_peer", cu.cuDeviceCanAccessPeer(device, peer)))

    def enable_peer_access(self, device: int, peer: int) -> None:
        other = self._peer("enable_peer_access", device, peer)
        with self._on(device):
            result = cu.cuCtxEnablePeerAccess(other, 0)
            self._check(device, "enable_peer_access", result, f"{device} to {peer}")

    def disable_peer_access(self, device: int, peer: int) -> None:
        other = self._peer("disable_peer_access", device, peer)
        with self._on(device):
            result = cu.cuCtxDisablePeerAccess(other)
            self._check(device, "disable_peer_access", result, f"{device} to {peer}")

    def _peer(self, call: str, device: int, peer: int) -> cu.CUcontext:
        context = cu.CUcontext(self._context(peer))
        if device == peer:  # the driver's answer to it is also that of a lost device
            raise DriverError("CUDA_ERROR_INVALID_CONTEXT", call, f"{device} to itself")
        return context
