"""Signatures equal to those of botocore and of AWS's examples."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from urllib.parse import quote

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials as BotoCredentials

from kvstore.backends.s3.credentials import Credentials, Signer, quoted

NOW = datetime(2026, 3, 1, 12, 30, 5, tzinfo=UTC)


def as_botocore(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    query: dict[str, str],
    headers: dict[str, str],
    credentials: Credentials,
) -> str:
    """Return the authorization that botocore computes for the same request."""
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: NOW)
    url = f"https://{headers['host']}{path}" + (f"?{quoted(query)}" if query else "")
    request = AWSRequest(method, url, {name: value for name, value in headers.items() if name != "host"})
    request.context["client_config"] = Config(s3={"payload_signing_enabled": False})
    boto = BotoCredentials(credentials.access_key, credentials.secret_key, credentials.token)
    S3SigV4Auth(boto, "s3", "eu-central-1").add_auth(request)
    return str(request.headers["Authorization"])


def test_as_botocore_signs(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """For requests of all kinds our signature equals botocore's."""
    signer = Signer("eu-central-1")
    for number in range(50):
        token = rng.choice((None, "token/+="))
        credentials = Credentials(f"AKIA{number:04}", f"secret{rng.random()}", token)
        path = "/bucket/" + quote(rng.choice(("kv/0a1/ff/00", "a=b/c~d_e.f", "ü x")), safe="/-._~")
        query = rng.choice(({}, {"delete": ""}, {"list-type": "2", "prefix": "kv/a b=", "start-after": "ü+"}))
        headers = {"host": rng.choice(("s3.eu-central-1.amazonaws.com", "host:9000"))}
        if rng.random() < 0.5:
            headers["x-amz-server-side-encryption"] = "aws:kms"
        method = rng.choice(("GET", "PUT", "HEAD", "POST"))
        ours = dict(headers)
        signer.sign(method, path, query, ours, credentials, NOW.timestamp())
        theirs = as_botocore(monkeypatch, method, path, query, headers, credentials)
        assert ours["authorization"] == theirs, (method, path, query)


def test_signature_of_the_documentation() -> None:
    """The signing key of AWS's documentation gives the documented signature."""
    # "GET Bucket Lifecycle" of the page named in sigv4.py hashes an empty body; with UNSIGNED-PAYLOAD this is ours.
    credentials = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    headers = {"host": "examplebucket.s3.amazonaws.com"}
    signer = Signer("us-east-1")
    signer.sign("GET", "/", {"lifecycle": ""}, headers, credentials, datetime(2013, 5, 24, tzinfo=UTC).timestamp())
    assert headers["x-amz-date"] == "20130524T000000Z"
    assert "Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request" in headers["authorization"]
    assert "SignedHeaders=host;x-amz-content-sha256;x-amz-date" in headers["authorization"]


def test_signing_key_changes_with_day_and_secret() -> None:
    """Another day or another secret gives another signature; the same second gives the same one."""

    def signature(signer: Signer, secret: str, now: float) -> str:
        headers = {"host": "h"}
        signer.sign("GET", "/", {}, headers, Credentials("A", secret), now)
        return headers["authorization"]

    one = Signer("r")
    first = signature(one, "s", 1e9)
    assert signature(one, "s", 1e9) == first
    others = [signature(one, "t", 1e9), signature(one, "s", 1e9 + 86400), signature(one, "s", 1e9 + 1)]
    assert len({first, *others}) == 4
    assert signature(one, "s", 1e9) == first == signature(Signer("r"), "s", 1e9)


def test_nothing_is_shown() -> None:
    """The texts of credentials show neither key nor secret nor token."""
    assert "canary" not in repr(Credentials("canary1", "canary2", "canary3"))
