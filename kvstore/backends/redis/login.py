"""Logging in: from an address to a connection that may be used, or to the reason why there is none."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.backends.redis.config import RedisConfig
from kvstore.backends.redis.connection import Connection, Request, ask
from kvstore.backends.redis.failures import (
    AnswerLateError,
    ConnectionLostError,
    NodeDownError,
    ProtocolBrokenError,
    RedisError,
    ServerRefusedError,
    read_error,
)
from kvstore.backends.redis.resp import ErrorReply, Reply, encode_command
from kvstore.backends.stream import Endpoint, Stream, open_stream
from kvstore.errors import ConfigError

__all__ = ["ServerInfo", "check_secure", "explained", "logged_in"]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server said of itself when we logged in; empty where it said nothing."""

    version: str = ""
    mode: str = ""
    server: str = ""


def check_secure(endpoint: Endpoint, config: RedisConfig) -> None:
    """Refuse to send prompts and passwords readable over a network, unless told to."""
    if not (config.tls or config.insecure or endpoint.is_local):
        raise ConfigError(
            f"{endpoint} is another machine and 'url' has no TLS. Use 'rediss://', or set 'insecure' to true on a "
            "network that you trust."
        )


async def logged_in(
    endpoint: Endpoint,
    config: RedisConfig,
    context: ssl.SSLContext | None,
    connection_over: Callable[[Stream], Connection],
    *,
    database: int,
    is_replica: bool,
) -> tuple[Connection, ServerInfo | None]:
    """Return a connection that is logged in, and what the server said of itself.

    Raises:
        RedisError: There is none; the text says why.
    """
    try:
        async with asyncio.timeout(config.connect_timeout):
            stream = await open_stream(endpoint, context)
            try:
                connection = connection_over(stream)
            except BaseException:
                stream.close(abort=True)
                raise
            try:
                info = await _log_in(connection, config, database, is_replica=is_replica)
                if connection.closed:
                    # Between its last answer and here, when nobody listened.
                    raise ConnectionLostError("the server let us in and closed the connection at once")
            except BaseException:
                connection.close()
                raise
    # ValueError and OverflowError: a name or port that a server gave and that no socket takes.
    except (OSError, ValueError, OverflowError, RedisError) as error:
        raise explained(error, endpoint, config) from error
    return connection, info


def explained(error: Exception, endpoint: Endpoint, config: RedisConfig) -> RedisError:
    """Return what to tell of a failed try to connect; never the text of the server, which may echo a password."""
    if isinstance(error, ServerRefusedError):
        return ServerRefusedError(f"{endpoint}: {_bare(error)}", error.code)
    if isinstance(error, (AnswerLateError, ProtocolBrokenError, ConnectionLostError)):
        return NodeDownError(f"{endpoint}: {_bare(error)}")
    if isinstance(error, TimeoutError):
        return NodeDownError(f"{endpoint}: no connection within {float(config.connect_timeout)} s. Is it up?")
    if isinstance(error, ssl.SSLCertVerificationError):
        return NodeDownError(f"{endpoint}: its certificate is not trusted: {error.verify_message}. Set 'tls_ca'.")
    if isinstance(error, ssl.SSLError):
        return NodeDownError(f"{endpoint}: TLS failed ({error.reason}). Does it speak TLS on this port?")
    number = getattr(error, "errno", None) or 0
    # The text of what asyncio raises names the address once more, and not the reason. Of a name that is not known there
    # is no other text; its number is below zero.
    reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or type(error).__name__
    return NodeDownError(f"{endpoint}: {reason}. Is the server up, and the address right?")


async def _log_in(connection: Connection, config: RedisConfig, database: int, *, is_replica: bool) -> ServerInfo | None:
    """Say who we are; servers that know no HELLO (before Redis 6) are given AUTH."""
    password = config.password.reveal().encode() if config.password else b""
    user = config.username.encode() or b"default"
    auth = [b"AUTH", user, password] if password else []
    # The name is for those who look at the server's list of clients.
    hello = await _ask(connection, b"HELLO", b"2", *auth, b"SETNAME", b"kvstore")
    if isinstance(hello, ErrorReply):
        refused = read_error(hello).error
        # An ERR may also be that there are too many clients already.
        is_old = refused.code == "ERR" and hello.message.lower().startswith("unknown command")
        if not is_old and refused.code not in ("NOPERM", "NOPROTO"):
            raise refused
        if password:
            await _insist(connection, b"AUTH", *([user] if config.username else []), password)
    if database:
        await _insist(connection, b"SELECT", b"%d" % database)
    if is_replica:
        await _insist(connection, b"READONLY", but=("ERR",))
    return _server_info(hello) if isinstance(hello, list) else None


async def _insist(connection: Connection, *command: bytes, but: Sequence[str] = ()) -> None:
    reply = await _ask(connection, *command)
    if isinstance(reply, ErrorReply):
        refused = read_error(reply).error
        if refused.code not in but:
            raise refused


async def _ask(connection: Connection, *command: bytes) -> Reply:
    def cancel(request: Request) -> None:
        # First: closing would have it sent again, on a connection that is logged in.
        request.abandon()
        connection.close()

    return await ask(encode_command(*command), connection.submit, cancel)


def _server_info(pairs: list[Reply]) -> ServerInfo:
    """Read the answer to HELLO."""
    found = {}
    for name, value in zip(pairs[::2], pairs[1::2], strict=False):
        if isinstance(name, bytes) and isinstance(value, bytes):
            found[name] = value.decode("utf-8", "replace")
    return ServerInfo(found.get(b"version", ""), found.get(b"mode", ""), found.get(b"server", ""))


def _bare(error: RedisError) -> str:
    return str(error).partition("] ")[2]
