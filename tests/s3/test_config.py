"""Configurations: refused values and their errors, the choice of the client, and the requests."""

from __future__ import annotations

import base64
import sys
from typing import Any

import pytest

from kvstore.backends.s3 import S3Config
from kvstore.backends.s3.client import make_client
from kvstore.backends.s3.direct import DirectClient
from kvstore.backends.s3.names import ObjectNames
from kvstore.config import decode_config, encode_config
from kvstore.errors import ConfigError
from kvstore.namespace import Namespace

KEY = base64.b64encode(bytes(32)).decode()
KEYS = {"access_key_id": "AKIA", "secret_access_key": "canary"}


def decoded(**options: Any) -> S3Config:
    """Return a configuration as a tier decodes it."""
    return decode_config(S3Config, {"bucket": "kv-cache", **options}, where="s3 tier")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bucket": "kv"}, "'bucket' is 'kv'"),
        ({"bucket": "Upper_Case"}, "'bucket'"),
        ({"prefix": "a//b"}, "'prefix'"),
        ({"prefix": "../x"}, "'prefix'"),
        ({"prefix": "ü/"}, "'prefix'"),
        ({"region": "eu central"}, "'region'"),
        ({"endpoint": "s3.example:9000"}, "'endpoint'"),
        ({"endpoint": "ftp://host"}, "'endpoint'"),
        ({"endpoint": "http://host:9000"}, "set 'insecure' to true"),
        ({"endpoint": "http://127.0.0.1:9000", "tls_ca": "a"}, "'tls_ca' would be ignored: .* Give an 'endpoint' with"),
        ({"endpoint": "https://user:canary@host"}, "'endpoint' \\(not shown\\)"),
        ({"endpoint": "https://host/path"}, "more than a host and port"),
        ({"endpoint": "https://host:99999"}, "is not a URL"),
        ({"access_key_id": "AKIA"}, "belong together"),
        ({"session_token": "canary"}, "belongs to 'access_key_id'"),
        ({**KEYS, "profile": "p"}, "exclude each other"),
        ({"anonymous": True, "profile": "p"}, "exclude each other"),
        ({"sse_kms_key_id": "k"}, "need 'sse': 'aws:kms'"),
        ({"sse": "AES256", "sse_customer_key": KEY}, "exclude each other"),
        ({"sse_customer_key": "canary"}, "is not 32 bytes in base64"),
        ({"sse_customer_key": KEY, "endpoint": "http://host", "insecure": True}, "cross the network unencrypted"),
        ({"sse_customer_key": KEY, "endpoint": "HTTP://host", "insecure": True}, "cross the network unencrypted"),
        ({"sse": "rot13"}, "'AES256'"),
        ({"client": "curl"}, "'aioboto3'"),
        ({"concurrency": 0}, "'concurrency' is 0"),
        ({"tries": 11}, "'tries' is 11"),
        ({"timeout": 0}, "'timeout' is 0.0"),
        ({"connect_timeout": "1h"}, "'connect_timeout'"),
        ({"buckets": "x"}, "Did you mean 'bucket'"),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    """An unusable value is refused with the expected form, and without a secret."""
    with pytest.raises(ConfigError, match=text) as caught:
        decoded(**options)
    assert "canary" not in str(caught.value)


def test_prefixes_and_aliases_are_accepted_and_secrets_hidden() -> None:
    """Prefixes get their slash, option names of other tools are accepted, and no text shows a secret."""
    assert decoded(prefix="team/kv").prefix == "team/kv/"
    assert decoded(prefix="").prefix == ""
    assert decoded(endpoint_url="http://127.0.0.1:9000").endpoint == "http://127.0.0.1:9000"
    assert decoded(endpoint="http://10.0.0.1", insecure=True).path_style
    assert not decoded().path_style
    assert decoded(addressing="path").path_style
    shown = repr(decoded(**KEYS)) + str(encode_config(decoded(**KEYS)))
    assert "canary" not in shown


def test_client_of_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own connections are the default; a proxy or an Express bucket needs aioboto3."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert decoded().chosen_client == "direct"
    assert decoded(bucket="kv--euc1-az1--x-s3").chosen_client == "aioboto3"
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:3128")
    assert decoded().chosen_client == "aioboto3"
    assert decoded(client="direct").chosen_client == "direct"
    monkeypatch.setenv("no_proxy", ".example.com")
    assert decoded(endpoint="https://s3.example.com").chosen_client == "direct"


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package, a client's error names the package to install."""
    for module in ("boto", "credentials"):
        monkeypatch.delitem(sys.modules, f"kvstore.backends.s3.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "aioboto3", None)
    with pytest.raises(ConfigError, match=r"Install vllm-kvstore\[s3\]"):
        make_client(decoded(client="aioboto3"))


@pytest.mark.parametrize(
    ("options", "host", "path"),
    [
        ({"region": "eu-central-1"}, "kv-cache.s3.eu-central-1.amazonaws.com", "/k"),
        ({"region": "cn-north-1"}, "kv-cache.s3.cn-north-1.amazonaws.com.cn", "/k"),
        ({"bucket": "kv.cache"}, "s3.us-east-1.amazonaws.com", "/kv.cache/k"),
        ({"addressing": "path"}, "s3.us-east-1.amazonaws.com", "/kv-cache/k"),
        ({"endpoint": "https://minio:9000"}, "minio:9000", "/kv-cache/k"),
        ({"endpoint": "https://minio:9000", "addressing": "virtual"}, "kv-cache.minio:9000", "/k"),
        ({"endpoint": "http://[::1]:9000"}, "[::1]:9000", "/kv-cache/k"),
    ],
)
async def test_addresses(options: dict[str, Any], host: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bucket and key are placed as style and service require."""
    head = await sent_head(monkeypatch, **KEYS, **options)
    assert head.startswith(f"HEAD {path} HTTP/1.1\r\n")
    assert f"\r\nhost: {host}\r\n" in head


@pytest.mark.parametrize(
    ("options", "method", "lines"),
    [
        ({"sse": "AES256"}, "PUT", ["x-amz-server-side-encryption: AES256"]),
        (
            {"sse": "aws:kms", "sse_kms_key_id": "id", "sse_bucket_key": True},
            "PUT",
            ["x-amz-server-side-encryption-aws-kms-key-id: id", "bucket-key-enabled: true"],
        ),
        ({"sse": "AES256"}, "HEAD", []),
        (
            {"sse_customer_key": KEY},
            "PUT",
            [f"encryption-customer-key: {KEY}", "customer-key-md5: cLyPS3KoaSFGi/joRB3OUQ=="],
        ),
        ({"sse_customer_key": KEY}, "HEAD", ["x-amz-server-side-encryption-customer-algorithm: AES256"]),
        ({"requester_pays": True}, "HEAD", ["x-amz-request-payer: requester"]),
        ({"session_token": "t"}, "HEAD", ["x-amz-security-token: t"]),
        ({"checksums": "when_supported"}, "PUT", ["x-amz-checksum-crc32: "]),
        ({}, "PUT", ["content-length: 4", "if-none-match: *", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]),
    ],
)
async def test_headers(options: dict[str, Any], method: str, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Configured headers are in the requests that they concern, and are signed."""
    head = await sent_head(monkeypatch, method, **KEYS, **options)
    for line in lines:
        assert line in head
    assert ("server-side-encryption" in head) is any("encryption" in line or "bucket-key" in line for line in lines)
    signed = head.partition("SignedHeaders=")[2].partition(",")[0].split(";")
    names = [line.partition(":")[0] for line in head.split("\r\n") if line.startswith(("x-amz-", "host:"))]
    assert signed == sorted(names)


async def test_anonymous(monkeypatch: pytest.MonkeyPatch) -> None:
    """An anonymous request has no signature."""
    assert "authorization" not in await sent_head(monkeypatch, anonymous=True)


async def sent_head(monkeypatch: pytest.MonkeyPatch, method: str = "HEAD", **options: Any) -> str:
    """Return the head of a request."""
    heads: list[str] = []

    class Noted(Exception):
        pass

    async def request(self: object, frames: list[bytes], answer: object, *, timeout_s: float) -> None:
        heads.append(frames[0].decode())
        raise Noted

    monkeypatch.setattr("kvstore.backends.s3.wire.Wire.request", request)
    client = DirectClient(decoded(**options))
    await client.open()
    with pytest.raises(Noted):
        await (
            client.put("k", [b"body"], timeout_s=1, if_absent=True)
            if method == "PUT"
            else client.head("k", timeout_s=1)
        )
    await client.close()
    return heads[0]


def test_names() -> None:
    """Names begin with bits of a hash, contain namespace and key, and differ for different blocks."""
    namespace = Namespace({"a": 1})
    names = ObjectNames("kv/", namespace)
    digits, middle, key = names.block(b"\x00\xff").removeprefix("kv/").split("/")
    assert (len(digits), middle, key) == (3, namespace.hex, "00ff")
    many = {names.block(bytes([a, b])) for a in range(256) for b in range(256)}
    assert len(many) == 65536
    assert len({name.split("/")[1] for name in many}) == 4096
    assert ObjectNames("kv/", Namespace({"a": 2})).block(b"x") != names.block(b"x")
