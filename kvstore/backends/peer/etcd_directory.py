"""A directory on an etcd server, through its JSON gateway: one key with a summary and a lease for each engine."""

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
"""Longest answer; a list of 1,024 engines takes some 300 KB in JSON."""

_SUMMARY_ANSWER_BYTES_MAX: Final = SUMMARY_BYTES_MAX * 4 // 3 + 2048
"""Longest answer with one summary, in base64."""

_HISTORY_BYTES_MAX: Final = 512 << 20
"""Most bytes of a fleet in the server's history: a quarter of the server's default limit. etcd keeps every version of a
key until it compacts its history, and refuses all writes once the limit is reached."""

_ADDRESS: Final = re.compile(rb"[!-~]{3,272}")

_Answer = TypeVar("_Answer")
_Trace: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[None]]


class _Code(enum.IntEnum):
    """gRPC codes of refusals whose names explain the cause."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    OUT_OF_RANGE = 11
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


_TOKEN_ENDED: Final = (_Code.UNAUTHENTICATED, _Code.INVALID_ARGUMENT)
"""Codes for a token that has expired, or is older than the last change of users and roles."""


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
    """The server refused a request. Its text is not kept, because servers quote arguments."""

    def __init__(self, code: int, status: int) -> None:
        super().__init__(_Code(code).name if code in tuple(_Code) else f"refused with status {status}")
        self.code = code


class _TooLongError(Exception):
    """An answer exceeds its length limit."""

    def __init__(self) -> None:
        super().__init__("an answer is too long")


@dataclass(slots=True)
class _Published:
    """This engine's entry.

    Attributes:
        lease: Number of its lease; 0 before the first one.
        summary: Summary as last written; empty if it must be written again.
        revision: Revision of the key after that write.
        history_from: Revision of the first version that may still be in the server's history.
        history_bytes: Total length of the versions since then.
        is_paused: Whether the summary is no longer updated, because ``history_bytes`` reached its limit.
    """

    lease: int = 0
    summary: bytes = b""
    revision: int = 0
    history_from: int = 0
    history_bytes: int = 0
    is_paused: bool = False


class EtcdDirectory(DirectoryClient):
    """Keys ``<prefix><namespace>:<address>`` with summaries as values; keys expire with their leases."""

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
        self._client: httpx2.AsyncClient
        self._extensions: dict[str, _Trace] = {}

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        """See :meth:`DirectoryClient.session`."""
        self._client = httpx2.AsyncClient(
            base_url=self._base,
            verify=self._context,
            timeout=float(self._config.connect_timeout),
            # No compression, because it would hide the length of an answer.
            headers={"Accept-Encoding": "identity"},
            limits=httpx2.Limits(max_connections=1),
            trust_env=False,
        )
        try:
            # The client's own timeout limits single steps only.
            async with asyncio.timeout(self._config.session_s), self._client, _closed_at_the_end() as trace:
                self._extensions = {"trace": trace}
                yield
        except (_RefusedError, _TooLongError) as error:
            raise BackendUnavailableError(f"{self._endpoint}: {error}", backend="peer") from None
        except (httpx2.HTTPError, OSError, msgspec.MsgspecError) as error:
            raise BackendUnavailableError(f"{self._endpoint}: {type(error).__name__}", backend="peer") from None

    async def announce(self, address: str, summary: bytes, lease_s: float) -> None:
        """See :meth:`DirectoryClient.announce`. An unchanged summary is not written again."""
        mine = self._published
        is_new = not mine.lease or not await self._renew(mine.lease)
        if is_new:
            mine.lease = (await self._call("lease/grant", {"TTL": math.ceil(lease_s)}, _Lease)).id
            mine.summary = b""
        if summary == mine.summary or not (is_new or await self._may_write(mine, len(summary))):
            return
        pair = {"key": self._prefix + address.encode(), "value": summary, "lease": mine.lease}
        mine.revision = (await self._call("kv/put", pair, _Put)).header.revision
        mine.summary = summary
        mine.history_from = mine.history_from if mine.history_bytes else mine.revision
        mine.history_bytes += len(summary)

    async def listed(self) -> tuple[Sequence[Listed], bool]:
        """See :meth:`DirectoryClient.listed`. etcd does not list the lengths of leases, so ours is assumed for all."""
        prefix = self._prefix
        # The prefix ends with ":", and ";" is the next character.
        wanted = {"key": prefix, "range_end": prefix[:-1] + b";", "keys_only": True, "limit": ENGINES_MAX}
        # The oldest first, so that a crowd of new entries does not hide the others.
        wanted |= {"sort_target": "CREATE", "sort_order": "ASCEND"}
        found = await self._call("kv/range", wanted, _Range)
        self._engines = max(1, len(found.kvs))
        mine = self._published
        if not (found.more or any((one.lease, one.mod_revision) == (mine.lease, mine.revision) for one in found.kvs)):
            # Our entry has been removed or overwritten.
            mine.summary = b""
        left_s = LEASE_INTERVALS * float(self._config.interval)
        listed = []
        for one in found.kvs:
            address = one.key[len(prefix) :]
            # Entries without a lease are ignored, because they would never expire.
            is_entry = one.lease and _ADDRESS.fullmatch(address)
            listed.append(
                Listed(address.decode("ascii") if is_entry else "", f"{one.lease}:{one.mod_revision}", left_s)
            )
        return listed, not found.more

    async def read(self, addresses: Sequence[str]) -> Sequence[bytes]:
        """See :meth:`DirectoryClient.read`."""
        try:
            return await self._read(addresses)
        except _TooLongError:
            # One of the entries is too long; reading them singly spares the others.
            return [await self._read_one(address) for address in addresses]

    async def withdraw(self, address: str) -> None:
        """See :meth:`DirectoryClient.withdraw`."""
        mine, self._published = self._published, _Published()
        if mine.lease:
            await self._call("lease/revoke", {"ID": mine.lease}, msgspec.Raw)

    async def _renew(self, lease: int) -> bool:
        """Renew a lease; return whether it was still valid."""
        return (await self._call("lease/keepalive", {"ID": lease}, _KeptAlive)).result.seconds > 0

    async def _may_write(self, mine: _Published, length: int) -> bool:
        """Return whether another version of this engine's summary fits in the server's history."""
        share = _HISTORY_BYTES_MAX // self._engines
        if not mine.history_bytes or mine.history_bytes + length <= share:
            return True
        key = self._prefix
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
                self._endpoint,
                mine.history_bytes,
            )
        return False

    async def _read(self, addresses: Sequence[str]) -> Sequence[bytes]:
        prefix = self._prefix
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
        """Call the server, with a new token if the current one has expired."""
        config = self._config
        if config.password is None:
            return await self._post(path, body, kind, bytes_max)
        had_token = bool(self._token)
        try:
            if had_token:
                return await self._post(path, body, kind, bytes_max)
        except _RefusedError as error:
            if error.code not in _TOKEN_ENDED:
                raise
        # The token is reused in later rounds, because checking a password takes some 50 ms of the server's CPU.
        user = {"name": config.username, "password": config.password.reveal()}
        self._token = ""
        self._token = (await self._post("auth/authenticate", user, _Token)).token
        return await self._post(path, body, kind, bytes_max)

    async def _post(
        self, path: str, body: dict[str, Any], kind: type[_Answer], bytes_max: int = _ANSWER_BYTES_MAX
    ) -> _Answer:
        token = self._token
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
        # Not strict, because the gateway sends numbers as strings.
        return msgspec.json.decode(data, type=kind, strict=False)


@contextlib.asynccontextmanager
async def _closed_at_the_end() -> AsyncIterator[_Trace]:
    """Yield a trace function for the HTTP client, and at the end close the connections that it recorded.

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
    """Return the endpoint of a URL, and whether it uses TLS; raises ConfigError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or _PORT
    except ValueError:
        host = None
    if not host or parts.scheme not in ("etcd", "etcds") or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(f"'url' is {url!r}. Expected such as 'etcd://host:2379', or 'etcds://…' with TLS.")
    return Endpoint(host, port), parts.scheme == "etcds"
