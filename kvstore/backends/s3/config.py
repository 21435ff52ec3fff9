"""Configuration of the S3 backend."""

from __future__ import annotations

import base64
import binascii
import re
import urllib.request
from pathlib import Path
from typing import ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec

from kvstore.backends.stream import Endpoint, check_tls_files
from kvstore.config import ByteSize, Seconds, SecretStr, TierConfig, check_field
from kvstore.errors import ConfigError

_MIB: Final = 1024**2
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_PREFIX: Final = re.compile(r"([A-Za-z0-9_.=-]{1,64}/){0,8}", re.ASCII)
_REGION: Final = re.compile(r"[a-z0-9-]{0,64}", re.ASCII)


class Prices(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Prices in dollars per 1,000 requests (HEAD costs as much as GET), and per 1e9 bytes sent, received or stored.

    Storage is per month. The defaults are the 2025 prices of S3 Standard within us-east-1; AWS charges for bytes
    received across regions or outside of AWS. Source: https://aws.amazon.com/s3/pricing/
    """

    put_1000: float = 0.005
    get_1000: float = 0.0004
    list_1000: float = 0.005
    delete_1000: float = 0.0
    sent_gb: float = 0.0
    received_gb: float = 0.0
    stored_gb_month: float = 0.023

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ConfigError(f"'{name}' is {value!r}. Expected dollars, 0 or more.")


class S3Config(TierConfig, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Blocks as objects in a bucket of AWS S3 or an S3-compatible service.

    docs/s3.md describes each option; comments below give the reasons for the defaults.
    """

    aliases: ClassVar[dict[str, str]] = {
        "endpoint_url": "endpoint",
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "profile_name": "profile",
        "region_name": "region",
    }

    bucket: str
    prefix: str = "kv/"
    region: str = ""
    endpoint: str = ""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    insecure: bool = False
    tls_ca: Path | None = None
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = None
    profile: str = ""
    anonymous: bool = False
    requester_pays: bool = False
    sse: Literal["", "AES256", "aws:kms", "aws:kms:dsse"] = ""
    sse_kms_key_id: str = ""
    sse_bucket_key: bool = False
    sse_customer_key: SecretStr | None = None
    checksums: Literal["when_required", "when_supported"] = "when_required"
    conditional_put: Literal["auto", "yes", "no"] = "auto"
    client: Literal["auto", "direct", "aioboto3"] = "auto"
    # One connection to S3 reaches about 90 MB/s: 64 saturate a link of 50 Gbit/s, and idle ones cost little.
    concurrency: int = 64
    # Two failures in a row may be chance. Three suggest an outage, which the circuit breaker handles.
    tries: int = 3
    # Off, because packing needs the right to list the bucket. For objects below about 200 KB, the PUT costs more than
    # a month of storage.
    pack_below: ByteSize = ByteSize(0)
    # Cuts the cost of PUTs to about a thirtieth. More would save little, and few jobs have more blocks.
    pack_blocks: int = 32
    # One LIST every 5 s costs a few dollars a month for a constantly busy engine.
    pack_refresh: Seconds = Seconds(5)
    capacity: ByteSize = ByteSize(0)
    ttl: Seconds = Seconds(0)
    # Each round costs one LIST per thousand objects, by one engine of the fleet: with a million objects, some 20
    # dollars a month.
    keeper_interval: Seconds = Seconds(600)
    prices: Prices = Prices()
    # Connecting within a region takes milliseconds; half a second tolerates one lost packet.
    connect_timeout: Seconds = Seconds("500ms")
    # S3 nearly always responds within 200 ms; after two seconds, recomputing is faster.
    timeout: Seconds = Seconds(2)
    # First bytes arrive after 20 to 200 ms, and lookups may wait for a request slot.
    lookup_timeout: Seconds = Seconds(2)
    # A recovered service is in use again within five seconds; a probe every three seconds costs a cent a day.
    breaker_cooldown_max: Seconds = Seconds(3)
    # Well below the rate of one S3 stream; a job has many streams.
    bytes_per_second_min: ByteSize = ByteSize(20 * _MIB)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix and not self.prefix.endswith("/"):
            msgspec.structs.force_setattr(self, "prefix", f"{self.prefix}/")
        check_field(_BUCKET.fullmatch(self.bucket) is not None, "bucket", self.bucket, "3 to 63 of a-z 0-9 . -")
        prefix_ok = _PREFIX.fullmatch(self.prefix) is not None and ".." not in self.prefix
        check_field(prefix_ok, "prefix", self.prefix, "up to 8 parts of A-Z a-z 0-9 _ . = -, separated by '/'")
        check_field(_REGION.fullmatch(self.region) is not None, "region", self.region, "a name such as 'eu-central-1'")
        check_field(1 <= self.concurrency <= 4096, "concurrency", self.concurrency, "1 to 4096")
        check_field(1 <= self.tries <= 10, "tries", self.tries, "1 to 10")
        check_field(not self.ttl or self.ttl >= 60, "ttl", self.ttl, "0 or at least 1 minute")
        interval_ok = 1 <= self.keeper_interval <= 86400
        check_field(interval_ok, "keeper_interval", self.keeper_interval, "1 second to 1 day")
        check_field(1 <= self.pack_blocks <= 256, "pack_blocks", self.pack_blocks, "1 to 256")
        for name in ("connect_timeout", "timeout"):
            check_field(0 < getattr(self, name) <= 300, name, getattr(self, name), "above 0 and at most 5 minutes")
        self._check_endpoint()
        self._check_credentials()
        self._check_encryption()

    @property
    def path_style(self) -> bool:
        """Whether URLs contain the bucket in the path instead of the host name."""
        # The wildcard certificate of AWS does not match a bucket name with dots.
        needs_path = bool(self.endpoint) or "." in self.bucket
        return self.addressing == "path" or (self.addressing == "auto" and needs_path)

    @property
    def is_express(self) -> bool:
        """Whether the bucket is a directory bucket of S3 Express One Zone."""
        return self.bucket.endswith("--x-s3")

    @property
    def chosen_client(self) -> str:
        """Name of the client: ``direct``, unless the configuration sets another or needs aioboto3."""
        if self.client != "auto":
            return self.client
        url = urlsplit(self.url(self.region or "us-east-1"))
        is_proxied = url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.hostname or "")
        return "aioboto3" if is_proxied or self.is_express else "direct"

    def url(self, region: str) -> str:
        """Return the service's URL, without the bucket."""
        aws = f"https://s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
        return self.endpoint.rstrip("/") or aws

    def _check_endpoint(self) -> None:
        if not self.endpoint:
            return
        try:
            parts = urlsplit(self.endpoint)
            host, _ = parts.hostname, parts.port
        except ValueError:
            raise ConfigError("'endpoint' (not shown) is not a URL. Expected one like 'https://host:9000'.") from None
        if parts.username is not None or parts.query or parts.fragment or parts.path not in ("", "/"):
            # Not shown, because users sometimes put keys here.
            raise ConfigError("'endpoint' (not shown) has more than a host and port. Give 'https://host:port'.")
        scheme_ok = parts.scheme in ("http", "https") and bool(host)
        check_field(scheme_ok, "endpoint", self.endpoint, "a URL such as 'https://host:9000'")
        if parts.scheme == "http" and not self.insecure and not Endpoint(host or "").is_local:
            raise ConfigError(
                f"'endpoint' is {self.endpoint!r}: without TLS, prompts cross the network unencrypted. "
                "Expected https. Give it, or set 'insecure' to true."
            )
        check_tls_files(self, is_encrypted=parts.scheme == "https", remedy="Give an 'endpoint' with 'https://'")

    def _check_credentials(self) -> None:
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ConfigError("'access_key_id' and 'secret_access_key' belong together. Give both, or neither.")
        if self.session_token is not None and self.access_key_id is None:
            raise ConfigError("'session_token' belongs to 'access_key_id'. Give both, or leave it out.")
        ways = [name for name in ("access_key_id", "profile", "anonymous") if getattr(self, name)]
        if len(ways) > 1:
            raise ConfigError(f"{' and '.join(map(repr, ways))} exclude each other. Give one of them.")

    def _check_encryption(self) -> None:
        if (self.sse_kms_key_id or self.sse_bucket_key) and not self.sse.startswith("aws:kms"):
            raise ConfigError("'sse_kms_key_id' and 'sse_bucket_key' need 'sse': 'aws:kms'. Set it, or drop them.")
        if self.sse_customer_key is None:
            return
        if self.sse:
            raise ConfigError("'sse' and 'sse_customer_key' exclude each other. Give one of them.")
        self.sse_customer_key.require(_check_customer_key)
        if urlsplit(self.endpoint).scheme == "http" and not Endpoint(urlsplit(self.endpoint).hostname or "").is_local:
            raise ConfigError("'sse_customer_key' would cross the network unencrypted. Give an 'endpoint' with https.")


def _check_customer_key(text: str) -> None:
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != 32:
        raise ConfigError("'sse_customer_key' (not shown) is not 32 bytes in base64. Make one of random bytes.")
