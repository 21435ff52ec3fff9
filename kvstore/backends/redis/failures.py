"""Failures of the Redis backend and their outcomes."""

from __future__ import annotations

import re
from typing import Final

from kvstore.backends.redis.resp import ErrorReply
from kvstore.errors import BackendUnavailableError
from kvstore.types import Outcome


class RedisError(BackendUnavailableError):
    """Base of the failures of this backend."""

    outcome: Outcome = Outcome.IO_ERROR
    """Outcome of a block with this failure."""

    def __init__(self, message: str) -> None:
        super().__init__(message, backend="redis")
        self.bare = message
        """The text without the name of the backend."""


class ConnectionLostError(RedisError):
    """The connection broke while a response was outstanding; a retry on another connection may succeed."""


class NodeDownError(RedisError):
    """The node is unreachable at present."""


class SkippedError(NodeDownError):
    """The command was not sent, because its node is down or refuses; other nodes of the cluster still serve."""


class AnswerLateError(RedisError):
    """A response was late; its connection is closed."""

    outcome = Outcome.TIMEOUT


class ProtocolBrokenError(RedisError):
    """The server sent an invalid or unexpected response; its connection is closed."""


class ValueTooLongError(RedisError):
    """The value is longer than its buffers; none of it was received."""

    outcome = Outcome.CORRUPT


class ServerRefusedError(RedisError):
    """The server answered with an error."""

    def __init__(
        self, message: str, code: str, *, moved_to: tuple[str, int] | None = None, is_unknown_command: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code  # First word of the error.
        self.outcome = _OUTCOMES.get(code, Outcome.IO_ERROR)
        # For MOVED and ASK, host and port of the new node; an empty host means the responding node's host.
        self.moved_to = moved_to
        self.is_unknown_command = is_unknown_command  # Whether the server has no such command.


_OUTCOMES: Final = {
    "OOM": Outcome.NO_SPACE,
    **dict.fromkeys(("NOAUTH", "WRONGPASS", "NOPERM", "DENIED"), Outcome.REFUSED),
}

_REDIRECT: Final = re.compile(r"\d{1,5} ([^\s]{0,255}):(\d{1,5})(?:\s|$)", re.ASCII)

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
_NO_ADVICE: Final = "See the server's log."


def refusal(reply: ErrorReply) -> ServerRefusedError:
    """Return the exception for an error reply, without its text: servers echo arguments, which may be secrets."""
    code = reply.code if re.fullmatch(r"[A-Z]{2,20}", reply.code) else "ERR"
    match = _REDIRECT.match(reply.message) if code in ("MOVED", "ASK") else None
    return ServerRefusedError(
        f"the server answered {code}. {_ADVICE.get(code, _NO_ADVICE)}",
        code,
        moved_to=(match[1].strip("[]"), int(match[2])) if match and 0 < int(match[2]) < 65536 else None,
        # ERR alone may also mean that the server has too many clients.
        is_unknown_command=code == "ERR" and reply.message.lower().startswith("unknown command"),
    )
