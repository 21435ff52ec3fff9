"""How much memory a piece of work took at its peak."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryRise", "memory_rise"]

_SELF = Path("/proc/self")


@dataclass(slots=True)
class MemoryRise:
    """Result of :func:`memory_rise`.

    Attributes:
        bytes: Rise of the process's memory to its peak; 0 until the end.
    """

    bytes: int = 0


@contextmanager
def memory_rise() -> Iterator[MemoryRise]:
    """Measure the rise of this process's resident memory, at its peak, within the ``with`` block.

    Linux can reset the peak. On other systems only a rise above the former peak is visible.
    """
    found = MemoryRise()
    try:
        (_SELF / "clear_refs").write_text("5")
        before = _resident("VmRSS")
    except OSError:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield found
    try:
        after = _resident("VmHWM")
    except OSError:
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found.bytes = max(0, after - before)


def _resident(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", (_SELF / "status").read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"the system does not tell {name}")
    return int(match[1]) * 1024
