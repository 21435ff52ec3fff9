"""Failures of the S3 backend by cause, with their consequences."""

from __future__ import annotations

import enum
import re
from typing import Final

from kvstore.errors import BackendUnavailableError
from kvstore.types import Outcome


class Cause(enum.StrEnum):
    """Causes of failures; each has a counter ``failed_<cause>``."""

    REFUSED = "refused"  # The endpoint refuses connections or is unreachable.
    DNS = "dns"  # The endpoint's name can't be resolved.
    TLS = "tls"  # The TLS handshake failed: certificate, name or protocol.
    RESET = "reset"  # The connection broke before the response began.
    CUT = "cut"  # The connection broke during the response.
    TIMEOUT = "timeout"  # No connection, or no complete response, in time.
    PROTOCOL = "protocol"  # The response is invalid or does not match the request.
    LENGTH = "length"  # The object is longer than its buffers.
    XML_ERROR = "xml_error"  # An error in the body of a response with a success status.
    SERVER_ERROR = "server_error"  # 500, 502, 504: the service failed.
    SLOW_DOWN = "slow_down"  # 503 or 429: the service limits the request rate.
    CONFLICT = "conflict"  # 409: another conditional write of the same object is running.
    NO_BUCKET = "no_bucket"  # 404 for the bucket.
    REGION = "region"  # The bucket is in another region.
    REDIRECT = "redirect"  # The service redirects to another address; never followed.
    CREDENTIALS = "credentials"  # Unknown key, wrong signature, expired token, or no credentials at all.
    CLOCK = "clock"  # This machine's clock is too inaccurate for signatures.
    FORBIDDEN = "forbidden"  # The credentials are valid but lack the right.
    RANGE = "range"  # 416: the object ends before the requested range.
    CHECKSUM = "checksum"  # The bytes that the service received do not match their checksum.
    UNSUPPORTED = "unsupported"  # The service does not implement the request (501).
    REJECTED = "rejected"  # Another client error (400 and the like).
    CLOSED = "closed"  # The client was closed during the request.


_RETRIED: Final = frozenset(
    {Cause.REFUSED, Cause.RESET, Cause.CUT, Cause.TIMEOUT, Cause.PROTOCOL, Cause.XML_ERROR}
    | {Cause.SERVER_ERROR, Cause.SLOW_DOWN, Cause.CONFLICT, Cause.CHECKSUM}
)
_OUTCOMES: Final = {
    Cause.TIMEOUT: Outcome.TIMEOUT,
    Cause.LENGTH: Outcome.CORRUPT,
    Cause.RANGE: Outcome.CORRUPT,
    Cause.CREDENTIALS: Outcome.REFUSED,
    Cause.CLOCK: Outcome.REFUSED,
    Cause.FORBIDDEN: Outcome.REFUSED,
    Cause.CLOSED: Outcome.CANCELLED,
}

_ADVICE: Final = {
    Cause.REFUSED: "Check 'endpoint', and that the service runs.",
    Cause.DNS: "Check 'endpoint' and 'region', or the resolver of this machine.",
    Cause.TLS: "Give the service's authority as 'tls_ca', and check the host name in 'endpoint'.",
    Cause.NO_BUCKET: "Create the bucket, or correct 'bucket'.",
    Cause.REGION: "Set 'region' to the bucket's region.",
    Cause.REDIRECT: "Redirects are not followed: set 'region' and 'endpoint' to those of the bucket.",
    Cause.CREDENTIALS: "Correct the access key and secret, or renew the session token.",
    Cause.CLOCK: "Set this machine's clock (NTP): signatures are valid for 15 minutes.",
    Cause.FORBIDDEN: "Give these credentials the rights that docs/s3.md lists, s3:ListBucket among them.",
    Cause.UNSUPPORTED: "See docs/s3.md for the options that this service may need.",
    Cause.LENGTH: "Something else writes under this prefix, or another version does.",
}


class S3Error(BackendUnavailableError):
    """A failed request. Of the service's response, the text contains only the status and error code.

    Args:
        cause: Cause, which is also the counter's name.
        message: The problem in one sentence; advice for the cause is appended.
        status: HTTP status of the response, 0 without a response.
    """

    def __init__(self, cause: Cause, message: str, status: int = 0) -> None:
        advice = _ADVICE.get(cause, "")
        super().__init__(f"{message} {advice}".rstrip(), backend="s3")
        self.cause = cause
        self.status = status

    def is_of_object(self, *statuses: int) -> bool:
        """Return whether the response had one of these statuses and concerns the object, not its bucket."""
        return self.status in statuses and self.cause is not Cause.NO_BUCKET

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed a moment later."""
        return self.cause in _RETRIED

    @property
    def outcome(self) -> Outcome:
        """Outcome of a block with this failure."""
        return _OUTCOMES.get(self.cause, Outcome.IO_ERROR)


_CODES: Final = {
    Cause.NO_BUCKET: ("NoSuchBucket", "InvalidBucketName"),
    Cause.REGION: ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"),
    Cause.CREDENTIALS: (
        *("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"),
        *("TokenRefreshRequired", "InvalidClientTokenId"),
    ),
    Cause.CLOCK: ("RequestTimeTooSkewed", "RequestExpired"),
    Cause.FORBIDDEN: ("AccessDenied",),
    Cause.SLOW_DOWN: ("SlowDown", "ServiceUnavailable"),
    Cause.CHECKSUM: ("BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"),
    Cause.RANGE: ("InvalidRange",),
    Cause.UNSUPPORTED: ("NotImplemented",),
    Cause.TIMEOUT: ("RequestTimeout",),
    Cause.SERVER_ERROR: ("InternalError",),
    Cause.CONFLICT: ("OperationAborted", "ConditionalRequestConflict"),
}
_BY_CODE: Final = {code: cause for cause, codes in _CODES.items() for code in codes}
_BY_STATUS: Final = {
    401: Cause.CREDENTIALS,
    403: Cause.FORBIDDEN,
    409: Cause.CONFLICT,
    416: Cause.RANGE,
    429: Cause.SLOW_DOWN,
    501: Cause.UNSUPPORTED,
    503: Cause.SLOW_DOWN,
}
_XML_STARTS: Final = (b"<?xml", b"<Erro")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")


def error_of_response(status: int, text: str) -> S3Error:
    """Return the failure for an HTTP status (200 for an error in the body of a success) and a response body.

    Its text contains only the error code of the body: services echo signatures and keys.
    """
    found = _CODE.search(text)
    code = found[1] if found else ""
    cause = _BY_CODE.get(code)
    if cause is None:
        if status < 300:
            cause = Cause.XML_ERROR
        elif status < 400:
            cause = Cause.REDIRECT
        else:
            cause = _BY_STATUS.get(status, Cause.SERVER_ERROR if status >= 500 else Cause.REJECTED)
    elif status < 300:
        # Errors with a success status have a cause of their own; the code remains in the text.
        cause = Cause.XML_ERROR
    return S3Error(cause, f"The service answered {status}{f' {code}' if code else ''}.", status)


def error_of_part(code: str) -> S3Error:
    """Return the failure for the error code of one object in a multi-object response."""
    return error_of_response(403 if code == "AccessDenied" else 500, f"<Code>{code}</Code>")


def looks_like_error(start: bytes) -> bool:
    """Return whether a body begins like an error document. Records never do: their first byte is not text."""
    return start.startswith(_XML_STARTS)
