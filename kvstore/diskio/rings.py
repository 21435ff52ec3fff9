"""Whether io_uring is used."""

from __future__ import annotations

import logging
from typing import Literal, TypeAlias

__all__ = ["EngineChoice", "is_usable"]

_log = logging.getLogger("kvstore.diskio")

EngineChoice: TypeAlias = Literal["auto", "io_uring", "threads"]
"""What does the I/O: ``auto`` is io_uring where this kernel and container allow it, else threads."""


def is_usable(reason_against: str, name: str) -> bool:
    """Return whether there is nothing against io_uring; what there is goes to the log, with who would have used it."""
    if reason_against:
        _log.warning("io_uring can't be used here (%s); %s uses threads, which cost more CPU", reason_against, name)
    return not reason_against
