"""Credentials from AWS's usual sources: configuration, environment, profiles, SSO, roles, containers, instances."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, Final

import aioboto3
from botocore import UNSIGNED
from botocore import exceptions as boto
from botocore.credentials import RefreshableCredentials
from botocore.parsers import ResponseParserError

from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.backends.s3.sigv4 import Credentials
from kvstore.errors import ConfigError

__all__ = [
    "UNSIGNED",
    "CurrentCredentials",
    "ResponseParserError",
    "boto",
    "find_credentials",
    "make_session",
    "unavailable",
]

_REGION: Final = "us-east-1"
"""Default of AWS's own tools; other services accept any name."""

_RENEWAL_S_MAX: Final = 60.0
"""Maximum duration of a renewal. Chained roles, or a program that prompts the user, take seconds."""

_STILL_GOOD_S: Final = 600.0
"""Botocore requires new credentials this long before expiry, and suggests renewal five minutes earlier."""

_RENEWAL_PAUSE_S: Final = 10.0
"""Minimum time between background renewals: thirty attempts in those five minutes."""


def make_session(config: S3Config) -> tuple[aioboto3.Session, str]:
    """Return an aioboto3 session and the region. Reads files, so call it on a thread.

    Raises:
        ConfigError: The configured profile does not exist.
        S3Error: The credentials or configuration files cannot be used.
    """
    secret, token = config.secret_access_key, config.session_token
    try:
        session = aioboto3.Session(
            aws_access_key_id=config.access_key_id or None,
            aws_secret_access_key=secret.reveal() if secret else None,
            aws_session_token=token.reveal() if token else None,
            region_name=config.region or None,
            profile_name=config.profile or None,
        )
        return session, config.region or session.region_name or _REGION
    except boto.ProfileNotFound:
        raise ConfigError(f"There is no profile {config.profile!r}. Name one of the AWS configuration files.") from None
    except boto.BotoCoreError as error:
        raise unavailable(error) from None


async def find_credentials(session: aioboto3.Session) -> CurrentCredentials:
    """Return the credentials of a session, ready for use; S3Error if there are none."""
    try:
        provider = await session.get_credentials()
    # See CurrentCredentials: providers have no common exception.
    except Exception as error:
        raise unavailable(error) from None
    if provider is None:
        raise unavailable()
    found = CurrentCredentials(provider)
    # Assumes roles now, with its own time limit instead of a request's.
    await found.get()
    return found


class CurrentCredentials:
    """The current credentials. Temporary ones are renewed before they expire, once for all waiting requests.

    aiobotocore (``provider``) would renew them within the first request that needs them, and the deadline of that
    request may be too short. Belongs to one event loop.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._last: Credentials | None = None
        self._renewal: asyncio.Task[Credentials] | None = None
        self._not_before = 0.0
        self._expire = isinstance(provider, RefreshableCredentials)

    async def get(self, timeout_s: float = _RENEWAL_S_MAX) -> Credentials:
        """Return the current credentials, else raise S3Error; after a timeout the renewal continues in background."""
        last = self._last
        if last is not None and not self._expire:
            return last
        if last is not None and not self._provider.refresh_needed(_STILL_GOOD_S):
            # The last credentials are still valid: requests do not wait, and a failing provider is called rarely.
            if self._provider.refresh_needed() and time.monotonic() >= self._not_before:
                self._begin()
            return last
        try:
            return await asyncio.wait_for(asyncio.shield(self._begin()), timeout_s)
        except TimeoutError:
            text = f"Credentials are still being renewed after {timeout_s:.3g} s."
            raise S3Error(Cause.TIMEOUT, text) from None

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
            self._not_before = time.monotonic() + _RENEWAL_PAUSE_S
            renewal = self._renewal = asyncio.create_task(self._renew())
            # Retrieves the exception, because a failed renewal may have no waiter.
            renewal.add_done_callback(lambda task: task.cancelled() or task.exception())
        return renewal

    async def _renew(self) -> Credentials:
        try:
            async with asyncio.timeout(_RENEWAL_S_MAX):
                frozen = await self._provider.get_frozen_credentials()
        # Providers have no common exception: STS raises ClientError, expired credentials RuntimeError, and credential
        # processes others. An uncaught one would end the housekeeping.
        except Exception as error:
            raise unavailable(error) from None
        self._last = Credentials(frozen.access_key, frozen.secret_key, frozen.token)
        return self._last


def unavailable(error: Exception | None = None) -> S3Error:
    """Return the failure for missing credentials."""
    if error is None:
        return S3Error(Cause.CREDENTIALS, "There are no credentials: none were given, none were found.")
    # Only the type: the text may contain the output of a credential process.
    return S3Error(Cause.CREDENTIALS, f"Credentials can't be had: {type(error).__name__}.")
