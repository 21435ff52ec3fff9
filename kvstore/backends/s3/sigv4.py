"""Signatures of requests: AWS Signature Version 4 for the service "s3".

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html. Bodies are not part of the
signature (``UNSIGNED-PAYLOAD``): hashing them costs more than sending them, and records carry their own checksum.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

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
