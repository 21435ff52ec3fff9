"""Configurations: refused values and their errors, no secret in any text, and untrusted TLS."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.redis import RedisBackend, RedisConfig
from kvstore.config import SecretStr, decode_config, encode_config
from kvstore.errors import BackendError, ConfigError
from kvstore.testing.records import RecordMaker
from kvstore.testing.tier_rig import TierRig
from kvstore.types import Outcome
from tests.redis.clients import NAMESPACE, backend_on, maker, opened, options_for, until_renewed
from tests.redis.servers import LEAST_ACL, PASSWORD, Server, cli, free_ports, make_certificates, plain, running, secured

GEOMETRY = RecordGeometry(256, 4096)


def decoded(**options: Any) -> RedisConfig:
    """Return a configuration as a tier decodes it."""
    return decode_config(RedisConfig, options, where="redis tier")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"url": "http://localhost"}, "redis://"),
        ({"url": "localhost:6379/0"}, "Give 'redis://localhost:6379/0', or 'rediss://localhost:6379/0' for TLS"),
        ({"url": "redis://localhost:99999"}, "URL"),
        ({"url": "redis://localhost?password=canary"}, "db="),
        ({"url": "redis://:canary@h", "password": "canary2"}, "once"),
        ({"url": "redis://user:12#canary@host:6379/0"}, "%23"),
        ({"url": "redis://:12/canary@host"}, "%2F"),
        ({"url": "redis://host:6379/canary"}, "redis://host:6379/0"),
        ({"url": "unix://canary/s.sock"}, "unix:///path"),
        ({"prefix": "kv{tag}:"}, "prefix"),
        ({"prefix": ""}, "prefix"),
        ({"connections": 0}, "connections"),
        ({"ttl": "10ms"}, "ttl"),
        ({"timeout": 0}, "timeout"),
        ({"sentinels": ["h:1"]}, "sentinel_master"),
        ({"sentinels": ["nonsense"], "sentinel_master": "m"}, "host:port"),
        ({"sentinels": ["kv:canary@h:1"], "sentinel_master": "m"}, "host:port"),
        ({"sentinels": ["h:70000"], "sentinel_master": "m"}, "host:port"),
        ({"sentinels": ["h:1"], "sentinel_master": "m", "mode": "cluster"}, "cluster"),
        ({"url": "redis://h", "tls_ca": "a", "tls_cert": "c"}, "'tls_ca' and 'tls_cert' would be ignored"),
        ({"url": "unix:///s", "tls_key": "k"}, "Give a 'url' with 'rediss://'"),
        ({"url": "rediss://h", "tls_key": "k"}, "'tls_key' would be ignored without 'tls_cert'"),
        ({"pasword": "canary"}, "password"),
        ({"mode": "clusterr"}, "mode"),
    ],
)
def test_refused(options: dict[str, Any], named: str) -> None:
    """A bad value is refused with the option's name, and without any secret."""
    with pytest.raises(ConfigError) as caught:
        decoded(**options)
    assert named in str(caught.value)
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://kv:p%40ss@host:1/3", "rediss://kv:p%40ss@host", "unix://kv:p%40ss@/tmp/s?db=2"]
)
def test_credentials_leave_the_url(url: str) -> None:
    """Name and password of a URL become fields, and no text shows the password."""
    config = decoded(url=url)
    assert config.username == "kv" and config.password is not None and config.password.reveal() == "p@ss"
    shown = f"{config!r} {encode_config(config)} {config.url}"
    assert "p@ss" not in shown and "p%40ss" not in shown


@pytest.mark.parametrize("url", ["REDISS://host:6379/1", " Rediss://host:6379/1", "rediss://host:6379/1?"])
def test_any_spelling_of_rediss_is_tls(url: str) -> None:
    """A scheme in capitals, or after a space, never turns TLS off."""
    config = decoded(url=url)
    assert config.tls and config.url == "rediss://host:6379/1"


async def test_another_machine_needs_tls() -> None:
    """A connection to another machine without TLS is refused, before any byte is sent, unless explicitly allowed."""
    for url in ("redis://192.0.2.1:6379", "redis://cache.example:6379"):
        with pytest.raises(ConfigError, match="insecure"):
            await RedisBackend(RedisConfig(url=url)).open(NAMESPACE, GEOMETRY)
    allowed = RedisBackend(RedisConfig(url="redis://192.0.2.1:6379", insecure=True, connect_timeout=0.1))
    with pytest.raises(BackendError, match=r"192\.0\.2\.1"):
        await allowed.open(NAMESPACE, GEOMETRY)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "auto"},
        {"mode": "standalone"},
        {"mode": "cluster"},
        {"sentinels": ("127.1:{port}",), "sentinel_master": "m", "url": "redis://127.0.0.1"},
        {"sentinels": ("127.0.0.1:1", "127.1:{port}"), "sentinel_master": "m", "url": "redis://127.0.0.1"},
    ],
)
async def test_no_password_goes_readable_to_another_machine(options: dict[str, Any]) -> None:
    """For a server, a cluster and a Sentinel alike, no byte is sent before TLS is checked."""
    received = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(1))
        writer.transport.abort()

    # 127.1 is this machine, but is not recognised as such: like any name, it may be another machine.
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    options = {"url": f"redis://127.1:{port}", **options}
    if "sentinels" in options:
        options["sentinels"] = tuple(address.format(port=port) for address in options["sentinels"])
    passwords = {"password": SecretStr("canary"), "sentinel_password": SecretStr("canary")}
    backend = RedisBackend(RedisConfig(**options, **passwords, connect_timeout=5))
    with pytest.raises(ConfigError, match="insecure"):
        await backend.open(NAMESPACE, GEOMETRY)
    await backend.close()
    server.close()
    await server.wait_closed()
    assert not received


async def test_absent_server_is_one_error_at_once() -> None:
    """An absent server gives one clear error at once."""
    (port,) = free_ports(1)
    # Long before the connect timeout.
    async with asyncio.timeout(30):
        with pytest.raises(BackendError, match="Is the server up"):
            await RedisBackend(RedisConfig(url=f"redis://127.0.0.1:{port}", connect_timeout=60)).open(
                NAMESPACE, GEOMETRY
            )
        with pytest.raises(BackendError, match=r"s\.sock"):
            await RedisBackend(RedisConfig(url="unix:///nowhere/s.sock", connect_timeout=60)).open(NAMESPACE, GEOMETRY)


async def test_silent_server_costs_the_connect_timeout() -> None:
    """A silent listener costs the connect timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = RedisConfig(url=f"redis://127.0.0.1:{silent.getsockname()[1]}", connect_timeout=0.2)
        async with asyncio.timeout(30):
            with pytest.raises(BackendError, match=r"within 0\.2 s"):
                await RedisBackend(config).open(NAMESPACE, GEOMETRY)


async def test_credentials(tls_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong or missing password is refused with advice; no text shows the password, even at DEBUG."""
    caplog.set_level(logging.DEBUG)
    for options in ({"password": "wrong-canary"}, {"username": "nobody", "password": "wrong-canary"}):
        with pytest.raises(BackendError, match="WRONGPASS"):
            await opened(tls_server, **options)
    without = RedisBackend(RedisConfig(url=tls_server.url, tls_ca=tls_server.tls_ca))
    with pytest.raises(BackendError, match="NOAUTH"):
        await without.open(NAMESPACE, GEOMETRY)
    backend = await opened(tls_server)
    await backend.exists([b"k"])
    shown = caplog.text + repr(backend.config) + repr(backend.__dict__) + str(backend.stats())
    assert "canary" not in shown and PASSWORD not in shown


async def test_forbidden_prefix(tls_server: Server) -> None:
    """Keys outside the ACL's prefix are refused with that reason."""
    backend = backend_on(tls_server, prefix="other:")
    await backend.open(NAMESPACE, GEOMETRY)
    with pytest.raises(BackendError, match="NOPERM"):
        await backend.exists([b"k"])
    await backend.close()


async def test_untrusted_certificates(tls_server: Server, tmp_path: Path) -> None:
    """A server of an unknown authority, of another name, or without TLS, is refused without hanging."""
    make_certificates(tmp_path)
    async with asyncio.timeout(60):
        with pytest.raises(BackendError, match="not trusted"):
            await opened(tls_server, tls_ca=str(tmp_path / "ca.crt"))
        with pytest.raises(BackendError, match="not trusted"):
            await opened(tls_server, url=tls_server.url.replace("127.0.0.1", "127.0.0.2"))
        with pytest.raises(ConfigError, match="TLS file"):
            await opened(tls_server, tls_ca=str(tmp_path / "none.crt"))
        with pytest.raises(BackendError):
            await opened(tls_server, url=tls_server.url.replace("rediss", "redis"), tls_ca=None, connect_timeout=1)


async def test_tls_to_a_plain_server(redis_server: Server, tls_server: Server) -> None:
    """The error distinguishes a server without TLS from one that is down."""
    with pytest.raises(BackendError, match=r"TLS|no connection"):
        await opened(tls_server, url=redis_server.url.replace("redis://", "rediss://"), connect_timeout=2)


async def test_database(redis_server: Server) -> None:
    """Blocks go into the database of the URL."""
    backend = await opened(redis_server, url=f"{redis_server.url}/3")
    before = cli(redis_server, "-n", "3", "DBSIZE")
    await backend.put([maker().write(b"k" * 32, b"x")])
    assert int(cli(redis_server, "-n", "3", "DBSIZE")) == int(before) + 1


async def test_only_modest_commands(tmp_path: Path) -> None:
    """The server never receives KEYS, SCAN, FLUSHALL, CONFIG or any similar command."""
    with running(plain("redis", tmp_path)) as (server,):
        backend = await opened(server, 8192, ttl=600)
        records = RecordMaker(NAMESPACE, RecordGeometry(256, 8192), random.Random(1))
        keys = [records.key() for _ in range(5)]
        await backend.put([records.write(key, b"payload") for key in keys])
        await backend.get_into([records.target(key).read for key in keys])
        backend.touch(keys)
        await backend.exists(keys)
        await backend.probe()
        await backend.quarantine(keys[:1])
        await backend.delete(keys)
        assert [info async for info in backend.scan()] == []
        await backend.close()
        lines = cli(server, "INFO", "commandstats").split()
        used = {line.split("_", 1)[1].split(":")[0] for line in lines if "cmdstat" in line}
        assert used - {"ping", "info"} <= {"hello", "get", "set", "exists", "unlink", "expire"}


async def test_ttl_is_renewed_by_use(redis_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's time to live is renewed by use once a quarter of it has passed, not on every use."""
    now = 1000.0
    monkeypatch.setattr("kvstore.backends.redis.backend.time", SimpleNamespace(monotonic=lambda: now))
    backend = await opened(redis_server, 65536, ttl=600)
    key = b"t" * 32
    await backend.put([maker().write(key, b"x")])
    name = f"{backend.config.prefix}{NAMESPACE.hex[:32]}:{key.hex()}"
    assert 500_000 < int(cli(redis_server, "PTTL", name)) <= 600_000
    # As if that much time had passed on the server.
    cli(redis_server, "PEXPIRE", name, "400000")
    for later, renewals in ((149, 0), (2, 1), (149, 1), (2, 2)):
        now += later
        for _ in range(20):
            backend.touch([key])
        await until_renewed(backend)
        assert backend.stats().counters["ttl_renewals"] == renewals
    assert 500_000 < int(cli(redis_server, "PTTL", name)) <= 600_000


async def test_reading_alone_renews_nothing(redis_server: Server) -> None:
    """A read renews a record's time to live only after verification, and the number of waiting renewals is bounded."""
    backend = await opened(redis_server, 4096, ttl=600)
    reader = await opened(redis_server, 4096, ttl=600, prefix=backend.config.prefix)
    key = b"r" * 32
    await backend.put([maker().write(key, b"x")])
    assert list(await reader.get_into([maker().target(key).read])) == [Outcome.OK]
    assert reader._renewing is None and reader.stats().counters["ttl_renewals"] == 0
    reader.note_read([key], [])
    await until_renewed(reader)
    assert reader.stats().counters["ttl_renewals"] == 1
    reader.touch([number.to_bytes(32, "big") for number in range(9000)])
    await until_renewed(reader)
    assert reader.stats().counters["ttl_renewals"] == 1 + 8192


def test_only_a_block_that_was_verified_is_renewed(redis_server: Server) -> None:
    """A load through a tier renews the time to live of a good block, and not that of one that is damaged."""
    config = {"backend": "redis", **options_for(redis_server, ttl=600)}
    good, bad = b"g" * 32, b"b" * 32
    with TierRig(config, namespace=NAMESPACE, slot_bytes=4096, slots=2) as rig:
        assert rig.store([good, bad]).success
    start = f"{config['prefix']}{NAMESPACE.hex[:32]}"
    cli(redis_server, "SETRANGE", f"{start}:{bad.hex()}", "300", "damage")
    for key in (good, bad):
        cli(redis_server, "PEXPIRE", f"{start}:{key.hex()}", "400000")
    # The age of a block stored earlier is unknown here: its use renews it at once.
    with TierRig(config, namespace=NAMESPACE, slot_bytes=4096, slots=2) as rig:
        result = rig.load([good, bad])
        assert [outcome.ok for outcome in result.outcomes] == [True, False]
        rig.until(lambda: int(cli(redis_server, "PTTL", f"{start}:{good.hex()}")) > 500_000, "a renewal")
        rig.until(lambda: rig.tier.stats().backend_counters, "statistics")
    assert int(cli(redis_server, "PTTL", f"{start}:{bad.hex()}")) <= 400_000


async def test_acl_of_the_docs(tmp_path: Path, valkey_server: Server) -> None:
    """The ACL lines of docs/redis.md suffice on Redis and on Valkey, where no other command is tried."""
    text = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("user kv on ")]
    rights = [line.split(" ", 4)[4] for line in lines]
    assert len(rights) == 2 and rights[1] == LEAST_ACL
    for number, acl in enumerate(rights):
        user = f"reader-of-the-docs-{number}"
        cli(valkey_server, "ACL", "SETUSER", user, "on", f">{PASSWORD}", *acl.split())
        cli(valkey_server, "ACL", "LOG", "RESET")
        with running(secured(tmp_path / str(number), acl)) as (server,):
            for backend in (
                await opened(server, 65536),
                await opened(valkey_server, 65536, username=user, password=PASSWORD),
            ):
                assert list(await backend.put([maker().write(b"k" * 32, b"x")])) == [Outcome.OK]
                assert list(await backend.exists([b"k" * 32, b"l" * 32])) == [True, False]
                assert list(await backend.get_into([maker().target(b"k" * 32).read])) == [Outcome.OK]
                # The age of another engine's block is unknown: its use renews it at once.
                backend.touch([b"l" * 32])
                await until_renewed(backend)
                assert list(await backend.delete([b"k" * 32])) == [True]
                await backend.close()
        # Only reading the server's settings may be forbidden, and is tried.
        denied = cli(valkey_server, "ACL", "LOG")
        assert denied.count("username") == denied.count("\ninfo\n") <= 1 - number, denied
        cli(valkey_server, "ACL", "DELUSER", user)
