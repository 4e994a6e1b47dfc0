"""What a reader of a run directory says where a file that must be there cannot be used."""

from __future__ import annotations


class DamagedFileError(Exception):
    """The text is one line: the file, and what it holds."""

    @classmethod
    def of(cls, path: object, holds: str) -> DamagedFileError:
        """The one form of it; `holds` completes "it holds ..."."""
        return cls(f"{path}: missing or damaged; it holds {holds}")
