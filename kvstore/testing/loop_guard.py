"""Finds calls that block an event loop, by audit events and a replaced ``time.sleep`` instead of their duration."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any, Final, SupportsIndex

__all__ = ["LoopGuard"]

_SOURCES: Final = (".py", ".pyc", ".so")
"""Files that Python itself opens: for an import, or to show the lines of a traceback."""

_active: LoopGuard | None = None
_is_installed = False


class LoopGuard:
    """Notes the first blocking call on the entering thread while its event loop runs.

    ``time.sleep``, ``open``, ``sqlite3.connect`` and the connect of a blocking socket count as blocking. Calls within
    exempt methods do not count: the preparation of a test may block.

    Args:
        kinds: Classes that have these methods.
        exempt: Names of methods within which a call may block.

    Attributes:
        found: The call and its caller; empty without a blocking call.
    """

    def __init__(self, kinds: tuple[type, ...], exempt: frozenset[str]) -> None:
        self.found = ""
        self._kinds = kinds
        self._exempt = exempt
        self._thread = threading.get_ident()

    def __enter__(self) -> LoopGuard:
        global _active, _is_installed
        if not _is_installed:
            # Once: an audit hook can't be removed.
            sys.addaudithook(_on_event)
            _is_installed = True
        _active = self
        time.sleep = self._sleep  # Reported by Python 3.13 and later only.
        return self

    def __exit__(self, *exc_info: object) -> None:
        global _active
        _active = None
        time.sleep = _sleep

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        """Note an event of the interpreter, if it blocks the loop of this guard's thread."""
        if self.found or threading.get_ident() != self._thread or asyncio._get_running_loop() is None:
            return
        if event == "open" and (args[1] is None or str(args[0]).endswith(_SOURCES)):
            return  # os.open, for files that cannot block.
        if event == "socket.connect" and args[0].gettimeout() == 0:
            return
        frame: FrameType | None = sys._getframe(2)
        caller = frame
        while frame is not None:
            if frame.f_code.co_name in self._exempt and isinstance(frame.f_locals.get("self"), self._kinds):
                return
            frame = frame.f_back
        where = "".join(traceback.format_list(traceback.extract_stack(caller)[-4:]))
        self.found = f"{event} blocks the event loop; do it on a thread (asyncio.to_thread):\n{where}"

    def _sleep(self, seconds: float | SupportsIndex, /) -> None:
        self.note("time.sleep", (seconds,))
        _sleep(seconds)


_EVENTS: Final = frozenset({"open", "socket.connect", "sqlite3.connect"})
_sleep: Final = time.sleep


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS and _active is not None:
        _active.note(event, args)
