"""Credentials as boto3 and its kin find them: given ones, environment, profiles, SSO, roles, containers, instances."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import boto3
from botocore.exceptions import BotoCoreError, ProfileNotFound

from kvstore.backends.s3.config import S3Config
from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.errors import ConfigError

__all__ = ["BotoCoreError", "make_session", "plain_session", "unavailable"]

_T = TypeVar("_T")


def make_session(kind: Callable[..., _T], config: S3Config) -> _T:
    """Make a session, of boto3 or of aioboto3. It reads files: not for the loop's thread.

    Raises:
        ConfigError: There is no such profile.
    """
    secret, token = config.secret_access_key, config.session_token
    try:
        return kind(
            aws_access_key_id=config.access_key_id or None,
            aws_secret_access_key=secret.reveal() if secret else None,
            aws_session_token=token.reveal() if token else None,
            region_name=config.region or None,
            profile_name=config.profile or None,
        )
    except ProfileNotFound:
        raise ConfigError(f"There is no profile {config.profile!r}. Name one of the AWS configuration files.") from None
    except BotoCoreError as error:
        raise unavailable(error) from None


def plain_session(config: S3Config) -> boto3.Session:
    """Make a session of boto3; see :func:`make_session`."""
    return make_session(boto3.Session, config)


def unavailable(error: Exception | None = None) -> S3Error:
    """Return the failure of not having credentials."""
    if error is None:
        return S3Error(Cause.CREDENTIALS, "There are no credentials: none were given, none were found.")
    # Only its type: its text may hold what a credential process printed.
    return S3Error(Cause.CREDENTIALS, f"Credentials can't be had: {type(error).__name__}.")
