"""64-bit words that processes share, with the memory order that flags need."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import UnsupportedError
from ..native.module import kernels

_STRONG = ("x86_64", "AMD64", "i686")  # where plain loads and stores of aligned words have that order anyway


class SharedWords:
    """Words in shared pages: what a process wrote before `store` is seen by whoever has loaded that value.

    Parameters
    ----------
    words : array of int64
        Over pages that the others map too; kept alive.

    Raises
    ------
    UnsupportedError
        This processor needs the native functions, and the package was installed without a C compiler.
    """

    def __init__(self, words: npt.NDArray[np.int64]) -> None:
        self._words = words
        module = kernels()
        if module is None and platform.machine() not in _STRONG:
            raise UnsupportedError(
                f"process_group: on {platform.machine()} ranks need the native functions to keep step, and the "
                "package was installed without a C compiler; install it again with gcc"
            )
        self._lib = None if module is None else module.lib
        self._base: Any = None if module is None else module.ffi.cast("int64_t *", words.ctypes.data)

    def __len__(self) -> int:
        return len(self._words)

    def load(self, index: int) -> int:
        """A word's value; later reads see what was written before it was stored."""
        if self._lib is None:
            return int(self._words[index])
        return int(self._lib.memferry_load_word(self._base + index))

    def store(self, index: int, value: int) -> None:
        """Set a word after everything that was written before."""
        if self._lib is None:
            self._words[index] = value
        else:
            self._lib.memferry_store_word(self._base + index, value)

    def plain(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Words without any order of their own: guarded by others."""
        return self._words[start : start + count]
