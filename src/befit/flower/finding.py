"""One thing that the doctor looked at."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `mend` is empty where it is in order."""

    what: str
    found: str
    mend: str = ""
