"""Memory that this process frees and wants again a moment later, as every training step does."""

from __future__ import annotations

import ctypes
import os
import sys

# glibc's own are 128 KiB (growing to 64 MiB), 128 KiB, and 128 KiB (growing to 32 MiB, the most that it takes).
_OPTIONS = {"M_TRIM_THRESHOLD": (-1, 1 << 30), "M_TOP_PAD": (-2, 64 << 20), "M_MMAP_THRESHOLD": (-3, 32 << 20)}


def keep_freed_memory() -> bool:
    """Have glibc keep up to 1 GiB of freed memory for what this process allocates next; returns whether it does.

    As it comes, it hands the memory of a step's activations back to the kernel and asks for it again at the next step,
    and the kernel fills every page with zeros. Without glibc nothing happens, and neither where one of its variables
    (`MALLOC_…_`, `GLIBC_TUNABLES`) is set: somebody has decided then.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(option, size) == 1 for option, size in _OPTIONS.values()])
