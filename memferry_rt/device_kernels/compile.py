"""Compiles the device kernels when they are first needed, with the compiler that comes with CUDA's libraries."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from ..errors import DeviceKernelError

SOURCE = Path(__file__).with_name("kernels.cu")
HEADERS = [Path(__file__).parent.parent / "native" / name for name in ("adam.h", "arithmetic.h")]
# The arithmetic is exact only so: no contraction, IEEE division and root, subnormals kept.
ARITHMETIC = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")


@functools.cache
def compile_kernels(capability: tuple[int, int]) -> bytes:
    """The kernels for devices of this compute capability, as a binary, or as PTX for one newer than the compiler.

    Raises
    ------
    DeviceKernelError
        There is no NVRTC library, or it does not compile them.
    """
    nvrtc = _load()
    names = [header.name.encode() for header in HEADERS]
    texts = [header.read_bytes() for header in HEADERS]
    program = _check(
        nvrtc, "create", nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"kernels.cu", len(names), texts, names)
    )
    try:
        exact = _architecture(nvrtc, capability)
        options = [option.encode() for option in (f"--gpu-architecture={exact}", "--std=c++17", *ARITHMETIC)]
        result = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise DeviceKernelError(f"NVRTC refuses the kernels for {exact}: {_log(nvrtc, program)}")
        if exact.startswith("sm_"):
            return _read(nvrtc, program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return _read(nvrtc, program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _load() -> Any:
    try:
        from cuda.bindings import nvrtc

        _check(nvrtc, "version", nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:  # cuda-python's answer where it cannot load the library
        raise DeviceKernelError(
            f"the device kernels need NVRTC, which does not load ({error}); install nvidia-cuda-nvrtc, or a torch "
            "with CUDA. Until then the CPU makes every update"
        ) from None
    return nvrtc


def _architecture(nvrtc: Any, capability: tuple[int, int]) -> str:
    wanted = capability[0] * 10 + capability[1]
    known = _check(nvrtc, "architectures", nvrtc.nvrtcGetSupportedArchs())
    if wanted in known:
        return f"sm_{wanted}"
    older = [number for number in known if number <= wanted]
    if not older:
        raise DeviceKernelError(
            f"NVRTC compiles for compute capability {min(known) / 10} and later; the device has {wanted / 10}"
        )
    return f"compute_{max(older)}"


def _read(nvrtc: Any, program: Any, size: Any, get: Any) -> bytes:
    code = b" " * int(_check(nvrtc, "size", size(program)))
    _check(nvrtc, "result", get(program, code))
    return code


def _log(nvrtc: Any, program: Any) -> str:
    return _read(nvrtc, program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")


def _check(nvrtc: Any, call: str, result: tuple[Any, ...]) -> Any:
    if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise DeviceKernelError(f"NVRTC: {call} failed with {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]
