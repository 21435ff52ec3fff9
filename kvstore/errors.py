"""Errors, named by situation.

Every error that kvstore raises on purpose is a :class:`KVStoreError`. Its text says what was wrong (with the value
shown), what was expected and what to do. A miss is never an error: it is a value (see :class:`kvstore.types.Outcome`).
"""

from __future__ import annotations

__all__ = [
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
    """Base of all errors that kvstore raises on purpose."""


class ConfigError(KVStoreError, ValueError):
    """A configuration value can't be used; raised at start, before anything was changed."""


class HostClosedError(KVStoreError):
    """A message was sent to an I/O host that is closed."""


class RecordError(KVStoreError):
    """A record failed verification; ``cause`` is the counter it is counted under (a ``RecordFault`` value)."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class BackendError(KVStoreError):
    """A medium failed. Made at the backend's edge and chained ``from`` the cause.

    Args:
        message: What was wrong, what was expected, what to do.
        backend: Name of the backend, such as ``"file"``.
        key: Key of the block concerned, if the failure belongs to one.
    """

    def __init__(self, message: str, *, backend: str, key: bytes | None = None) -> None:
        where = backend if key is None else f"{backend}, key {key.hex()[:16]}…"
        super().__init__(f"[{where}] {message}")
        self.backend = backend
        self.key = key


class BackendUnavailableError(BackendError):
    """The medium can't be reached or does not answer at present; trying again later may help."""


class BackendClosedError(BackendError):
    """The backend was used before ``open`` or after ``close``."""


class NoSpaceError(BackendError):
    """The medium is full or at its limit (bytes, inodes, quota)."""


class LockedError(BackendError):
    """Another process owns what this backend needs for itself alone."""
