"""Credentials as AWS's tools find them: given ones, environment, profiles, SSO, roles, containers, instances."""

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
"""Default of AWS's own tools; other services take any name."""

_RENEWAL_S_MAX: Final = 60.0
"""A role that is assumed by way of another, or a program that asks a user, takes seconds; none takes this long."""

_STILL_GOOD_S: Final = 600.0
"""So long before their end botocore insists on new credentials; it asks for them five minutes earlier."""

_RENEWAL_PAUSE_S: Final = 10.0
"""Thirty tries fit into these five minutes."""


def make_session(config: S3Config) -> tuple[aioboto3.Session, str]:
    """Return a session of aioboto3 and the region; ConfigError without its profile. Reads files: not on the loop."""
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
    """Return the credentials of a session, ready for use; else S3Error."""
    try:
        provider = await session.get_credentials()
    # See CurrentCredentials: there is nothing that they all raise.
    except Exception as error:
        raise unavailable(error) from None
    if provider is None:
        raise unavailable()
    found = CurrentCredentials(provider)
    # Roles are assumed only now: with the time that this takes, not within that of a request.
    await found.get()
    return found


class CurrentCredentials:
    """The credentials of now. Temporary ones are renewed before they expire, once for all requests that wait for it.

    aiobotocore (``provider``) renews them within the request that asks first: with that request's deadline, that may
    never succeed. Belongs to one event loop.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._last: Credentials | None = None
        self._renewal: asyncio.Task[Credentials] | None = None
        self._not_before = 0.0
        self._expire = isinstance(provider, RefreshableCredentials)

    async def get(self, timeout_s: float = _RENEWAL_S_MAX) -> Credentials:
        """Return the credentials of now, else S3Error; a renewal that takes longer goes on for those who ask later."""
        last = self._last
        if last is not None and not self._expire:
            return last
        if last is not None and not self._provider.refresh_needed(_STILL_GOOD_S):
            # The last ones are good still: no request waits, and a provider that is down is not asked all the time.
            if self._provider.refresh_needed() and time.monotonic() >= self._not_before:
                self._begin()
            return last
        try:
            return await asyncio.wait_for(asyncio.shield(self._begin()), timeout_s)
        except TimeoutError:
            text = f"Credentials are still being renewed after {timeout_s:.3g} s."
            raise S3Error(Cause.TIMEOUT, text) from None

    async def close(self) -> None:
        """Give up a renewal that is under way."""
        if self._renewal is not None:
            self._renewal.cancel()
            with contextlib.suppress(asyncio.CancelledError, S3Error):
                await self._renewal

    def _begin(self) -> asyncio.Task[Credentials]:
        """Return the renewal that is under way, or a new one."""
        renewal = self._renewal
        if renewal is None or renewal.done():
            self._not_before = time.monotonic() + _RENEWAL_PAUSE_S
            renewal = self._renewal = asyncio.create_task(self._renew())
            # Nobody may be waiting for it when it fails.
            renewal.add_done_callback(lambda task: task.cancelled() or task.exception())
        return renewal

    async def _renew(self) -> Credentials:
        try:
            async with asyncio.timeout(_RENEWAL_S_MAX):
                frozen = await self._provider.get_frozen_credentials()
        # Providers have no failure in common: ClientError of STS, RuntimeError for expired ones, what a process raises;
        # one of another kind would end the housekeeping for good.
        except Exception as error:
            raise unavailable(error) from None
        self._last = Credentials(frozen.access_key, frozen.secret_key, frozen.token)
        return self._last


def unavailable(error: Exception | None = None) -> S3Error:
    """Return the failure of not having credentials."""
    if error is None:
        return S3Error(Cause.CREDENTIALS, "There are no credentials: none were given, none were found.")
    # Only its type: its text may hold what a credential process printed.
    return S3Error(Cause.CREDENTIALS, f"Credentials can't be had: {type(error).__name__}.")
