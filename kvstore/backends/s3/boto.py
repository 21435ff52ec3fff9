"""The client that uses aioboto3's own calls, for features of botocore such as proxies and S3 Express.

It copies each body twice, and a call takes more than a millisecond of Python. botocore's retries and redirects are off,
and the size of responses is checked before botocore reads them.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.credentials import AioCredentials
from aiobotocore.httpsession import AIOHTTPSession

from kvstore.backends.s3.client import ListPage, ObjectClient, ObjectInfo, check_range
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.credentials import (
    UNSIGNED,
    CurrentCredentials,
    ReadOnlyCredentials,
    ResponseParserError,
    find_credentials,
    make_session,
    unavailable,
)
from kvstore.backends.s3.credentials import exceptions as boto
from kvstore.backends.s3.failures import Cause, S3Error, error_of_part, error_of_response
from kvstore.backends.s3.http import TEXT_BYTES_MAX, parse_xml
from kvstore.backends.stream import TLS
from kvstore.backends.vectored import scatter
from kvstore.errors import BackendClosedError

logger = logging.getLogger("kvstore.backends.s3")

_TELLING_LOGGERS: Final = ("botocore.auth", "botocore.endpoint")
"""Loggers that print requests with all headers. The user sets their level."""

_Calls = dict[asyncio.Task[Any], list[aiohttp.ClientResponse]]
"""Responses by running call: botocore drops an unparsable response without closing its connection."""

_CAUSES: Final[tuple[tuple[Cause, tuple[type[BaseException], ...]], ...]] = (
    (Cause.TLS, (ssl.SSLError, aiohttp.ClientSSLError, boto.SSLError)),
    (Cause.DNS, (socket.gaierror,)),
    (Cause.REFUSED, (ConnectionRefusedError,)),
    (Cause.TIMEOUT, (boto.ConnectTimeoutError, boto.ReadTimeoutError)),
    (Cause.CUT, (boto.IncompleteReadError, aiohttp.ClientPayloadError, asyncio.IncompleteReadError)),
    (Cause.PROTOCOL, (aiohttp.ClientResponseError, aiohttp.http_exceptions.HttpProcessingError)),
    (Cause.XML_ERROR, (ResponseParserError,)),
    (Cause.REFUSED, (aiohttp.ClientConnectorError, boto.ProxyConnectionError)),
    (Cause.RESET, (aiohttp.ClientConnectionError, boto.ConnectionClosedError, ConnectionError)),
)
"""Exception types by cause, the most specific first; matched against an exception and its chain."""

_FAILURES: Final = (boto.BotoCoreError, boto.ClientError, ResponseParserError, aiohttp.ClientError, OSError, EOFError)


class BotoClient(ObjectClient):
    """Client with aioboto3."""

    def __init__(self, config: S3Config) -> None:
        super().__init__(config)
        self._client: Any = None
        self._stack = AsyncExitStack()
        self._calls: _Calls = {}
        self._payer = {"RequestPayer": "requester"} if config.requester_pays else {}

    def check(self) -> None:
        super().check()
        make_session(self._config)

    async def open(self) -> None:
        config = self._config
        loud = [name for name in _TELLING_LOGGERS if logging.getLogger(name).isEnabledFor(logging.DEBUG)]
        if loud:
            logger.warning(
                "The loggers %s are at DEBUG, where botocore writes session tokens and keys of SSE-C into the log. "
                "Set the logger 'botocore' to INFO.",
                " and ".join(loud),
            )
        session, region = await asyncio.to_thread(make_session, config)
        if not config.anonymous:
            # botocore searches only when it signs the first request; the search here makes missing credentials fail
            # the start.
            self._credentials = await find_credentials(config, session, self._credentials)
            session._session._credentials = _LiveCredentials(self._credentials)
        if self._config.tls_ca is not None:
            await self._tls.current()
        options = {
            "region_name": region,
            "endpoint_url": config.endpoint or None,
            "config": AioConfig(
                signature_version=UNSIGNED if config.anonymous else None,
                connect_timeout=config.connect_timeout,
                # Each attempt has its own, shorter deadline.
                read_timeout=None,
                max_pool_connections=config.concurrency,
                retries={"total_max_attempts": 1, "mode": "standard"},
                s3={"addressing_style": "path" if config.path_style else "virtual", "payload_signing_enabled": False},
                request_checksum_calculation=config.checksums,
                response_checksum_validation="when_required",
                ignore_configured_endpoint_urls=True,
                http_session_cls=functools.partial(_BoundedSession, self._tls, self._calls),
            ),
        }
        # First on a thread: botocore reads and caches megabytes of JSON.
        await asyncio.to_thread(asyncio.run, _opened_once(session, options))
        self._client = await self._stack.enter_async_context(session.client("s3", **options))

    async def close(self) -> None:
        self._client = None
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)
        await self._stack.aclose()
        if self._credentials is not None:
            await self._credentials.close()
        # Closed transports release their sockets in later iterations of the loop; run some, as the loop may end here.
        for _ in range(3):
            await asyncio.sleep(0)

    async def _put(
        self, key: str, buffers: Sequence[bytes | memoryview], timeout_s: float, condition: Mapping[str, str]
    ) -> str:
        # Copied: botocore takes a single body, and may still reference it after a cancelled call.
        body = b"".join(buffers)
        arguments: dict[str, Any] = {name.replace("-", ""): value for name, value in condition.items()}
        if not self._config.is_express:
            # Makes services reject a truncated body: without it, SeaweedFS stores an empty object. Directory buckets
            # of S3 Express accept no MD5; S3 itself rejects a body that is shorter than its Content-Length.
            digest = hashlib.md5(body, usedforsecurity=False).digest()
            arguments["ContentMD5"] = base64.b64encode(digest).decode()
        answer = await self._call("put_object", timeout_s, Key=key, Body=body, **arguments, **_encryption(self._config))
        return str(answer.get("ETag", ""))

    async def _get_into(
        self, key: str, buffers: Sequence[memoryview], capacity: int, timeout_s: float, offset: int | None
    ) -> ObjectInfo:
        wanted: dict[str, Any] = {} if offset is None else {"Range": f"bytes={offset}-{offset + capacity - 1}"}
        read = functools.partial(_read_into, buffers, capacity, offset)
        answer = await self._call("get_object", timeout_s, read, Key=key, **wanted, **_customer_key(self._config))
        return ObjectInfo(key, answer["ContentLength"], answer.get("ETag", ""))

    async def _head(self, key: str, timeout_s: float) -> ObjectInfo:
        return _info_of(
            key, await self._call("head_object", timeout_s, Key=key, **_customer_key(self._config)), "ContentLength"
        )

    async def _delete_many(self, keys: Sequence[str], timeout_s: float) -> None:
        names = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        answer = await self._call("delete_objects", timeout_s, Delete=names)
        for failed in answer.get("Errors", ()):
            raise error_of_part(str(failed.get("Code", "")))

    async def _list_page(self, prefix: str, timeout_s: float, start_after: str) -> ListPage:
        after: dict[str, Any] = {"StartAfter": start_after} if start_after else {}
        page = await self._call("list_objects_v2", timeout_s, Prefix=prefix, **after)
        objects = [_info_of(each["Key"], each, "Size") for each in page.get("Contents", ())]
        return ListPage(objects, bool(page.get("IsTruncated")))

    async def _call(
        self, method: str, timeout_s: float, read: Callable[[Any], Awaitable[None]] | None = None, **arguments: Any
    ) -> Any:
        """Make one attempt and read the body with ``read``. Failures become S3Error; closing ends the attempt."""
        client, task = self._client, asyncio.current_task()
        if client is None or task is None:
            raise BackendClosedError("not open: use it after open() and before close()", backend="s3")
        answers = self._calls[task] = []
        try:
            async with asyncio.timeout(timeout_s):
                answer = await getattr(client, method)(Bucket=self._config.bucket, **arguments, **self._payer)
                if read is not None:
                    await read(answer)
                return answer
        except asyncio.CancelledError:
            if self._client is None and task.uncancel() == 0:
                raise S3Error(Cause.CLOSED, "The client was closed.") from None
            raise
        except TimeoutError:
            raise S3Error(Cause.TIMEOUT, f"No answer within {timeout_s:.3g} s.") from None
        except _FAILURES as error:
            failure = _failure_of(error)
            if failure.cause is Cause.TLS:
                await self._tls.refused(self._tls.value, "TLS with the S3 service fails")
            raise failure from None
        finally:
            del self._calls[task]
            for raw in answers:
                # No effect on responses read to the end: their connections are back in the pool.
                raw.close()


class _LiveCredentials(AioCredentials):  # type: ignore[misc]
    """Credentials for botocore's signatures, looked up for each request."""

    def __init__(self, current: CurrentCredentials) -> None:
        super().__init__("", "")
        self._current = current

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        found = await self._current.get()
        return ReadOnlyCredentials(found.access_key, found.secret_key, found.token)


class _BoundedSession(AIOHTTPSession):  # type: ignore[misc]
    """HTTP session for botocore that follows no redirects and bounds the size of responses."""

    def __init__(self, tls: TLS, calls: _Calls, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tls = tls
        self._calls = calls

    def _get_ssl_context(self) -> ssl.SSLContext:
        return self._tls.value

    async def _get_session(self, proxy_url: str | None) -> Any:
        context = await self._tls.current()
        session = await super()._get_session(proxy_url)
        if not proxy_url:
            session.connector._ssl = context  # For new connections.
        # aiohttp would repeat a GET on a broken connection; only ObjectClient retries.
        session._retry_connection = False
        return _Redirectless(session)

    async def send(self, request: Any) -> Any:
        """Send a request; an object's body stays in the stream."""
        streamed, request.stream_output = request.stream_output, True
        answer = await super().send(request)
        task = asyncio.current_task()
        if task in self._calls:
            # Closed at the end of the call, also after failures.
            self._calls[task].append(answer.raw)
        if answer.status_code >= 300:
            # Raised here, because botocore reacts to some errors by searching for the bucket's region.
            raise error_of_response(answer.status_code, (await _bounded(answer.raw)).decode("utf-8", "replace"))
        if not streamed:
            answer._content = body = await _bounded(answer.raw)
            # botocore's own XML parser has no bounds.
            if (body.lstrip()[:1] == b"<" or b"\0" in body[:4]) and parse_xml(body).tag == "Error":
                raise error_of_response(200, body.decode("utf-8", "replace"))
        return answer


class _Redirectless:
    """Wraps an aiohttp session without redirects, because aiohttp would forward all headers, including SSE-C keys."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    def request(self, *args: Any, **options: Any) -> Awaitable[aiohttp.ClientResponse]:
        """Send a request."""
        return self._session.request(*args, **options, allow_redirects=False)


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    pieces, size = [], 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > TEXT_BYTES_MAX:
            raise S3Error(Cause.PROTOCOL, "An answer is longer than any text of a service.")
    return b"".join(pieces)


async def _read_into(buffers: Sequence[memoryview], capacity: int, offset: int | None, answer: Any) -> None:
    stream: aiohttp.ClientResponse = answer["Body"]
    status, size = answer["ResponseMetadata"]["HTTPStatusCode"], answer.get("ContentLength")
    if status == 206:
        check_range(answer.get("ContentRange"), offset)
    if size is None or (offset and status != 206):
        raise S3Error(Cause.PROTOCOL, "The service sends an object without its length, or all of it for a range.")
    if size > capacity:
        raise S3Error(Cause.LENGTH, f"The object has {size} bytes, {capacity} fit.")
    scatter(await stream.content.readexactly(size), buffers)
    # The connection returns to the pool unless surplus bytes arrived.
    stream.release()


def _info_of(key: str, found: Mapping[str, Any], size: str) -> ObjectInfo:
    modified = found.get("LastModified")
    return ObjectInfo(key, found.get(size, 0), found.get("ETag", ""), modified.timestamp() if modified else 0.0)


async def _opened_once(session: Any, options: dict[str, Any]) -> None:
    async with session.client("s3", **options):
        pass


def _failure_of(error: BaseException) -> S3Error:
    """Return the S3Error for an exception of botocore or aiohttp, without its text, which quotes the service."""
    if isinstance(error, (boto.NoCredentialsError, boto.CredentialRetrievalError, boto.PartialCredentialsError)):
        return unavailable(error)
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and len(chain) < 8:
        inner = getattr(each, "kwargs", {}).get("error")
        chain += [each, *([inner] if isinstance(inner, BaseException) else [])]
        each = each.__cause__ or each.__context__
    cause = next((cause for cause, kinds in _CAUSES if any(isinstance(each, kinds) for each in chain)), Cause.PROTOCOL)
    return S3Error(cause, f"The request failed: {type(error).__name__}.")


def _encryption(config: S3Config) -> dict[str, Any]:
    """Return the extra arguments of writes."""
    writing = _customer_key(config)
    if config.sse:
        writing["ServerSideEncryption"] = config.sse
    if config.sse_kms_key_id:
        writing["SSEKMSKeyId"] = config.sse_kms_key_id
    if config.sse_bucket_key:
        writing["BucketKeyEnabled"] = True
    return writing


def _customer_key(config: S3Config) -> dict[str, Any]:
    """Return the extra arguments of reads, which writes have too; botocore encodes the key and adds its digest."""
    if config.sse_customer_key is None:
        return {}
    return {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": base64.b64decode(config.sse_customer_key.reveal())}
