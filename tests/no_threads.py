"""A process that can start no thread, as in a container at its limit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Prevent new threads: each would need a larger stack than any machine has."""
    before = threading.stack_size(1 << 62)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=int).start()
        yield
    finally:
        threading.stack_size(before)
