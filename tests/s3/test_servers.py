"""The servers used by the S3 tests behave as those tests assume."""

from __future__ import annotations

import contextlib
import http.client
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.exceptions import ClientError

from tests.s3.fault_server import Fault, FaultServer
from tests.s3.servers import READ_ONLY, S3Server

BODY = bytes(range(256)) * 64


def request(server: FaultServer, method: str, name: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Make one request on a connection of its own; return the status and body."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port or 0, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, f"/{server.bucket}/{name}", body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_redirects_point_to_a_trap(faults: FaultServer) -> None:
    """A client that follows a redirect is counted."""
    faults.plan(Fault.REDIRECT)
    assert request(faults, "GET", "a")[0] == 307
    assert faults.counts().get("trapped", 0) == 0
    host, _, port = faults.trap.rpartition("/")[2].partition(":")
    with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        connection.request("GET", "/")
        with pytest.raises((OSError, http.client.HTTPException)):
            connection.getresponse()
    assert faults.counts()["trapped"] == 1


def test_memory_server_behaves_like_s3(faults: FaultServer) -> None:
    """Ranges, conditions, pages and DeleteObjects of the memory server are those of S3, as boto3 sees them."""
    with contextlib.closing(admin_of(faults)) as client:
        names = [f"k/{number:04}" for number in range(1003)]
        for name in names:
            request(faults, "PUT", name, b"0123456789")
        got = client.get_object(Bucket=faults.bucket, Key=names[0], Range="bytes=3-5")
        assert (got["Body"].read(), got["ContentRange"]) == (b"345", "bytes 3-5/10")
        assert client.get_object(Bucket=faults.bucket, Key=names[0], Range="bytes=8-99")["Body"].read() == b"89"
        assert client.head_object(Bucket=faults.bucket, Key=names[0])["ContentLength"] == 10
        with pytest.raises(ClientError, match="InvalidRange"):
            client.get_object(Bucket=faults.bucket, Key=names[0], Range="bytes=10-12")
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=faults.bucket, Key=names[0], Body=b"other", IfNoneMatch="*")
        etag = client.put_object(Bucket=faults.bucket, Key=names[0], Body=b"other")["ETag"]
        client.put_object(Bucket=faults.bucket, Key=names[0], Body=b"third", IfMatch=etag)
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=faults.bucket, Key=names[0], Body=b"fourth", IfMatch=etag)
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=faults.bucket, Prefix="k/", StartAfter="k/0001")
        assert [found["Key"] for page in pages for found in page["Contents"]] == names[2:]
        client.delete_objects(Bucket=faults.bucket, Delete={"Objects": [{"Key": name} for name in names[:1000]]})
    assert faults.counts()["objects"] == 3


def test_null_server_throws_away(faults: FaultServer) -> None:
    """Configured to keep nothing, the server reads stored data and stays empty."""
    faults.keep_puts(False)
    assert request(faults, "PUT", "a", BODY * 100)[0] == 200
    assert faults.counts()["objects"] == 0


@pytest.mark.matrix
def test_seaweedfs_refuses_requests_that_moto_accepts(
    moto_server: S3Server, weed_server: S3Server, weed_tls: S3Server
) -> None:
    """SeaweedFS refuses wrong secrets, wrong checksums and forbidden writes; hence it is used beside moto."""
    put: dict[str, Any] = {"Bucket": weed_server.bucket, "Key": "servers/a", "Body": b"x"}
    for server in (moto_server, weed_server, weed_tls):
        with contextlib.closing(server.admin()) as client:
            client.put_object(**put)
            with pytest.raises(ClientError, match="PreconditionFailed"):
                client.put_object(**put, IfNoneMatch="*")
    for key, secret in ((weed_server.access_key, "wrong"), READ_ONLY):
        with (
            contextlib.closing(admin_of(weed_server, key, secret)) as client,
            pytest.raises(ClientError, match=r"403|Denied|Signature"),
        ):
            client.put_object(**put)
    with contextlib.closing(weed_server.admin()) as client, pytest.raises(ClientError, match="BadDigest"):
        client.put_object(**put, ContentMD5="1B2M2Y8AsgTpgAmY7PhCfg==")


def admin_of(server: FaultServer | S3Server, key: str = "", secret: str = "") -> Any:
    """Return boto3's client for a server, optionally with other credentials."""
    known = S3Server("", server.url, __file__, [], server.tls_ca, server.bucket)  # type: ignore[arg-type]
    known.access_key, known.secret_key = key or server.access_key, secret or server.secret_key
    return known.admin()
