"""Forked processes: objects with threads, rings or sockets go on in the parent, and are closed in the child."""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

OF_PARENT: Final = "It was opened before a fork and belongs to the parent process; open a new one in this process."


class Left(Protocol):
    """An object whose copy in a forked process must not be used."""

    def leave_to_parent(self) -> None:
        """Close this copy, without waiting and without changing anything that the parent uses."""


_left: Final[weakref.WeakSet[Left]] = weakref.WeakSet()


def leave_at_fork(each: Left) -> None:
    """Call ``each.leave_to_parent`` in every process that is forked from now on."""
    _left.add(each)


def _leave() -> None:
    for each in list(_left):
        each.leave_to_parent()


os.register_at_fork(after_in_child=_leave)
