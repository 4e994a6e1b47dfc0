"""GB is 10**9 bytes, GiB 2**30: GPU memory is counted in GiB, host memory and files in GB, as their tools do."""

from __future__ import annotations

GB = 10**9
GIB = 2**30
MIB = 2**20


def power_of_two_ceil(size: int) -> int:
    """The smallest power of two that is not below `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size > 0 else 0
