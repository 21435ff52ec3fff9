"""A directory on an etcd server, by its JSON gateway: one key for each engine, with its summary, on a lease."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import urlsplit

import httpx2
import msgspec

from kvstore.backends.peer.config import DirectoryConfig
from kvstore.backends.peer.directory import ENGINES_MAX, LEASE_INTERVALS, DirectoryClient, Listed
from kvstore.backends.peer.summary import SUMMARY_BYTES_MAX
from kvstore.backends.stream import Endpoint, check_encrypted, client_context
from kvstore.errors import BackendUnavailableError, ConfigError

__all__ = ["EtcdDirectory"]

logger = logging.getLogger("kvstore.backends.peer")

_PORT: Final = 2379

_ANSWER_BYTES_MAX: Final = 1 << 20
"""Longest answer: a list of 2,048 engines has some 600 KB in JSON."""

_SUMMARY_ANSWER_BYTES_MAX: Final = SUMMARY_BYTES_MAX * 4 // 3 + 2048
"""Longest answer with a summary, which is in base64."""

_HISTORY_BYTES_MAX: Final = 512 << 20
"""What a fleet leaves in the server's history, a quarter of the server's default limit: etcd keeps every version of a
key until it compacts its history, and takes no writes from anybody once that limit is reached."""

_ADDRESS: Final = re.compile(rb"[!-~]{3,272}")

_Answer = TypeVar("_Answer")
_Trace: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[None]]


class _Code(enum.IntEnum):
    """gRPC's codes of refusals that need no look at the server's log."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    OUT_OF_RANGE = 11
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


_TOKEN_ENDED: Final = (_Code.UNAUTHENTICATED, _Code.INVALID_ARGUMENT)
"""Refusals of a token that has expired, or is older than the last change of users and roles."""


class _Pair(msgspec.Struct):
    key: bytes
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class _Range(msgspec.Struct):
    kvs: list[_Pair] = []
    more: bool = False


class _RangeResponse(msgspec.Struct):
    response_range: _Range


class _Transaction(msgspec.Struct):
    responses: list[_RangeResponse] = []


class _Header(msgspec.Struct):
    revision: int


class _Put(msgspec.Struct):
    header: _Header


class _Lease(msgspec.Struct):
    id: int = msgspec.field(name="ID")


class _TimeToLive(msgspec.Struct):
    seconds: int = msgspec.field(name="TTL", default=0)


class _KeptAlive(msgspec.Struct):
    result: _TimeToLive


class _Token(msgspec.Struct):
    token: str


class _Refusal(msgspec.Struct):
    code: int = 0


class _RefusedError(Exception):
    """The server refused a request. Its text is not kept: servers quote arguments."""

    def __init__(self, code: int, status: int) -> None:
        super().__init__(_Code(code).name if code in tuple(_Code) else f"refused with status {status}")
        self.code = code


class _TooLongError(Exception):
    """An answer is longer than any that was asked for."""

    def __init__(self) -> None:
        super().__init__("an answer is too long")


@dataclass(slots=True)
class _Published:
    """This engine's entry.

    Attributes:
        lease: Number of its lease; 0 before the first one.
        summary: As it was written last; empty if it has to be written again.
        revision: Of the key then.
        history_from: Revision of the first version that may still be in the server's history.
        history_bytes: Length of the versions since.
        is_paused: Whether the summary is not renewed, as there are too many of these.
    """

    lease: int = 0
    summary: bytes = b""
    revision: int = 0
    history_from: int = 0
    history_bytes: int = 0
    is_paused: bool = False


class EtcdDirectory(DirectoryClient):
    """Keys ``<prefix><namespace>:<address>``, whose values are summaries and which end with their leases."""

    def __init__(self, config: DirectoryConfig, namespace_hex: str) -> None:
        self._config = config
        self._endpoint, is_encrypted = _parsed(config.url)
        check_encrypted(self._endpoint, is_encrypted=is_encrypted, insecure=config.insecure, scheme="etcds")
        if bool(config.username) != bool(config.password):
            raise ConfigError("etcd needs 'username' and 'password', or neither. Give both.")
        self._base = f"{'https' if is_encrypted else 'http'}://{self._endpoint}/v3/"
        self._context = is_encrypted and client_context(
            ca=config.tls_ca, cert=config.tls_cert, key=config.tls_key, check_hostname=config.tls_check_hostname
        )
        self._prefix = f"{config.prefix}{namespace_hex}:".encode()
        self._token = ""
        self._published = _Published()
        self._engines = 1

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[_Session]:
        """See :meth:`DirectoryClient.session`."""
        client = httpx2.AsyncClient(
            base_url=self._base,
            verify=self._context,
            timeout=float(self._config.connect_timeout),
            # No compression, which would hide the length of an answer.
            headers={"Accept-Encoding": "identity"},
            limits=httpx2.Limits(max_connections=1),
            trust_env=False,
        )
        try:
            # The client's limit is for each step only.
            async with asyncio.timeout(self._config.session_s), client, _closed_at_the_end() as trace:
                yield _Session(self, client, trace)
        except (_RefusedError, _TooLongError) as error:
            raise BackendUnavailableError(f"{self._endpoint}: {error}", backend="peer") from None
        except (httpx2.HTTPError, OSError, msgspec.MsgspecError) as error:
            raise BackendUnavailableError(f"{self._endpoint}: {type(error).__name__}", backend="peer") from None


class _Session:
    """See :class:`DirectorySession`."""

    def __init__(self, directory: EtcdDirectory, client: httpx2.AsyncClient, trace: _Trace) -> None:
        self._directory = directory
        self._client = client
        self._extensions = {"trace": trace}

    async def announce(self, address: str, summary: bytes, lease_s: float) -> None:
        """See :meth:`DirectorySession.announce`. A summary that has not changed is not written again."""
        mine = self._directory._published
        is_new = not mine.lease or not await self._renew(mine.lease)
        if is_new:
            mine.lease = (await self._call("lease/grant", {"TTL": math.ceil(lease_s)}, _Lease)).id
            mine.summary = b""
        if summary == mine.summary or not (is_new or await self._may_write(mine, len(summary))):
            return
        pair = {"key": self._directory._prefix + address.encode(), "value": summary, "lease": mine.lease}
        mine.revision = (await self._call("kv/put", pair, _Put)).header.revision
        mine.summary = summary
        mine.history_from = mine.history_from if mine.history_bytes else mine.revision
        mine.history_bytes += len(summary)

    async def listed(self) -> Sequence[Listed]:
        """See :meth:`DirectorySession.listed`. How long leases last is not listed, so all last as long as ours."""
        directory, prefix = self._directory, self._directory._prefix
        # ";" comes after ":", with which the prefix ends.
        wanted = {"key": prefix, "range_end": prefix[:-1] + b";", "keys_only": True, "limit": ENGINES_MAX}
        found = await self._call("kv/range", wanted, _Range)
        directory._engines = max(1, len(found.kvs))
        mine = directory._published
        if not (found.more or any((one.lease, one.mod_revision) == (mine.lease, mine.revision) for one in found.kvs)):
            # Somebody has removed or overwritten it.
            mine.summary = b""
        left_s = LEASE_INTERVALS * float(directory._config.interval)
        listed = []
        for one in found.kvs:
            address = one.key[len(prefix) :]
            # An entry without a lease would stay for ever.
            is_entry = one.lease and _ADDRESS.fullmatch(address)
            listed.append(
                Listed(address.decode("ascii") if is_entry else "", f"{one.lease}:{one.mod_revision}", left_s)
            )
        return listed

    async def read(self, addresses: Sequence[str]) -> Sequence[bytes]:
        """See :meth:`DirectorySession.read`."""
        try:
            return await self._read(addresses)
        except _TooLongError:
            # The fault of one of them.
            return [await self._read_one(address) for address in addresses]

    async def withdraw(self, address: str) -> None:
        """See :meth:`DirectorySession.withdraw`."""
        mine, self._directory._published = self._directory._published, _Published()
        if mine.lease:
            await self._call("lease/revoke", {"ID": mine.lease}, msgspec.Raw)

    async def _renew(self, lease: int) -> bool:
        """Renew a lease; return whether it had not ended."""
        return (await self._call("lease/keepalive", {"ID": lease}, _KeptAlive)).result.seconds > 0

    async def _may_write(self, mine: _Published, length: int) -> bool:
        """Return whether one more version of this engine's summary fits in the server's history."""
        share = _HISTORY_BYTES_MAX // self._directory._engines
        if not mine.history_bytes or mine.history_bytes + length <= share:
            return True
        key = self._directory._prefix
        try:
            await self._call("kv/range", {"key": key, "revision": mine.history_from, "count_only": True}, _Range)
        except _RefusedError as error:
            if error.code != _Code.OUT_OF_RANGE:
                raise
            mine.history_bytes, mine.is_paused = 0, False
            return True
        if not mine.is_paused:
            mine.is_paused = True
            logger.warning(
                "The etcd server %s keeps its history, of which this engine has written %d bytes. Its summary is not "
                "renewed until the server is compacted: start it with --auto-compaction-retention.",
                self._directory._endpoint,
                mine.history_bytes,
            )
        return False

    async def _read(self, addresses: Sequence[str]) -> Sequence[bytes]:
        prefix = self._directory._prefix
        wanted = [{"request_range": {"key": prefix + address.encode()}} for address in addresses]
        bytes_max = len(wanted) * _SUMMARY_ANSWER_BYTES_MAX
        found = (await self._call("kv/txn", {"success": wanted}, _Transaction, bytes_max)).responses
        return [one.response_range.kvs[0].value if one.response_range.kvs else b"" for one in found]

    async def _read_one(self, address: str) -> bytes:
        try:
            return (await self._read([address]))[0]
        except _TooLongError:
            return b""

    async def _call(
        self, path: str, body: dict[str, Any], kind: type[_Answer], bytes_max: int = _ANSWER_BYTES_MAX
    ) -> _Answer:
        """Call the server, with a new token if the last session's has ended."""
        directory, config = self._directory, self._directory._config
        if config.password is None:
            return await self._post(path, body, kind, bytes_max)
        had_token = bool(directory._token)
        try:
            if had_token:
                return await self._post(path, body, kind, bytes_max)
        except _RefusedError as error:
            if error.code not in _TOKEN_ENDED:
                raise
        # Kept from round to round, as a password costs the server some 50 ms of CPU.
        user = {"name": config.username, "password": config.password.reveal()}
        directory._token = ""
        directory._token = (await self._post("auth/authenticate", user, _Token)).token
        return await self._post(path, body, kind, bytes_max)

    async def _post(
        self, path: str, body: dict[str, Any], kind: type[_Answer], bytes_max: int = _ANSWER_BYTES_MAX
    ) -> _Answer:
        token = self._directory._token
        headers = {"Authorization": token} if token else {}
        data = bytearray()
        content = msgspec.json.encode(body)
        async with self._client.stream(
            "POST", path, content=content, headers=headers, extensions=self._extensions
        ) as answer:
            async for piece in answer.aiter_raw():
                data += piece
                if len(data) > bytes_max:
                    raise _TooLongError
        if answer.status_code != httpx2.codes.OK:
            code = 0
            with contextlib.suppress(msgspec.MsgspecError):
                code = msgspec.json.decode(data, type=_Refusal).code
            raise _RefusedError(code, answer.status_code)
        # Not strict: the gateway sends numbers as texts.
        return msgspec.json.decode(data, type=kind, strict=False)


@contextlib.asynccontextmanager
async def _closed_at_the_end() -> AsyncIterator[_Trace]:
    """Yield a trace function of the HTTP client, and close the connections that it saw at the end.

    The client does not close a connection whose TLS handshake is cancelled; an event loop with an open transport
    cannot be closed.
    """
    streams: list[Any] = []

    async def trace(event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            streams.append(info["return_value"])

    try:
        yield trace
    finally:
        for stream in streams:
            await stream.aclose()


def _parsed(url: str) -> tuple[Endpoint, bool]:
    """Return where a URL points to, and whether with TLS; else ConfigError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or _PORT
    except ValueError:
        host = None
    if not host or parts.scheme not in ("etcd", "etcds") or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(f"'url' is {url!r}. Expected such as 'etcd://host:2379', or 'etcds://…' with TLS.")
    return Endpoint(host, port), parts.scheme == "etcds"
