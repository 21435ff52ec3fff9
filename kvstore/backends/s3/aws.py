"""The client for all that AWS's tools know: credentials by aioboto3, requests by our own connections.

aioboto3 finds credentials (environment, profiles, SSO, roles, containers, instances) and renews them. Its own way of
sending a request takes more than a millisecond of Python, and minutes of time-outs; ours signs and sends from the slot.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
import zlib
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import quote, urlsplit

import aioboto3

from kvstore.backends.s3.client import ListPage, ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.credentials import CurrentCredentials, make_session, unavailable
from kvstore.backends.s3.failures import Cause, S3Error, error_of_response
from kvstore.backends.s3.http import Answer, AnswerReader
from kvstore.backends.s3.sigv4 import Signer, quoted
from kvstore.backends.s3.texts import delete_request, looks_like_error, read_deleted, read_list
from kvstore.backends.s3.wire import Wire
from kvstore.backends.stream import Endpoint, client_context
from kvstore.errors import BackendClosedError

__all__ = ["AwsClient"]

_REGION: Final = "us-east-1"
"""Where AWS's own tools look when nobody says where; other services take any name."""


class AwsClient(ObjectClient):
    """See :class:`~kvstore.backends.s3.client.ObjectClient`."""

    def __init__(self, config: S3Config) -> None:
        super().__init__()
        self._config = config
        self._wire: Wire | None = None
        self._credentials: CurrentCredentials | None = None
        self._host = ""
        self._root = ""
        self._signer = Signer(_REGION)
        self._encryption, self._reading = _encryption_headers(config)

    def counters(self) -> dict[str, int]:
        """See :meth:`ObjectClient.counters`."""
        wire = self._wire
        if wire is None:
            return {}
        return {"connections_opened": wire.connections_opened, "connections_dirty": wire.connections_dirty}

    async def open(self) -> None:
        """See :meth:`ObjectClient.open`."""
        config = self._config
        # On a thread: botocore reads files, and some of its providers start processes.
        session = await asyncio.to_thread(make_session, aioboto3.Session, config)
        region = config.region or session.region_name or _REGION
        self._signer = Signer(region)
        if not config.anonymous:
            await self._find_credentials(session)
        base = urlsplit(config.url(region))
        host = base.hostname or ""
        secure = base.scheme == "https"
        if not config.path_style:
            host = f"{config.bucket}.{host}"
        self._root = f"/{config.bucket}/" if config.path_style else "/"
        port = base.port or (443 if secure else 80)
        shown = f"[{host}]" if ":" in host else host
        self._host = shown if base.port is None else f"{shown}:{port}"
        context = client_context(ca=config.tls_ca) if secure else None
        if context is not None and config.tls_ca:
            context.load_default_certs()
        self._wire = Wire(Endpoint(host, port), context, config.connect_timeout)

    async def close(self) -> None:
        """See :meth:`ObjectClient.close`."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        credentials, self._credentials = self._credentials, None
        if credentials is not None:
            await credentials.close()

    async def put(
        self,
        key: str,
        buffers: Sequence[bytes | memoryview],
        *,
        timeout_s: float,
        if_absent: bool = False,
        if_match: str = "",
    ) -> str | None:
        """See :meth:`ObjectClient.put`."""
        headers = dict(self._encryption)
        if if_absent:
            headers["if-none-match"] = "*"
        elif if_match:
            headers["if-match"] = if_match
        if self._config.checksums == "when_supported":
            headers["x-amz-checksum-crc32"] = _crc32(buffers)
        size = sum(len(buffer) for buffer in buffers)
        self.traffic.puts += 1
        self.traffic.sent_bytes += size
        answer = await self._send("PUT", key, headers, AnswerReader(), timeout_s, body=buffers, size_bytes=size)
        if answer.status == 412 or (answer.status == 404 and if_match):
            return None
        if answer.status != 200 or looks_like_error(answer.body[:5]):
            raise error_of_response(answer.status, answer.text)
        return answer.headers.get("etag", "")

    async def get_into(
        self,
        key: str,
        buffers: Sequence[memoryview],
        *,
        timeout_s: float,
        offset: int | None = None,
    ) -> ObjectInfo | None:
        """See :meth:`ObjectClient.get_into`."""
        headers = dict(self._reading)
        if offset is not None:
            headers["range"] = f"bytes={offset}-{offset + sum(buffer.nbytes for buffer in buffers) - 1}"
        self.traffic.gets += 1
        answer = await self._send("GET", key, headers, AnswerReader(buffers), timeout_s)
        self.traffic.received_bytes += answer.filled_bytes
        if _is_absent(answer):
            return None
        if answer.status != 206 and (answer.status != 200 or offset):
            raise error_of_response(answer.status, answer.text)
        if answer.filled_bytes and looks_like_error(bytes(buffers[0][:5])):
            # Copied: an error is a few hundred bytes.
            raise error_of_response(200, bytes(buffers[0][: min(4096, answer.filled_bytes)]).decode("utf-8", "replace"))
        return ObjectInfo(key, answer.filled_bytes, answer.headers.get("etag", ""))

    async def head(self, key: str, *, timeout_s: float) -> ObjectInfo | None:
        """See :meth:`ObjectClient.head`."""
        self.traffic.heads += 1
        answer = await self._send("HEAD", key, dict(self._reading), AnswerReader(bodiless=True), timeout_s)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise error_of_response(answer.status, "")
        length = answer.headers.get("content-length", "0")
        size = int(length) if length.isascii() and length.isdigit() else 0
        return ObjectInfo(key, size, answer.headers.get("etag", ""), _modified_at(answer))

    async def delete_many(self, keys: Sequence[str], *, timeout_s: float) -> None:
        """See :meth:`ObjectClient.delete_many`."""
        body = delete_request(keys)
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        headers = {"content-md5": base64.b64encode(digest).decode()}
        self.traffic.deletes += 1
        answer = await self._send(
            "POST", "", headers, AnswerReader(), timeout_s, query={"delete": ""}, body=[body], size_bytes=len(body)
        )
        if answer.status != 200:
            raise error_of_response(answer.status, answer.text)
        read_deleted(answer.body)

    async def list_page(self, prefix: str, *, timeout_s: float, start_after: str = "") -> ListPage:
        """See :meth:`ObjectClient.list_page`."""
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        if start_after:
            query["start-after"] = start_after
        self.traffic.lists += 1
        answer = await self._send("GET", "", {}, AnswerReader(), timeout_s, query=query)
        if answer.status != 200:
            raise error_of_response(answer.status, answer.text)
        page = read_list(answer.body)
        if start_after and page.objects and page.objects[0].key <= start_after:
            # Whoever asks for page after page would never come to an end, and count each object again.
            raise S3Error(Cause.PROTOCOL, "The service lists from the beginning again: it does not know start-after.")
        return page

    async def probe(self, key: str, *, timeout_s: float) -> None:
        """See :meth:`ObjectClient.probe`."""
        self.traffic.gets += 1
        # By GET, because the answer to a HEAD has no body that would say what is wrong.
        answer = await self._send("GET", key, {**self._reading, "range": "bytes=0-0"}, AnswerReader(), timeout_s)
        if answer.status not in (200, 206, 416) and not _is_absent(answer):
            raise error_of_response(answer.status, answer.text)

    async def _send(
        self,
        method: str,
        key: str,
        headers: dict[str, str],
        reader: AnswerReader,
        timeout_s: float,
        *,
        query: Mapping[str, str] | None = None,
        body: Sequence[bytes | memoryview] = (),
        size_bytes: int | None = None,
    ) -> Answer:
        wire = self._wire
        if wire is None:
            raise BackendClosedError("not open: use it after open() and before close()", backend="s3")
        # Without its last slash where the bucket itself is meant.
        path = quote(self._root + key, safe="/-._~") if key or self._root == "/" else self._root[:-1]
        query = query or {}
        headers["host"] = self._host
        if self._config.requester_pays:
            headers["x-amz-request-payer"] = "requester"
        if self._credentials is not None:
            started = time.monotonic()
            self._signer.sign(method, path, query, headers, await self._credentials.get(timeout_s))
            timeout_s -= time.monotonic() - started
        if size_bytes is not None:
            headers["content-length"] = str(size_bytes)
        target = f"{path}?{quoted(query)}" if query else path
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")
        return await wire.request([head, *body], reader, timeout_s=timeout_s)

    async def _find_credentials(self, session: aioboto3.Session) -> None:
        try:
            provider = await session.get_credentials()
        # See CurrentCredentials: there is nothing that they all raise.
        except Exception as error:
            raise unavailable(error) from None
        if provider is None:
            raise unavailable()
        self._credentials = CurrentCredentials(provider)
        # Roles are assumed only now: with the time that this takes, not within that of a request.
        await self._credentials.get()


def _encryption_headers(config: S3Config) -> tuple[dict[str, str], dict[str, str]]:
    """Return the headers of writes and of reads."""
    if config.sse_customer_key is not None:
        key = config.sse_customer_key.reveal()
        digest = hashlib.md5(base64.b64decode(key), usedforsecurity=False).digest()
        name = "x-amz-server-side-encryption-customer"
        headers = {
            f"{name}-algorithm": "AES256",
            f"{name}-key": key,
            f"{name}-key-md5": base64.b64encode(digest).decode(),
        }
        return headers, headers
    headers = {}
    if config.sse:
        headers["x-amz-server-side-encryption"] = config.sse
    if config.sse_kms_key_id:
        headers["x-amz-server-side-encryption-aws-kms-key-id"] = config.sse_kms_key_id
    if config.sse_bucket_key:
        headers["x-amz-server-side-encryption-bucket-key-enabled"] = "true"
    return headers, {}


def _crc32(buffers: Sequence[bytes | memoryview]) -> str:
    value = 0
    for buffer in buffers:
        value = zlib.crc32(buffer, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def _is_absent(answer: Answer) -> bool:
    """Tell whether the object is not there; a bucket that is not there is another matter."""
    return answer.status == 404 and b"NoSuchBucket" not in answer.body


def _modified_at(answer: Answer) -> float:
    text = answer.headers.get("last-modified", "")
    try:
        return parsedate_to_datetime(text).timestamp() if text else 0.0
    except ValueError:
        return 0.0
