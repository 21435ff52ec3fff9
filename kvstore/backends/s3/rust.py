"""The client whose requests are made by obstore, in Rust and without the GIL; credentials come from boto3.

It is for those who need a proxy or S3 Express One Zone. Two limits are obstore's own: it follows redirects of reads
(what comes from there is verified as everything is), and a body is copied once on its way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import obstore
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import BaseError
from obstore.store import S3Store

from kvstore.backends.s3.client import ListPage, ObjectClient, ObjectInfo
from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.credentials import BotoCoreError, plain_session, unavailable
from kvstore.backends.s3.failures import Cause, S3Error, error_of_response
from kvstore.backends.s3.texts import looks_like_error
from kvstore.backends.vectored import scatter
from kvstore.errors import BackendClosedError, ConfigError

__all__ = ["RustClient"]

_T = TypeVar("_T")

_REGION: Final = "us-east-1"
_CREDENTIALS_TTL: Final = timedelta(minutes=1)
"""How long obstore keeps what boto3 gave it; boto3 renews temporary credentials ten minutes before they expire."""

_PAGE: Final = 1000
_STATUS: Final = re.compile(r"status code: (\d{3})", re.ASCII)
_SIGNS: Final = (
    ("redirect without LOCATION", Cause.REGION),
    ("TooManyRedirects", Cause.REDIRECT),
    ("TimedOut", Cause.TIMEOUT),
    ("dns error", Cause.DNS),
    ("ertificate", Cause.TLS),
    ("InvalidMessage", Cause.TLS),
    ("kind: Connect,", Cause.REFUSED),
    ("IncompleteBody", Cause.CUT),
    ("kind: Body", Cause.CUT),
    ("kind: Decode", Cause.CUT),
    ("Parse(", Cause.PROTOCOL),
    ("SendRequest", Cause.RESET),
    ("NotPartial", Cause.PROTOCOL),
    ("MissingEtag", Cause.XML_ERROR),
    ("error response", Cause.XML_ERROR),
)
"""What obstore writes of failures that have no status, in the order in which they are looked for."""


class RustClient(ObjectClient):
    """See :class:`~kvstore.backends.s3.client.ObjectClient`."""

    def __init__(self, config: S3Config) -> None:
        super().__init__()
        self._config = config
        self._store: S3Store | None = None
        self._calls: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """See :meth:`ObjectClient.open`."""
        # On a thread: boto3 reads files, and some of its providers ask other machines.
        self._store = await asyncio.to_thread(_store_of, self._config)

    async def close(self) -> None:
        """See :meth:`ObjectClient.close`."""
        self._store = None
        for call in self._calls:
            call.cancel()

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
        # Copied: obstore takes one buffer, and lets go of it on a thread of its own, after a call that was given up.
        body = b"".join(buffers)
        mode: Any = "create" if if_absent else {"e_tag": if_match} if if_match else "overwrite"
        self.traffic.puts += 1
        self.traffic.sent_bytes += len(body)
        try:
            call = obstore.put_async(self._opened(), key, body, mode=mode, use_multipart=False)
            result = await self._within(timeout_s, call)
        except S3Error as error:
            if isinstance(error, _PreconditionError) and (if_absent or if_match):
                return None
            raise
        return result["e_tag"] or ""

    async def get_into(
        self,
        key: str,
        buffers: Sequence[memoryview],
        *,
        timeout_s: float,
        offset: int | None = None,
    ) -> ObjectInfo | None:
        """See :meth:`ObjectClient.get_into`."""
        capacity = sum(buffer.nbytes for buffer in buffers)
        self.traffic.gets += 1
        found = await self._within(timeout_s, self._read(key, capacity, offset))
        if found is None:
            return None
        body, etag = found
        self.traffic.received_bytes += len(body)
        if looks_like_error(bytes(body[:5])):
            raise error_of_response(200, bytes(body[:4096]).decode("utf-8", "replace"))
        # Copied: obstore receives into memory of its own. Nobody else touches the buffers, so nothing can be late.
        return ObjectInfo(key, scatter(body, buffers), etag)

    async def head(self, key: str, *, timeout_s: float) -> ObjectInfo | None:
        """See :meth:`ObjectClient.head`."""
        self.traffic.heads += 1
        try:
            meta = await self._within(timeout_s, obstore.head_async(self._opened(), key))
        except _AbsentError:
            return None
        return _info_of(meta)

    async def delete_many(self, keys: Sequence[str], *, timeout_s: float) -> None:
        """See :meth:`ObjectClient.delete_many`."""
        self.traffic.deletes += 1
        await self._within(timeout_s, obstore.delete_async(self._opened(), list(keys)))

    async def list_page(self, prefix: str, *, timeout_s: float, start_after: str = "") -> ListPage:
        """See :meth:`ObjectClient.list_page`."""
        self.traffic.lists += 1
        stream = obstore.list(self._opened(), prefix or None, offset=start_after or None, chunk_size=_PAGE)
        try:
            metas = await self._within(timeout_s, stream.__anext__())
        except StopAsyncIteration:
            return ListPage([], more=False)
        # A full page may have a successor; the stream is dropped, as its next page would be asked for here and now.
        return ListPage([_info_of(meta) for meta in metas], more=len(metas) == _PAGE)

    async def probe(self, key: str, *, timeout_s: float) -> None:
        """See :meth:`ObjectClient.probe`."""
        self.traffic.gets += 1
        await self._within(timeout_s, self._read(key, 1 << 20, None))

    async def _read(self, key: str, capacity: int, offset: int | None) -> tuple[memoryview, str] | None:
        options: Any = None if offset is None else {"range": (offset, offset + capacity)}
        try:
            result = await obstore.get_async(self._opened(), key, options=options)
        except FileNotFoundError as error:
            failure = _failure_of(error)
            if failure.cause is Cause.NO_BUCKET:
                raise failure from None
            return None
        start, end = result.range
        if end - start > capacity:
            raise S3Error(Cause.LENGTH, f"The object has {end - start} bytes, {capacity} fit.")
        body = memoryview(await result.bytes_async())
        if body.nbytes != end - start:
            raise S3Error(Cause.CUT, f"Of {end - start} bytes {body.nbytes} came.")
        return body, result.meta["e_tag"] or ""

    async def _within(self, timeout_s: float, call: Awaitable[_T]) -> _T:
        """Wait for a call of obstore, make its failure one of ours, and end with it when the client is closed."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("A client is used by tasks only.")
        work = asyncio.ensure_future(call)
        self._calls.add(work)
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except asyncio.CancelledError:
            if self._store is None and not task.cancelling():
                raise S3Error(Cause.CLOSED, "The client was closed.") from None
            raise
        except TimeoutError:
            raise S3Error(Cause.TIMEOUT, f"No answer within {timeout_s:.3g} s.") from None
        except (BaseError, FileNotFoundError) as error:
            raise _failure_of(error) from None
        finally:
            self._calls.discard(work)

    def _opened(self) -> S3Store:
        if self._store is None:
            raise BackendClosedError("not open: use it after open() and before close()", backend="s3")
        return self._store


class _AbsentError(S3Error):
    """There is no such object."""


class _PreconditionError(S3Error):
    """The condition of a write does not hold."""


def _info_of(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], meta["e_tag"] or "", meta["last_modified"].timestamp())


def _failure_of(error: BaseException) -> S3Error:
    """Return the failure that obstore tells by its text. The text goes no further: it quotes the service."""
    text = str(error)
    status = _STATUS.search(text)
    if status is not None:
        failure = error_of_response(int(status[1]), text)
        if status[1] == "404" and failure.cause is not Cause.NO_BUCKET:
            return _AbsentError(failure.cause, "There is no such object.")
        if status[1] == "412":
            return _PreconditionError(failure.cause, "The condition does not hold.")
        return failure
    cause = next((cause for sign, cause in _SIGNS if sign in text), Cause.PROTOCOL)
    return S3Error(cause, f"The request failed: {cause.value.replace('_', ' ')}.")


def _store_of(config: S3Config) -> S3Store:
    options: dict[str, Any] = {
        "virtual_hosted_style_request": not config.path_style,
        "skip_signature": config.anonymous,
        "request_payer": config.requester_pays,
        "unsigned_payload": True,
        "s3_express": config.bucket.endswith("--x-s3"),
        "conditional_put": "etag",
        "disable_tagging": True,
    }
    if config.sse:
        options["server_side_encryption"] = config.sse
    if config.sse_kms_key_id:
        options["sse_kms_key_id"] = config.sse_kms_key_id
    if config.sse_bucket_key:
        options["sse_bucket_key_enabled"] = True
    if config.sse_customer_key is not None:
        options["server_side_encryption"] = "sse-c"
        options["sse_customer_key_base64"] = config.sse_customer_key.reveal()
    if config.checksums == "when_supported":
        options["checksum_algorithm"] = "SHA256"
    client: dict[str, Any] = {
        "allow_http": config.endpoint.startswith("http:"),
        "connect_timeout": timedelta(seconds=config.connect_timeout),
        # Each call has a deadline of its own, which ends it sooner; this is for what nobody waits for any more.
        "timeout": timedelta(seconds=300),
        "pool_max_idle_per_host": str(config.concurrency),
        "pool_idle_timeout": timedelta(seconds=15),
    }
    if config.tls_ca is not None:
        try:
            client["root_certificate"] = config.tls_ca.read_bytes()
        except OSError as error:
            raise ConfigError(f"'tls_ca' is {str(config.tls_ca)!r}: {error.strerror}. Give a readable file.") from error
    provider, region = (None, "") if config.anonymous else _provider_of(config)
    options["region"] = config.region or region or _REGION
    if not options["s3_express"]:
        # Always given, so that the environment has no say in it.
        scheme, _, host = config.url(options["region"]).partition("://")
        options["endpoint"] = f"{scheme}://{host}" if config.path_style else f"{scheme}://{config.bucket}.{host}"
    try:
        return S3Store(
            config.bucket,
            config=options,
            client_options=client,
            # Trying again is done in one place, and not here.
            retry_config={"max_retries": 0},
            credential_provider=provider,
        )
    except (BaseError, ValueError) as error:
        # Its text may quote an option.
        raise ConfigError(
            f"obstore refuses the options: {type(error).__name__}. Check certificates and names."
        ) from None


def _provider_of(config: S3Config) -> tuple[Boto3CredentialProvider, str]:
    """Return what gives obstore its credentials, and the region that goes with them."""
    session = plain_session(config)
    try:
        return Boto3CredentialProvider(session, ttl=_CREDENTIALS_TTL), session.region_name or ""
    except ValueError:
        raise unavailable() from None
    except BotoCoreError as error:
        raise unavailable(error) from None
