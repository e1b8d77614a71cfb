"""Memory for arrays that are read from end to end, in the system's large pages where it has them.

A pass over a model reads hundreds of megabytes. In pages of 4 KiB a fifth of that time goes into looking up where the pages lie.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from typing import Any

import numpy as np

CHUNK = 64 << 20
"""Bytes asked of the system at a time: matrices of a few megabytes share their large pages."""
ALIGNMENT = 64


class Room:
    """Hands out arrays one after the other. A chunk of memory is given back when the last array in it is gone; what no array fills is
    never touched."""

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array of any content that begins at a multiple of 64 bytes, so that JAX takes it over as it is instead of copying it."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        if padded > len(self._chunk):
            _return_what_is_free()
            self._chunk = _chunk(max(padded, CHUNK))
        array, self._chunk = self._chunk[:size], self._chunk[padded:]
        return array.view(dtype).reshape(shape)


def _chunk(size: int) -> np.ndarray:
    """Fresh bytes from the system."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(room := np.empty(size + ALIGNMENT, np.uint8)).ctypes.data % ALIGNMENT
        return room[start : start + size]
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages: small ones serve as well, only slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _return_what_is_free() -> None:
    """Arrays that were given up for those in a room leave their memory in the C library's heap, which nobody would ask for again."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library, or none that can be asked
        ctypes.CDLL(None).malloc_trim(0)
