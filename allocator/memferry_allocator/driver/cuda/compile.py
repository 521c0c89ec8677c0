"""Kernels compiled when they are first needed, with the compiler that comes with CUDA's libraries."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ...errors import UnsupportedError


@functools.cache
def compile_kernels(source: Path, capability: tuple[int, int]) -> bytes:
    """The kernels of a file as a binary for this compute capability, or as PTX for one newer than the compiler.

    Raises
    ------
    UnsupportedError
        There is no NVRTC library, or it does not compile them.
    """
    nvrtc = _load()
    target, exact = _architecture(nvrtc, capability)
    text, name = source.read_bytes(), source.name.encode()
    program = _check(nvrtc, "create", nvrtc.nvrtcCreateProgram(text, name, 0, None, None))
    try:
        options = [f"--gpu-architecture={target}".encode(), b"--std=c++17"]
        if int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]):
            log = _read(nvrtc, program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise UnsupportedError(f"NVRTC refuses {source.name} for {target}: {log.decode(errors='replace')}")
        if exact:
            return _read(nvrtc, program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return _read(nvrtc, program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _load() -> Any:
    try:
        from cuda.bindings import nvrtc

        _check(nvrtc, "version", nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:  # cuda-python's answer where it cannot load the library
        raise UnsupportedError(
            f"kernels need NVRTC, which does not load ({error}); install nvidia-cuda-nvrtc, or a torch with CUDA"
        ) from None
    return nvrtc


def _architecture(nvrtc: Any, capability: tuple[int, int]) -> tuple[str, bool]:
    """What to compile for, and whether that is the device's own instructions."""
    wanted = 10 * capability[0] + capability[1]
    known = [n for n in _check(nvrtc, "architectures", nvrtc.nvrtcGetSupportedArchs()) if n <= wanted]
    if not known:
        raise UnsupportedError(f"NVRTC compiles for no compute capability as old as {wanted / 10}")
    exact = wanted in known
    return f"{'sm' if exact else 'compute'}_{max(known)}", exact


def _read(nvrtc: Any, program: Any, size: Any, get: Any) -> bytes:
    code = b" " * int(_check(nvrtc, "size", size(program)))
    _check(nvrtc, "result", get(program, code))
    return code


def _check(nvrtc: Any, call: str, result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise UnsupportedError(f"NVRTC: {call} failed with {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]
