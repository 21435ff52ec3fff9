"""Stopping a process (SIGSTOP) so that it has really stopped: a thread that still runs would answer once more."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kvstore.testing.waiting import eventually


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    eventually(
        lambda: all(") T " in (one / "stat").read_text() for one in threads.iterdir()), what="all threads to stop"
    )
