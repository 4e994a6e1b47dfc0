"""Fixtures that several files of unit tests share."""

from file_queue import cluster, say

__all__ = ["cluster", "say"]
