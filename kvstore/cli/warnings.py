"""Warnings of the library during a command, printed once each at its end."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Final, Self

from kvstore.cli.reporting.terminal import say

__all__ = ["Warnings"]

_MESSAGES_MAX: Final = 32
"""Most different warnings printed."""


class Warnings(logging.Handler):
    """Collects warnings of ``kvstore`` within a ``with`` block and writes them to stderr when it ends.

    Earlier output would interrupt the progress line.

    Args:
        name: Name of the program.
    """

    def __init__(self, name: str) -> None:
        super().__init__(logging.WARNING)
        self._name = name
        self._messages: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record."""
        if len(self._messages) < _MESSAGES_MAX:
            self._messages[record.getMessage()] = None

    def drop(self, text: str) -> None:
        """Forget warnings that only repeat another printed text."""
        self._messages = {message: None for message in self._messages if not message.endswith(text)}

    def __enter__(self) -> Self:
        logging.getLogger("kvstore").addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        logging.getLogger("kvstore").removeHandler(self)
        for message in self._messages:
            say(f"{self._name}: warning: {message}")
