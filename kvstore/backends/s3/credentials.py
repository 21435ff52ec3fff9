"""Credentials from AWS's usual sources, and signatures with them (AWS Signature Version 4 for the service "s3").

Sources are configuration, environment, profiles, SSO, roles, containers and instances. Signing:
https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html. Bodies are not part of the signature
(``UNSIGNED-PAYLOAD``): hashing them costs more than sending them, and records carry their own checksum.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

import aioboto3
from botocore import UNSIGNED as UNSIGNED
from botocore import exceptions as exceptions
from botocore.credentials import ReadOnlyCredentials as ReadOnlyCredentials
from botocore.credentials import RefreshableCredentials
from botocore.parsers import ResponseParserError as ResponseParserError

from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.errors import ConfigError
from kvstore.files import FollowedFiles

_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_SAFE: Final = "-._~"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Key and secret, and the token of temporary credentials; ``repr`` shows none of them."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


class Signer:
    """Signs the requests to one region; caches the timestamp per second and the signing key per day."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._second = 0
        self._stamp = ""
        self._day = ""
        self._secret = ""
        self._key = b""
        self._scope = ""

    def sign(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: dict[str, str],
        credentials: Credentials,
        now: float | None = None,
    ) -> None:
        """Add date and signature to the headers of a request. The path is quoted; query parameters are not.

        Header names are in lower case; ``host`` and all ``x-amz-…`` headers are signed. ``now`` is in seconds since the
        epoch.
        """
        stamp = self._stamped(time.time() if now is None else now)
        headers["x-amz-date"] = stamp
        headers["x-amz-content-sha256"] = "UNSIGNED-PAYLOAD"
        if credentials.token:
            headers["x-amz-security-token"] = credentials.token
        names = sorted(name for name in headers if name == "host" or name.startswith("x-amz-"))
        signed = ";".join(names)
        lines = "".join([f"{name}:{headers[name].strip()}\n" for name in names])
        canonical = f"{method}\n{path}\n{quoted(query)}\n{lines}\n{signed}\nUNSIGNED-PAYLOAD"
        key = self._key_of(stamp[:8], credentials.secret_key)
        scope = self._scope
        text = f"{_ALGORITHM}\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        headers["authorization"] = (
            f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, SignedHeaders={signed}, Signature={signature}"
        )

    def _stamped(self, now: float) -> str:
        second = int(now)
        if second != self._second:
            self._second = second
            self._stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
        return self._stamp

    def _key_of(self, day: str, secret: str) -> bytes:
        if day != self._day or secret != self._secret:
            key = f"AWS4{secret}".encode()
            for part in (day, self._region, "s3", "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            self._day, self._secret, self._key = day, secret, key
            self._scope = f"{day}/{self._region}/s3/aws4_request"
        return self._key


def quoted(query: Mapping[str, str]) -> str:
    """Return query parameters for a URL and its signature: sorted, with all but letters, digits and -._~ quoted."""
    if not query:
        return ""
    pairs = sorted((quote(name, safe=_SAFE), quote(value, safe=_SAFE)) for name, value in query.items())
    return "&".join([f"{name}={value}" for name, value in pairs])


_REGION: Final = "us-east-1"
"""Default of AWS's own tools; other services accept any name."""

_RENEWAL_S_MAX: Final = 60.0
"""Maximum duration of a renewal. Chained roles, or a program that prompts the user, take seconds."""

_RENEWAL_DUE_S: Final = 600.0
"""Time before expiry at which botocore requires new credentials; it suggests a renewal five minutes earlier."""

_RENEWAL_PAUSE_S: Final = 10.0
"""Minimum time between background renewals, and between looks at files with keys: thirty attempts in those five
minutes."""


def make_session(config: S3Config) -> tuple[aioboto3.Session, str]:
    """Return an aioboto3 session and the region. Reads files, so call it on a thread.

    Raises:
        ConfigError: The configured profile does not exist.
        S3Error: The credentials or configuration files cannot be used.
    """
    given = config.access_key_id, config.secret_access_key, config.session_token
    for each in given:
        if each is not None:
            each.renew_now()
    access_key, secret, token = (None if each is None else each.reveal() for each in given)
    try:
        session = aioboto3.Session(
            aws_access_key_id=access_key,
            aws_secret_access_key=secret,
            aws_session_token=token,
            region_name=config.region or None,
            profile_name=config.profile or None,
        )
        return session, config.region or session.region_name or _REGION
    except exceptions.ProfileNotFound:
        raise ConfigError(f"There is no profile {config.profile!r}. Name one of the AWS configuration files.") from None
    except exceptions.BotoCoreError as error:
        raise unavailable(error) from None


async def find_credentials(
    config: S3Config,
    session: aioboto3.Session,
    before: CurrentCredentials | None = None,
    pause_s: float = _RENEWAL_PAUSE_S,
) -> CurrentCredentials:
    """Return the credentials of a session, ready for use; S3Error if there are none.

    They are found again after a change of a file with keys: of the configuration, or of AWS's own tools.

    Args:
        before: The credentials of an earlier session, which has ended. Their count of refusals is continued.
    """
    sessions = [session]

    async def find() -> Any:
        if config.sse_customer_key is not None:
            await config.sse_customer_key.renew()
        # On a thread: botocore reads files, and some of its providers start processes.
        found = sessions.pop() if sessions else (await asyncio.to_thread(make_session, config))[0]
        return await found.get_credentials()

    found = CurrentCredentials(find, await asyncio.to_thread(_files_with_keys, config, session), pause_s)
    if before is not None:
        found.continue_count(before)
    # Assumes roles now, with its own time limit instead of a request's.
    await found.get()
    return found


class CurrentCredentials:
    """The current credentials. Temporary ones are renewed before they expire, once for all waiting requests.

    aiobotocore would renew them within the first request that needs them, and the deadline of that request may be too
    short. Belongs to one event loop.

    Args:
        find: Returns a provider of aiobotocore, None without one. It is called again after a change of a file.
        paths: Files that ``find`` reads.
        pause_s: Minimum time between background renewals.
    """

    def __init__(
        self, find: Callable[[], Awaitable[Any]], paths: Sequence[str] = (), pause_s: float = _RENEWAL_PAUSE_S
    ) -> None:
        self.last: Credentials | None = None  # The latest credentials.
        self._find = find
        self._files = FollowedFiles(paths, _digest, "File with S3 keys")
        self._found_in = b""
        self._provider: Any = None
        self._renewal: asyncio.Task[Credentials] | None = None
        self._pause_s = pause_s
        self._not_before = 0.0
        self._expire = False

    @property
    def refusals(self) -> int:
        """Number of refusals after which the files had no other credentials."""
        return self._files.refusals

    def continue_count(self, before: CurrentCredentials) -> None:
        """Count refusals on from those of an earlier session."""
        self._files.continue_count(before._files)

    async def get(self, timeout_s: float = _RENEWAL_S_MAX) -> Credentials:
        """Return valid credentials; S3Error if there are none. After a timeout the renewal continues."""
        last = self.last
        if last is not None and not (self._expire and self._provider.refresh_needed(_RENEWAL_DUE_S)):
            # The last credentials are still valid: requests do not wait, and a failing provider is called rarely.
            is_due = self._files.paths or (self._expire and self._provider.refresh_needed())
            if is_due and time.monotonic() >= self._not_before:
                self._begin()
            return last
        try:
            return await asyncio.wait_for(asyncio.shield(self._begin()), timeout_s)
        except TimeoutError:
            text = f"Credentials are still being renewed after {timeout_s:.3g} s."
            raise S3Error(Cause.TIMEOUT, text) from None

    async def refused(self, used: Credentials | None, *, is_certain: bool) -> bool:
        """Read the files again after a refusal of ``used``; return whether there are other credentials to try.

        ``is_certain``: whether the service named the credentials as the reason. If so, a refusal of those that the
        files still have is counted and logged.
        """
        if self.last == used:
            if is_certain:
                await self._files.refused(self._found_in, "The S3 service refuses the credentials")
            with contextlib.suppress(S3Error):
                await asyncio.shield(self._begin())
        return self.last != used

    async def close(self) -> None:
        """Cancel a running renewal."""
        if self._renewal is not None:
            self._renewal.cancel()
            with contextlib.suppress(asyncio.CancelledError, S3Error):
                await self._renewal

    def _begin(self) -> asyncio.Task[Credentials]:
        """Return the running renewal, or start one."""
        renewal = self._renewal
        if renewal is None or renewal.done():
            self._not_before = time.monotonic() + self._pause_s
            renewal = self._renewal = asyncio.create_task(self._renew())
            # Retrieves the exception, because a failed renewal may have no waiter.
            renewal.add_done_callback(lambda task: task.cancelled() or task.exception())
        return renewal

    async def _renew(self) -> Credentials:
        try:
            async with asyncio.timeout(_RENEWAL_S_MAX):
                content = await self._files.current()
                if self._provider is None or content != self._found_in:
                    provider = await self._find()
                    if provider is None:
                        raise unavailable()
                    self._provider, self._found_in = provider, content
                    self._expire = isinstance(provider, RefreshableCredentials)
                frozen = await self._provider.get_frozen_credentials()
        except S3Error:
            raise
        # Providers have no common exception: STS raises ClientError, expired credentials RuntimeError, and credential
        # processes others. Callers expect S3Error.
        except Exception as error:
            raise unavailable(error) from None
        self.last = Credentials(frozen.access_key, frozen.secret_key, frozen.token)
        return self.last


def _files_with_keys(config: S3Config, session: aioboto3.Session) -> list[str]:
    paths = [secret.path for secret in config.secrets.values() if secret.path]
    if config.access_key_id is None:
        named = [session._session.get_config_variable(name) for name in ("credentials_file", "config_file")]
        paths += [path for path in map(os.path.expanduser, filter(None, named)) if os.path.isfile(path)]
    return paths


def _digest(contents: list[bytes]) -> bytes:
    return b"".join([hashlib.sha256(content).digest() for content in contents])


def unavailable(error: Exception | None = None) -> S3Error:
    """Return the failure for missing or unusable credentials."""
    if error is None:
        return S3Error(Cause.CREDENTIALS, "No credentials were given or found.")
    # Only the type: the text may contain the output of a credential process.
    return S3Error(Cause.CREDENTIALS, f"Credentials are unavailable: {type(error).__name__}.")
