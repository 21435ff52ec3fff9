"""Failures of the Redis backend: what the server or the connection did, and what follows from it."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from kvstore.backends.redis.resp import ErrorReply
from kvstore.errors import BackendUnavailableError
from kvstore.types import Outcome

__all__ = [
    "AnswerLateError",
    "ConnectionLostError",
    "NodeDownError",
    "ProtocolBrokenError",
    "ReadError",
    "RedisError",
    "Remedy",
    "ServerRefusedError",
    "ValueTooLongError",
    "outcome_of_failure",
    "read_error",
]

NAME: Final = "redis"


class RedisError(BackendUnavailableError):
    """Base of the failures of this backend."""

    def __init__(self, message: str) -> None:
        super().__init__(message, backend=NAME)


class ConnectionLostError(RedisError):
    """The connection broke while an answer was outstanding; another one may do."""


class NodeDownError(RedisError):
    """No connection to the node can be had at present."""


class AnswerLateError(RedisError):
    """An answer did not come in time; its connection is closed."""


class ProtocolBrokenError(RedisError):
    """The server sent what is no answer to what was asked; its connection is closed."""


class ValueTooLongError(RedisError):
    """The value is longer than the buffers; nothing of it was received."""


class ServerRefusedError(RedisError):
    """The server answered with an error; ``code`` is its first word."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Remedy(enum.Enum):
    """What may help against an error that a server answered."""

    NOTHING = "nothing"
    MOVED = "moved"
    """Ask the named node, now and from now on."""
    ASK = "ask"
    """Ask the named node, this once."""
    LATER = "later"
    """Ask again in a moment: a slot is being moved."""
    REFRESH = "refresh"
    """The server is not, or no longer, the one to ask: find out who is, for the commands to come."""


@dataclass(frozen=True, slots=True)
class ReadError:
    """An error reply, understood. ``host`` and ``port`` are set for MOVED and ASK; an empty host is the same host."""

    remedy: Remedy
    error: ServerRefusedError
    host: str = ""
    port: int = 0


_REDIRECT: Final = re.compile(r"\d{1,5} ([^\s]{0,255}):(\d{1,5})(?:\s|$)", re.ASCII)

_REMEDIES: Final = {
    "TRYAGAIN": Remedy.LATER,
    "CLUSTERDOWN": Remedy.REFRESH,
    "READONLY": Remedy.REFRESH,
    "MASTERDOWN": Remedy.REFRESH,
    "LOADING": Remedy.REFRESH,
}

_ADVICE: Final = {
    "OOM": "The server is full and may evict nothing: set maxmemory-policy to allkeys-lru, or give it more memory.",
    "NOAUTH": "Give 'username' and 'password'.",
    "WRONGPASS": "Correct 'username' and 'password'.",
    "NOPERM": "Give the user the rights that docs/redis.md lists, on keys with this prefix.",
    "READONLY": "This is a replica: name the master, or the Sentinels.",
    "LOADING": "The server is still reading its data from disk.",
    "CLUSTERDOWN": "The cluster does not serve all of its slots.",
    "MASTERDOWN": "The replica has lost its master.",
    "MOVED": "This is a node of a cluster: set 'mode' to 'cluster' or 'auto'.",
    "MISCONF": "The server can't write its snapshot and refuses writes: give it disk space, or switch snapshots off.",
    "DENIED": "The server is in protected mode: give it a password, or bind it to a private network.",
}


def read_error(reply: ErrorReply) -> ReadError:
    """Return what an error reply means. Its text goes no further: servers echo arguments, and so secrets."""
    code = reply.code if re.fullmatch(r"[A-Z]{2,20}", reply.code) else "ERR"
    advice = _ADVICE.get(code, "See the server's log.")
    error = ServerRefusedError(f"the server answered {code}. {advice}", code)
    if code in ("MOVED", "ASK"):
        match = _REDIRECT.match(reply.message)
        if match and 0 < int(match[2]) < 65536:
            return ReadError(Remedy[code], error, match[1].strip("[]"), int(match[2]))
        return ReadError(Remedy.NOTHING, error)
    return ReadError(_REMEDIES.get(code, Remedy.NOTHING), error)


def outcome_of_failure(error: BaseException) -> Outcome:
    """Map a failure to the outcome of a block."""
    if isinstance(error, AnswerLateError):
        return Outcome.TIMEOUT
    if isinstance(error, ValueTooLongError):
        return Outcome.CORRUPT
    if isinstance(error, ServerRefusedError):
        if error.code == "OOM":
            return Outcome.NO_SPACE
        if error.code in ("NOAUTH", "WRONGPASS", "NOPERM", "DENIED"):
            return Outcome.REFUSED
    return Outcome.IO_ERROR
