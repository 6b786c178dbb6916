"""The allocator's settings in runs on CPUs."""

from __future__ import annotations

import ctypes
import os
import platform

_MMAP_THRESHOLD = -3  # option of mallopt, malloc.h
_THRESHOLD_BYTES = 1024**2  # a smaller tensor's page faults would cost more than its memory


def return_freed_memory() -> bool:
    """Make the allocator return the memory of each large tensor to the system when it is freed; False if it cannot.

    By default glibc raises the size from which blocks have pages of their own to that of the largest block freed so
    far, up to 32 MiB. Activations then come from one heap, where tensors of ever different lengths leave gaps: a run
    holds a third more than it uses, and the more steps, the more. A size that is set is not raised. A value in the
    environment (``MALLOC_MMAP_THRESHOLD_``) is kept, and other C libraries are left alone.
    """
    if platform.libc_ver()[0] != "glibc" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    return bool(ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _THRESHOLD_BYTES))
