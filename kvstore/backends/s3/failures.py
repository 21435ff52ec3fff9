"""Failures of the S3 backend by cause, and what follows from each."""

from __future__ import annotations

import enum
import re
from typing import Final

from kvstore.errors import BackendUnavailableError
from kvstore.types import Outcome

__all__ = ["Cause", "S3Error", "error_of_part", "error_of_response", "looks_like_error"]


class Cause(enum.StrEnum):
    """What went wrong; the name of the counter it is counted under (``failed_<cause>``)."""

    REFUSED = "refused"  # Nobody listens at the endpoint, or no way leads there.
    DNS = "dns"  # The endpoint's name can't be resolved.
    TLS = "tls"  # No TLS connection: certificate, name or protocol.
    RESET = "reset"  # The connection broke before the answer began.
    CUT = "cut"  # The connection broke within the answer.
    TIMEOUT = "timeout"  # No connection, or no whole answer, in time.
    PROTOCOL = "protocol"  # What came is no answer to what was asked.
    LENGTH = "length"  # The object is longer than the buffers for it.
    XML_ERROR = "xml_error"  # An error in the body of an answer that claims success.
    SERVER_ERROR = "server_error"  # 500, 502, 504: the service failed.
    SLOW_DOWN = "slow_down"  # 503 or 429: the service asks for fewer requests.
    CONFLICT = "conflict"  # 409: another conditional write of the same object is under way.
    NO_BUCKET = "no_bucket"  # 404 for the bucket.
    REGION = "region"  # The bucket lies in another region.
    REDIRECT = "redirect"  # The service points to another address; never followed.
    CREDENTIALS = "credentials"  # Unknown key, wrong signature, expired token, or no credentials at all.
    CLOCK = "clock"  # This machine's clock is too far off for signatures.
    FORBIDDEN = "forbidden"  # The credentials are good and may not do this.
    RANGE = "range"  # 416: the object is shorter than what was asked of it.
    CHECKSUM = "checksum"  # The service received other bytes than the checksum says.
    UNSUPPORTED = "unsupported"  # The service does not know what was asked for (501).
    REJECTED = "rejected"  # Another refusal (400 and the like).
    CLOSED = "closed"  # The client was closed meanwhile.


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
    """A request failed; ``cause`` says how. Its text holds nothing that the service wrote but its error code.

    Args:
        cause: What it is counted under.
        message: What was wrong, in one sentence; what to do is added to it.
        status: HTTP status of the answer, 0 if there was none.
    """

    def __init__(self, cause: Cause, message: str, status: int = 0) -> None:
        advice = _ADVICE.get(cause, "")
        super().__init__(f"{message} {advice}".rstrip(), backend="s3")
        self.cause = cause
        self.status = status

    def is_of_object(self, *statuses: int) -> bool:
        """Tell whether the answer had one of these statuses, and is about the object: its bucket is there."""
        return self.status in statuses and self.cause is not Cause.NO_BUCKET

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed a moment later."""
        return self.cause in _RETRIED

    @property
    def outcome(self) -> Outcome:
        """Outcome of a block that failed with it."""
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
    """Return the failure for an HTTP status (200 for an error in the body of a success) and the body of an answer.

    Only the error code in it is shown: services echo signatures and keys.
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
        # The code of an error that came as a success says what it is, but it is counted as what it came as.
        cause = Cause.XML_ERROR
    return S3Error(cause, f"The service answered {status}{f' {code}' if code else ''}.", status)


def error_of_part(code: str) -> S3Error:
    """Return the failure of one object of several, as that error alone would have been answered."""
    return error_of_response(403 if code == "AccessDenied" else 500, f"<Code>{code}</Code>")


def looks_like_error(start: bytes) -> bool:
    """Tell whether a body begins as an error does. No record does: its first byte is no text."""
    return start.startswith(_XML_STARTS)
