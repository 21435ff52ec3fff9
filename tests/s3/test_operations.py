"""Refusals and requests of a service: credentials, rights, checksums, conditions, and a start without the service."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import os
import random
import stat
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.s3 import S3Backend, direct
from kvstore.backends.s3.failures import Cause, S3Error, error_of_response
from kvstore.errors import BackendClosedError, BackendError, ConfigError
from kvstore.testing.records import RecordMaker
from kvstore.testing.tier_rig import TierRig
from kvstore.testing.waiting import eventually_async
from kvstore.types import LookupResult, Outcome
from tests.s3.clients import EACH_CLIENT, NAMESPACE, config_for, opened, opened_client, options_for
from tests.s3.fault_server import Fault, FaultServer
from tests.s3.servers import READ_ONLY, S3Server


@pytest.fixture(params=EACH_CLIENT)
def client(request: pytest.FixtureRequest) -> str:
    """Return the name of each client."""
    name: str = request.param
    return name


async def refusal(server: S3Server | FaultServer, **more: Any) -> S3Error:
    """Return the failure of a backend's open."""
    with pytest.raises(BackendError) as caught:
        await opened(server, **more)
    assert isinstance(caught.value, S3Error)
    return caught.value


@pytest.mark.parametrize(
    ("options", "cause", "says"),
    [
        ({"secret_access_key": "wrong-canary"}, Cause.CREDENTIALS, ""),
        ({"access_key_id": "AKIANOBODY0000000000"}, Cause.CREDENTIALS, ""),
        ({"bucket": "kvstore-not-there"}, Cause.NO_BUCKET, "Create the bucket"),
        ({"endpoint": "http://127.0.0.1:9"}, Cause.REFUSED, ""),
        ({"endpoint": "https://nowhere.invalid"}, Cause.DNS, ""),
    ],
)
async def test_a_start_that_fails_names_its_cause(
    weed_server: S3Server, client: str, options: dict[str, Any], cause: Cause, says: str
) -> None:
    """Wrong credentials, a missing bucket, and an endpoint without a listener or an address are reported as such."""
    error = await refusal(weed_server, client=client, **options)
    assert error.cause is cause and says in str(error)
    assert "wrong-canary" not in str(error)


async def test_clock_skew(weed_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is off by an hour is reported as such."""
    now = time.time()
    monkeypatch.setattr("kvstore.backends.s3.credentials.time.time", lambda: now - 3600)
    error = await refusal(weed_server, client="direct")
    assert error.cause is Cause.CLOCK
    assert "NTP" in str(error)


async def test_unknown_certificate_authority_stops_requests(weed_tls: S3Server, client: str) -> None:
    """Without the service's certificate authority, no request is sent."""
    assert (await refusal(weed_tls, client=client, tls_ca=None)).cause is Cause.TLS


async def test_read_only(weed_server: S3Server, client: str, rng: random.Random) -> None:
    """With read-only rights, blocks are loaded and stores are refused."""
    prefix = "kv-shared-read-only/"
    access, secret = READ_ONLY
    writer = await opened(weed_server, client=client, prefix=prefix)
    reader = await opened(weed_server, client=client, prefix=prefix, access_key_id=access, secret_access_key=secret)
    maker = RecordMaker(NAMESPACE, writer.geometry, rng)
    key, payload = maker.key(), maker.payload(4096)
    assert await writer.put([maker.write(key, payload)]) == [Outcome.OK]
    target = maker.target(key)
    assert await reader.get_into([target.read]) == [Outcome.OK]
    assert maker.content(target) == payload
    assert await reader.put([maker.write(maker.key(), payload)]) == [Outcome.REFUSED]
    assert reader.stats().counters["failed_forbidden"] == 1
    await writer.delete([key])


async def test_wrong_checksum(weed_server: S3Server, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """A write with a wrong checksum is refused by the service, counted, and not stored."""
    backend = await opened(weed_server, client="direct", checksums="when_supported")
    maker = RecordMaker(NAMESPACE, backend.geometry, rng)
    key = maker.key()
    monkeypatch.setattr(direct, "zlib", SimpleNamespace(crc32=lambda buffer, value: 0x01020304))
    assert await backend.put([maker.write(key, b"x" * 4096)]) == [Outcome.IO_ERROR]
    assert backend.stats().counters["failed_checksum"] == 3
    monkeypatch.undo()
    assert await backend.exists([key]) == [False]
    assert await backend.put([maker.write(key, b"x" * 4096)]) == [Outcome.OK]
    await backend.delete([key])


async def test_customer_key(weed_tls: S3Server, client: str, rng: random.Random) -> None:
    """A block stored under our key is returned with it, and refused without it."""
    key = base64.b64encode(rng.randbytes(32)).decode()
    ours = await opened(weed_tls, client=client, prefix="kv-customer-key/", sse_customer_key=key)
    others = await opened(weed_tls, client=client, prefix="kv-customer-key/")
    maker = RecordMaker(NAMESPACE, ours.geometry, rng)
    block, payload = maker.key(), maker.payload(4096)
    assert await ours.put([maker.write(block, payload)]) == [Outcome.OK]
    target = maker.target(block)
    assert await ours.exists([block]) == [True]
    assert await ours.get_into([target.read]) == [Outcome.OK]
    assert maker.content(target) == payload
    assert await others.get_into([maker.target(block).read]) == [Outcome.IO_ERROR]
    await ours.delete([block])


async def test_conditions(weed_server: S3Server, client: str) -> None:
    """A write under a false condition changes nothing and is not a failure."""
    objects = await opened_client(weed_server, client=client)
    etag = await objects.put("cond/a", [b"one"], timeout_s=20, if_absent=True)
    assert etag
    assert await objects.put("cond/a", [b"two"], timeout_s=20, if_absent=True) is None
    buffer = memoryview(bytearray(8))
    found = await objects.get_into("cond/a", [buffer], timeout_s=20)
    assert bytes(buffer[: found.size_bytes]) == b"one"
    await objects.delete_all(["cond/a", "cond/none"], timeout_s=20)
    assert await objects.head("cond/a", timeout_s=20) is None


async def test_ranges_and_pages(weed_server: S3Server, client: str) -> None:
    """A range is read from its start, even if the object ends within it; names are listed in order, page by page."""
    objects = await opened_client(weed_server, client=client)
    names = [f"pages/{number:03}" for number in range(25)]
    for name in names:
        await objects.put(name, [bytes(range(100))], timeout_s=20)
    pieces = [memoryview(bytearray(7)), memoryview(bytearray(13))]
    found = await objects.get_into(names[0], pieces, timeout_s=20, offset=50)
    assert found is not None
    assert b"".join(pieces) == bytes(range(50, 70))
    found = await objects.get_into(names[0], pieces, timeout_s=20, offset=95)
    assert (found.size_bytes, b"".join(pieces)[:5]) == (5, bytes(range(95, 100)))
    with pytest.raises(S3Error) as caught:
        await objects.get_into(names[0], pieces, timeout_s=20, offset=500)
    assert caught.value.cause is Cause.RANGE
    page = await objects.list_page("pages/", timeout_s=20)
    assert [(info.key, info.size_bytes) for info in page.objects] == [(name, 100) for name in names]
    assert all(abs(info.modified_at - time.time()) < 3600 for info in page.objects)
    page = await objects.list_page("pages/", timeout_s=20, start_after=names[19])
    assert [info.key for info in page.objects] == names[20:]
    assert not page.more
    assert (await objects.list_page("nothing/", timeout_s=20)).objects == []
    await objects.delete_all(names, timeout_s=20)


async def test_service_without_conditions(
    faults: FaultServer, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    """Without conditional writes, the first writer still wins, and one warning reports it."""
    faults.plan("unconditional", methods=["PUT"])
    backend = await opened(faults, client="direct")
    maker = RecordMaker(NAMESPACE, backend.geometry, rng)
    keys = [maker.key() for _ in range(20)]
    assert await backend.put([maker.write(key, b"a") for key in keys]) == [Outcome.OK] * 20
    outcomes = await backend.put([maker.write(key, b"b") for key in [*keys, maker.key()]])
    assert outcomes == [Outcome.EXISTS] * 20 + [Outcome.OK]
    assert sum("If-None-Match" in record.message for record in caplog.records) == 1
    await backend.close()
    strict = await opened(faults, client="direct", conditional_put="yes")
    assert await strict.put([maker.write(maker.key(), b"a")]) == [Outcome.IO_ERROR]


def test_start_without_the_service(faults: FaultServer, client: str, rng: random.Random) -> None:
    """An engine that does not require the tier starts without the service, and uses it once it is up."""
    options = {"backend": "s3", **options_for(faults, client=client, timeout=0.5, connect_timeout=0.5)}
    keys = [rng.randbytes(32) for _ in range(4)]
    faults.plan(Fault.REFUSED)
    with pytest.raises(BackendError):
        TierRig(options, namespace=NAMESPACE, slot_bytes=4096, slots=4)
    config = {**options, "required": False, "breaker_cooldown": "50ms", "breaker_failures": 1}
    with TierRig(config, namespace=NAMESPACE, slot_bytes=4096, slots=4, timeout_s=40) as rig:
        assert rig.lookup(keys[0]) is LookupResult.MISS
        assert not rig.store(keys).success
        faults.plan(None)
        rig.until(lambda: rig.store(keys).success, "blocks to be stored")
        rig.until(lambda: rig.load(keys).success, "blocks to be loaded")


def test_a_block_that_was_taken_away(faults: FaultServer, client: str, rng: random.Random) -> None:
    """A load of a deleted block is a MISS, as is the next lookup; another engine's write is seen after the TTL."""
    options = {"backend": "s3", **options_for(faults, client=client), "negative_ttl": "1ms"}
    keys = [rng.randbytes(32) for _ in range(2)]
    rigs = [TierRig(options, namespace=NAMESPACE, slot_bytes=4096, slots=4, timeout_s=40) for _ in range(2)]
    with rigs[0] as one, rigs[1] as two:
        assert one.lookup(keys[0]) is LookupResult.MISS
        assert two.store(keys).success
        one.until(lambda: one.lookup(keys[0]) is LookupResult.HIT, "the other's block")
        faults.clear()
        assert list(one.load(keys[:1]).outcomes) == [Outcome.MISS]
        assert one.lookup(keys[0]) is LookupResult.MISS


async def test_through_a_proxy(faults: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the environment names a proxy, requests go through it, in a tunnel for https."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode().split(" ")[0])
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, url)
    for scheme in ("http", "https"):
        with pytest.raises(S3Error):
            await opened(faults, endpoint=f"{scheme}://s3.invalid", insecure=True, timeout=20)
    assert asked == ["GET", "CONNECT"]
    server.close()
    await server.wait_closed()


async def test_entities_of_a_service_are_not_expanded(faults: FaultServer, client: str) -> None:
    """A list or an answer to a deletion with entity definitions is refused before it is parsed."""
    entities = b"".join(b'<!ENTITY e%d "%s">' % (i + 1, b"&e%d;" % i * 50) for i in range(6))
    text = b'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e0 "lol">' + entities + b"]>"
    bodies = {"GET": text + b"<ListBucketResult><Name>&e6;</Name></ListBucketResult>"}
    bodies["POST"] = text + b"<DeleteResult><Deleted><Key>&e6;</Key></Deleted></DeleteResult>"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method = (await reader.readline()).split(b" ")[0].decode()
        body = bodies[method]
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        with contextlib.suppress(OSError):
            await writer.drain()
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    objects = await opened_client(faults, client=client, endpoint=url, tries=1)
    for call in (objects.list_page("kv/", timeout_s=20), objects.delete_all(["k"], timeout_s=20)):
        with pytest.raises(S3Error, match="declares types") as caught:
            await call
        assert caught.value.cause is Cause.PROTOCOL
    await objects.close()
    server.close()
    await server.wait_closed()


async def test_credentials_are_renewed(faults: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary credentials near their expiry are renewed, without a restart."""
    calls = tmp_path / "calls"
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 300))
    answer = {"Version": 1, "AccessKeyId": "AKIATEMPORARY0000000", "SecretAccessKey": "s", "SessionToken": "t"}
    program = tmp_path / "credentials.py"
    text = json.dumps(answer | {"Expiration": expires})
    program.write_text(f"#!{sys.executable}\nopen({str(calls)!r}, 'a').write('x')\nprint({text!r})\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "config").write_text(f"[profile short]\ncredential_process = {program}\nregion = eu-west-3\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    options = {"access_key_id": None, "secret_access_key": None, "region": "", "profile": "short"}
    objects = await opened_client(faults, client="direct", **options)
    before = os.path.getsize(calls)
    for number in range(3):
        await objects.put(f"renewed/{number}", [b"x"], timeout_s=20)
    # Within five minutes of their end, credentials are renewed before every use.
    assert os.path.getsize(calls) >= before + 3


async def test_credentials_that_are_expired_already(
    faults: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any exception of a provider, a request fails for lack of credentials, like any other service failure."""
    answer = {"Version": 1, "AccessKeyId": "AKIATEMPORARY0000000", "SecretAccessKey": "s", "SessionToken": "t"}
    text = json.dumps(answer | {"Expiration": "2020-01-01T00:00:00Z"})
    program = tmp_path / "credentials.py"
    program.write_text(f"#!{sys.executable}\nprint({text!r})\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "config").write_text(f"[profile short]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    options = {"access_key_id": None, "secret_access_key": None, "profile": "short", "client": "direct"}
    error = await refusal(faults, **options)
    assert error.cause is Cause.CREDENTIALS
    assert "RuntimeError" in str(error)


async def test_no_such_profile(faults: FaultServer, client: str) -> None:
    """A missing profile is an error of the configuration."""
    options = {"access_key_id": None, "secret_access_key": None, "profile": "nobody"}
    with pytest.raises(ConfigError, match="no profile 'nobody'"):
        await opened(faults, client=client, **options)


async def test_without_credentials(faults: FaultServer, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing credentials are reported; anonymous requests need none."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    nobody = {"access_key_id": None, "secret_access_key": None, "client": client}
    assert (await refusal(faults, **nobody)).cause is Cause.CREDENTIALS
    await opened(faults, **nobody, anonymous=True)


async def test_credentials_are_looked_for_again_at_each_start(
    weed_server: S3Server, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that was refused opens once the environment has other credentials; its refusals still count."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", weed_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-canary")
    backend = S3Backend(config_for(weed_server, client=client, access_key_id=None, secret_access_key=None))
    with pytest.raises(S3Error):
        await backend.open(NAMESPACE, RecordGeometry(S3Backend.alignment, 4096))
    refusals = backend.stats().counters["credentials_refused"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", weed_server.secret_key)
    await backend.open(NAMESPACE, RecordGeometry(S3Backend.alignment, 4096))
    assert backend.stats().counters["credentials_refused"] == refusals > 0
    await backend.close()


async def test_a_service_that_does_not_go_on(faults: FaultServer) -> None:
    """A list that restarts instead of continuing is a failure: it would never end."""
    objects = await opened_client(faults, client="direct", tries=1)
    names = [f"again/{number}" for number in range(3)]
    for name in names:
        await objects.put(name, [b"x"], timeout_s=20)
    faults.plan("restarts")
    assert [info.key for info in (await objects.list_page("again/", timeout_s=20)).objects] == names
    with pytest.raises(S3Error) as caught:
        await objects.list_page("again/", timeout_s=20, start_after=names[0])
    assert caught.value.cause is Cause.PROTOCOL


@pytest.mark.parametrize(
    ("status", "code", "cause"),
    [
        (301, "PermanentRedirect", Cause.REGION),
        (400, "AuthorizationHeaderMalformed", Cause.REGION),
        (307, "", Cause.REDIRECT),
        (400, "ExpiredToken", Cause.CREDENTIALS),
        (403, "RequestTimeTooSkewed", Cause.CLOCK),
        (403, "", Cause.FORBIDDEN),
        (404, "NoSuchBucket", Cause.NO_BUCKET),
        (409, "ConditionalRequestConflict", Cause.CONFLICT),
        (429, "", Cause.SLOW_DOWN),
        (500, "InternalError", Cause.SERVER_ERROR),
        (503, "SlowDown", Cause.SLOW_DOWN),
        (200, "InternalError", Cause.XML_ERROR),
        (418, "Teapot", Cause.REJECTED),
    ],
)
def test_causes(status: int, code: str, cause: Cause) -> None:
    """Status and code of an answer determine the cause; only the code of its text is shown."""
    error = error_of_response(status, f"<Error><Code>{code}</Code><Message>canary</Message></Error>")
    assert error.cause is cause
    assert "canary" not in str(error)
    assert code in str(error)


async def test_many_cancelled(faults: FaultServer, rng: random.Random) -> None:
    """After a hundred cancelled calls, open connections stay within the limit, and the next call works."""
    backend = await opened(faults, client="direct", concurrency=8)
    assert isinstance(backend, S3Backend)
    maker = RecordMaker(NAMESPACE, backend.geometry, rng)
    keys = [maker.key() for _ in range(8)]
    assert await backend.put([maker.write(key, b"x" * 4096) for key in keys]) == [Outcome.OK] * 8
    faults.plan(Fault.LATE, every=3, delay_s=0.01)
    for _ in range(100):
        targets = [maker.target(key) for key in keys]
        task = asyncio.ensure_future(backend.get_into([target.read for target in targets]))
        await asyncio.sleep(rng.random() * 0.01)
        task.cancel()
        await asyncio.wait([task])
    faults.plan(None)
    target = maker.target(keys[0])
    assert await backend.get_into([target.read]) == [Outcome.OK]
    # The server notices closed connections a little later.
    await eventually_async(lambda: faults.counts()["open_connections"] <= 8, what="no more connections than may be")
    assert backend.stats().gauges["requests_running"] == 0
    await backend.close()
    await eventually_async(lambda: not faults.counts()["open_connections"], what="all connections closed")


@pytest.mark.parametrize("call", ["get", "list", "delete", "probe"])
async def test_an_answer_without_end_is_not_kept(faults: FaultServer, client: str, call: str) -> None:
    """An endless answer is abandoned after some megabytes."""
    objects = await opened_client(faults, client=client, tries=1)
    faults.plan(Fault.ENDLESS)
    calls = {
        "get": lambda: objects.get_into("k", [memoryview(bytearray(64))], timeout_s=20),
        "list": lambda: objects.list_page("kv/", timeout_s=20),
        "delete": lambda: objects.delete_all(["k"], timeout_s=20),
        "probe": lambda: objects.probe("k", timeout_s=20),
    }
    with pytest.raises(S3Error) as caught:
        await calls[call]()
    assert caught.value.cause is Cause.PROTOCOL
    # Bytes in kernel buffers add to the kept ones.
    assert faults.counts()["endless_bytes"] < 24 << 20


async def test_no_redirect_is_followed(faults: FaultServer, client: str) -> None:
    """For every operation, another host gets no request, and so neither the key of SSE-C nor the session's token."""
    key = base64.b64encode(bytes(32)).decode()
    objects = await opened_client(faults, client=client, tries=1, sse_customer_key=key, session_token="token")
    faults.plan(Fault.REDIRECT)
    for call in (
        objects.get_into("k", [memoryview(bytearray(64))], timeout_s=20),
        objects.head("k", timeout_s=20),
        objects.list_page("kv/", timeout_s=20),
        objects.put("k", [b"x"], timeout_s=20),
        objects.delete_all(["k"], timeout_s=20),
        objects.probe("k", timeout_s=20),
    ):
        with pytest.raises(S3Error) as caught:
            await call
        assert caught.value.cause is Cause.REDIRECT
    assert faults.counts().get("trapped", 0) == 0


def test_a_page_of_a_proxy_deletes_nothing(faults: FaultServer, client: str, rng: random.Random) -> None:
    """A proxy's page with a success status in place of objects is a failure, and the objects stay."""
    config = {"backend": "s3", **options_for(faults, client=client)}
    with TierRig(config, namespace=NAMESPACE, slot_bytes=4096, slots=8, timeout_s=60) as rig:
        keys = [rng.randbytes(32) for _ in range(8)]
        rig.until(lambda: rig.store(keys).success, "blocks to be stored")
        before = faults.counts()["objects"]
        faults.plan(Fault.HTML_PAGE, methods=("GET",))
        outcomes = rig.load(keys).outcomes
        assert all(outcome.is_failure for outcome in outcomes), outcomes
        faults.plan(None)
        assert faults.counts()["objects"] == before
        rig.until(lambda: rig.load(keys).success, "blocks to be loaded")


@pytest.mark.parametrize("fault", [Fault.PRECONDITION, Fault.NOT_MODIFIED])
async def test_refused_conditions(faults: FaultServer, client: str, rng: random.Random, fault: Fault) -> None:
    """412, and 304 of old services, mean EXISTS for a conditional write; for any other the block is not stored."""
    for conditional in ("yes", "no"):
        backend = await opened(faults, client=client, conditional_put=conditional)
        maker = RecordMaker(NAMESPACE, backend.geometry, rng)
        faults.plan(fault, methods=("PUT",))
        (outcome,) = await backend.put([maker.write(maker.key(), b"x")])
        faults.plan(None)
        assert outcome is Outcome.EXISTS if conditional == "yes" else outcome.is_failure


async def test_abandoned_answer_closes_its_connection(faults: FaultServer, client: str) -> None:
    """Neither a text nor an object that arrives too slowly leaves its connection to the garbage collector."""
    opened_one = await opened_client(faults, client=client)
    prefix = opened_one._config.prefix
    name = f"{prefix}a"
    await opened_one.put(name, [b"x" * 100], timeout_s=30)
    faults.plan(Fault.TRICKLE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        for call in (
            lambda: opened_one.list_page(prefix, timeout_s=2),
            lambda: opened_one.get_into(name, [memoryview(bytearray(100))], timeout_s=2),
        ):
            with pytest.raises(S3Error) as failure:
                await call()
            assert failure.value.cause is Cause.TIMEOUT
        del failure
        # Before this, the loop would keep references to such a connection.
        await opened_one.close()
        gc.collect()
    assert [str(each.message) for each in caught] == []


async def test_a_quarantine_waits_for_a_put_of_the_same_block(faults: FaultServer, rng: random.Random) -> None:
    """A concurrent put could find the object before its deletion, and report it as present afterwards."""
    backend = await opened(faults)
    maker = RecordMaker(NAMESPACE, backend.geometry, rng)
    key = maker.key()
    assert await backend.put([maker.write(key, maker.payload(4096))]) == [Outcome.OK]
    async with backend._lock(key):
        quarantine = asyncio.create_task(backend.quarantine([key]))
        for _ in range(3):
            assert await backend.exists([key]) == [True]
        assert not quarantine.done()
    await quarantine
    assert await backend.exists([key]) == [False]


@pytest.mark.parametrize("client", EACH_CLIENT)
async def test_nothing_is_sent_after_close(faults: FaultServer, client: str) -> None:
    """A closed backend sends no probe, and its client no request; its statistics stay."""
    backend = await opened(faults, client=client)
    sender = backend._ready()
    await backend.close()
    before = backend.stats().counters
    assert before["requests_get"] > 0
    with pytest.raises(BackendClosedError):
        await backend.probe()
    assert backend.stats().counters == before
    with pytest.raises(BackendClosedError):
        await sender.head("kv/x")


async def test_a_close_ends_running_requests(faults: FaultServer, client: str) -> None:
    """A request that waits for its answer ends by the close, long before its deadline."""
    sender = await opened_client(faults, client=client)
    faults.plan(Fault.BLACK_HOLE)
    before = faults.counts().get("HEAD", 0)
    request = asyncio.create_task(sender.head(f"{sender._config.prefix}a", timeout_s=30))
    await eventually_async(lambda: faults.counts().get("HEAD", 0) > before, what="the request")
    await sender.close()
    with pytest.raises(S3Error) as caught:
        await request
    assert caught.value.cause is Cause.CLOSED
