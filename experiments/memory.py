"""How this process treats freed memory on Linux: keep it, so that large arrays stay mapped.

XLA:CPU allocates its results anew at every call. With glibc's defaults each large array is mapped,
faulted in page by page and unmapped again, which costs more than a scan over it.
"""

from __future__ import annotations

import ctypes
import platform

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


def keep_freed_memory() -> bool:
    """Keeps freed memory in the process instead of returning it to the system.

    Call it before the first JAX computation: one arena serves all threads only if none has made its
    own. The process then holds its peak memory until it ends.

    Returns:
      Whether it took effect; False where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1))
    return all([bool(mallopt(name, value)) for name, value in settings])
