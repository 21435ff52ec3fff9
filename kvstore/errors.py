"""Errors, named by situation.

Every error that kvstore raises deliberately is a :class:`KVStoreError`. Its text contains the wrong value, the expected
value and the remedy. A miss is a value, never an error (see :class:`kvstore.types.Outcome`).
"""

from __future__ import annotations

__all__ = [
    "AbsentError",
    "BackendClosedError",
    "BackendError",
    "BackendUnavailableError",
    "ConfigError",
    "HostClosedError",
    "KVStoreError",
    "LockedError",
    "NoSpaceError",
    "RecordError",
]


class KVStoreError(Exception):
    """Base of all errors that kvstore raises deliberately."""


class ConfigError(KVStoreError, ValueError):
    """A configuration value can't be used; raised at start, before any change."""


class AbsentError(ConfigError):
    """This machine lacks something that the configuration names (a file, a directory, a drive), perhaps only now.

    A tier with ``"required": false`` starts without it, and tries again.
    """


class HostClosedError(KVStoreError):
    """A message was sent to an I/O host that is closed."""


class RecordError(KVStoreError):
    """A record failed verification; ``cause`` is its counter (a ``RecordFault`` value)."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class BackendError(KVStoreError):
    """A failure of a medium. Raised by the backend, chained ``from`` the cause.

    Args:
        message: The wrong value, the expected value, the remedy.
        backend: Name of the backend, such as ``"file"``.
        key: Key of the affected block, if the failure concerns a single one.
    """

    def __init__(self, message: str, *, backend: str, key: bytes | None = None) -> None:
        where = backend if key is None else f"{backend}, key {key.hex()[:16]}…"
        super().__init__(f"[{where}] {message}")
        self.backend = backend
        self.key = key


class BackendUnavailableError(BackendError):
    """The medium is unreachable or does not respond; a later attempt may succeed."""


class BackendClosedError(BackendError):
    """The backend was used before ``open`` or after ``close``."""


class NoSpaceError(BackendError):
    """The medium is full or at its limit (bytes, inodes, quota)."""


class LockedError(BackendError):
    """Another process holds the exclusive lock that this backend needs."""
