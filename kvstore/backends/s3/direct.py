"""The default client: credentials from aioboto3, with our own signatures and connections.

aioboto3 finds credentials (environment, profiles, SSO, roles, containers, instances) and renews them. A request through
aioboto3 takes more than a millisecond of Python and copies the body; this client sends and receives slots directly.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import time
import zlib
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from urllib.parse import quote, urlsplit

from kvstore.backends.s3.client import ListPage, ObjectClient, ObjectInfo, check_range
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.credentials import Signer, find_credentials, make_session, quoted
from kvstore.backends.s3.failures import error_of_response, looks_like_error
from kvstore.backends.s3.http import Answer, delete_request, read_deleted, read_list
from kvstore.backends.s3.wire import Wire
from kvstore.backends.stream import Endpoint
from kvstore.errors import BackendClosedError


class DirectClient(ObjectClient):
    """Client with own requests."""

    def __init__(self, config: S3Config) -> None:
        super().__init__(config)
        self._wire: Wire | None = None
        self._host = ""
        self._root = ""
        self._signer = Signer("")

    def counters(self) -> dict[str, int]:
        opened, dirty = (self._wire.connections_opened, self._wire.connections_dirty) if self._wire else (0, 0)
        return {**super().counters(), "connections_opened": opened, "connections_dirty": dirty}

    def check(self) -> None:
        super().check()
        make_session(self._config)

    async def open(self) -> None:
        config = self._config
        # On a thread: botocore reads files, and some of its providers start processes.
        session, region = await asyncio.to_thread(make_session, config)
        self._signer = Signer(region)
        if not config.anonymous:
            self._credentials = await find_credentials(config, session, self._credentials)
        base = urlsplit(config.url(region))
        host = base.hostname or ""
        secure = base.scheme == "https"
        if not config.path_style:
            host = f"{config.bucket}.{host}"
        self._root = f"/{config.bucket}/" if config.path_style else "/"
        shown = f"[{host}]" if ":" in host else host
        self._host = shown if base.port is None else f"{shown}:{base.port}"
        if secure:
            await self._tls.current()
        endpoint = Endpoint(host, base.port or (443 if secure else 80))
        self._wire = Wire(endpoint, self._tls if secure else None, config.connect_timeout)

    async def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        if self._credentials is not None:
            await self._credentials.close()

    async def _put(
        self, key: str, buffers: Sequence[bytes | memoryview], timeout_s: float, condition: Mapping[str, str]
    ) -> str:
        headers = {**_encryption_headers(self._config), **{name.lower(): value for name, value in condition.items()}}
        if self._config.checksums == "when_supported":
            checksum = functools.reduce(lambda value, buffer: zlib.crc32(buffer, value), buffers, 0)
            headers["x-amz-checksum-crc32"] = base64.b64encode(checksum.to_bytes(4, "big")).decode()
        headers["content-length"] = str(sum(map(len, buffers)))
        answer = await self._send("PUT", key, headers, Answer(), timeout_s, body=buffers)
        if looks_like_error(answer.body[:5]):
            raise error_of_response(answer.status, answer.text)
        return answer.headers.get("etag", "")

    async def _get_into(
        self, key: str, buffers: Sequence[memoryview], capacity: int, timeout_s: float, offset: int | None
    ) -> ObjectInfo:
        headers = _customer_key_headers(self._config)
        if offset is not None:
            headers["range"] = f"bytes={offset}-{offset + capacity - 1}"
        answer = await self._send("GET", key, headers, Answer(buffers), timeout_s)
        if answer.status == 206 or offset:
            check_range(answer.headers.get("content-range"), offset)
        return ObjectInfo(key, answer.filled_bytes, answer.headers.get("etag", ""))

    async def _head(self, key: str, timeout_s: float) -> ObjectInfo:
        answer = await self._send("HEAD", key, _customer_key_headers(self._config), Answer(bodiless=True), timeout_s)
        size = int(answer.headers.get("content-length", 0))
        return ObjectInfo(key, size, answer.headers.get("etag", ""), _modified_at(answer))

    async def _delete_many(self, keys: Sequence[str], timeout_s: float) -> None:
        body = delete_request(keys)
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        headers = {"content-md5": base64.b64encode(digest).decode(), "content-length": str(len(body))}
        answer = await self._send("POST", "", headers, Answer(), timeout_s, query={"delete": ""}, body=[body])
        read_deleted(answer.body)

    async def _list_page(self, prefix: str, timeout_s: float, start_after: str) -> ListPage:
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        if start_after:
            query["start-after"] = start_after
        answer = await self._send("GET", "", {}, Answer(), timeout_s, query=query)
        return read_list(answer.body)

    async def _send(
        self,
        method: str,
        key: str,
        headers: dict[str, str],
        answer: Answer,
        timeout_s: float,
        *,
        query: Mapping[str, str] | None = None,
        body: Sequence[bytes | memoryview] = (),
    ) -> Answer:
        wire = self._wire
        if wire is None:
            raise BackendClosedError("not open: use it after open() and before close()", backend="s3")
        # For the bucket itself, the path has no trailing slash.
        path = quote(self._root + key, safe="/-._~") if key or self._root == "/" else self._root[:-1]
        query = query or {}
        headers["host"] = self._host
        if self._config.requester_pays:
            headers["x-amz-request-payer"] = "requester"
        if self._credentials is not None:
            began = time.monotonic()
            self._signer.sign(method, path, query, headers, await self._credentials.get(timeout_s))
            timeout_s -= time.monotonic() - began
        target = f"{path}?{quoted(query)}" if query else path
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")
        await wire.request([head, *body], answer, timeout_s=timeout_s)
        if answer.status not in (200, 206):
            raise error_of_response(answer.status, answer.text)
        return answer


def _encryption_headers(config: S3Config) -> dict[str, str]:
    """Return the extra headers of writes."""
    headers = _customer_key_headers(config)
    if config.sse:
        headers["x-amz-server-side-encryption"] = config.sse
    if config.sse_kms_key_id:
        headers["x-amz-server-side-encryption-aws-kms-key-id"] = config.sse_kms_key_id
    if config.sse_bucket_key:
        headers["x-amz-server-side-encryption-bucket-key-enabled"] = "true"
    return headers


def _customer_key_headers(config: S3Config) -> dict[str, str]:
    """Return the extra headers of reads, which writes have too."""
    if config.sse_customer_key is None:
        return {}
    key = config.sse_customer_key.reveal()
    digest = hashlib.md5(base64.b64decode(key), usedforsecurity=False).digest()
    name = "x-amz-server-side-encryption-customer"
    encoded = base64.b64encode(digest).decode()
    return {f"{name}-algorithm": "AES256", f"{name}-key": key, f"{name}-key-md5": encoded}


def _modified_at(answer: Answer) -> float:
    text = answer.headers.get("last-modified", "")
    try:
        return parsedate_to_datetime(text).timestamp() if text else 0.0
    except ValueError:
        return 0.0
