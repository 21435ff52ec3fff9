"""Maintenance commands on every kind of Redis server, beside foreign values."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from redis import Redis

from kvstore.backends.base import RecordGeometry
from kvstore.backends.redis import RedisBackend, RedisConfig
from kvstore.backends.redis.failures import RedisError
from kvstore.backends.redis.holdings import Values
from kvstore.backends.redis.parts import PART_BYTES
from kvstore.cli.holdings.care import scrub
from kvstore.cli.holdings.medium import Medium
from kvstore.cli.tier_argument import parse_tier
from kvstore.codec.record import RecordCodec
from kvstore.namespace import Namespace
from kvstore.testing.codec_tests import memory_rise
from kvstore.testing.records import RecordMaker
from kvstore.testing.waiting import eventually
from kvstore.types import Outcome
from tests.cli.cli import report_of
from tests.cli.in_process import run_here
from tests.redis.clients import options_for
from tests.redis.fixtures import cluster_fixture, server_fixture
from tests.redis.servers import Server, cli, cluster_nodes, join_cluster, plain, running, secured, sentinels

_T = TypeVar("_T")

_SHORT = Namespace({"model": "llama"})
_LONG = Namespace({"model": "qwen"})
_BLOCKS = {_SHORT: 20, _LONG: 3}
_SIZES = {_SHORT: 4096, _LONG: 2 * PART_BYTES + 12345}
"""A block of one namespace is a single value; a block of the other has three parts."""

ADMIN_ACL = "~kv:* resetchannels -@all +hello +scan +pttl +object|idletime +strlen +getrange +get +exists +unlink"
"""The rights that docs/admin.md lists for operators; a test compares the two."""


server = server_fixture("redis", "module")
valkey = server_fixture("valkey", "module")
cluster = cluster_fixture("module")


class Tier:
    """A tier on a server, under its own prefix, with the blocks stored there."""

    def __init__(self, server: Server, rng: random.Random, **more: Any) -> None:
        self.server = server
        self.options = options_for(server, **more)
        self.prefix: str = self.options["prefix"]
        self.text = json.dumps({"type": "redis", **self.options})
        self.stored: dict[Namespace, dict[bytes, bytes]] = {_SHORT: {}, _LONG: {}}
        # By default blocks look written and last used some time ago.
        self.written_ago_s = 2 * 3600
        self._rng = rng

    def fill(self, *namespaces: Namespace) -> None:
        """Store blocks of some namespaces, by default of both."""
        for namespace in namespaces or (_SHORT, _LONG):
            maker = self.maker(namespace)
            self.stored[namespace] |= {maker.key(): maker.payload() for _ in range(_BLOCKS[namespace])}
            writes = [maker.write(key, payload) for key, payload in self.stored[namespace].items()]
            outcomes = _with_backend(self.options, namespace, lambda backend, writes=writes: backend.put(writes))
            assert set(outcomes) == {Outcome.OK}

    def loaded(self, namespace: Namespace) -> set[bytes]:
        """Return the keys that an engine finds, after comparing their bytes."""
        maker = self.maker(namespace)
        targets = [maker.target(key) for key in self.stored[namespace]]
        reads = [target.read for target in targets]
        outcomes = _with_backend(self.options, namespace, lambda backend: backend.get_into(reads))
        found = [target for target, outcome in zip(targets, outcomes, strict=True) if outcome is Outcome.OK]
        assert all(maker.content(target) == self.stored[namespace][target.key] for target in found)
        return {target.key for target in found}

    def keys(self, namespace: Namespace) -> list[bytes]:
        """Return the keys that were stored, in order."""
        return sorted(self.stored[namespace])

    def name(self, namespace: Namespace, key: bytes, part: int | None = None) -> str:
        """Return the name of a value on the server."""
        return f"{self.prefix}{namespace.hex[:32]}:{key.hex()}" + ("" if part is None else f":{part}")

    def run(self, command: str, *arguments: str, text: str = "") -> Any:
        """Run a command on the tier with ``--json``."""
        return run_here(command, "--tier", text or self.text, *arguments, "--json")

    def cli(self, *command: str) -> str:
        """Run a command on the server as its administrator."""
        admin = replace(self.server, username="admin", process=None) if self.server.tls_ca else self.server
        return cli(admin, *command).strip()

    def flip(self, name: str, at: int) -> None:
        """Flip one bit of a value."""
        byte = self.cli("GETBIT", name, str(at * 8 + 7))
        assert byte in "01"
        self.cli("SETBIT", name, str(at * 8 + 7), "10"[int(byte)])

    def make_old(self, *names: str, by_s: int = 3600) -> None:
        """Make values look unused for some time."""
        for name in names:
            self.make_idle(name, by_s, ttl_s=86400 - by_s)

    def make_idle(self, name: str, idle_s: int, *, ttl_s: int = 0) -> None:
        """Set a value's idle time, and its time to live, on a server that tracks idle times."""
        script = (
            "return redis.call('RESTORE', KEYS[1], ARGV[1], redis.call('DUMP', KEYS[1]), "
            "'REPLACE', 'IDLETIME', ARGV[2])"
        )
        assert self.cli("EVAL", script, "1", name, str(ttl_s * 1000), str(idle_s)) == "OK"

    def maker(self, namespace: Namespace) -> RecordMaker:
        """Return a maker of records as old as the tier's."""
        maker = RecordMaker(namespace, RecordGeometry(RedisBackend.alignment, _SIZES[namespace]), self._rng)
        maker._codec = RecordCodec(
            namespace,
            header_bytes=RedisBackend.alignment,
            clock_ns=lambda: time.time_ns() - self.written_ago_s * 10**9,
        )
        return maker


def _with_backend(
    options: dict[str, Any], namespace: Namespace, work: Callable[[RedisBackend], Coroutine[Any, Any, _T]]
) -> _T:
    async def run() -> _T:
        backend = RedisBackend(RedisConfig(**options))
        try:
            await backend.open(namespace, RecordGeometry(backend.alignment, _SIZES[namespace]))
            return await work(backend)
        finally:
            await backend.close()

    return asyncio.run(run())


@pytest.fixture
def tier(server: Server, rng: random.Random) -> Tier:
    """A tier with blocks of both kinds on a single server."""
    # Blocks left by earlier tests would eventually make the server evict this tier's blocks.
    cli(server, "FLUSHALL")
    found = Tier(server, rng)
    found.fill()
    return found


def _whole_story(tier: Tier) -> None:
    """Check on any kind of server: inspect, verify, remove."""
    tier.fill()
    rows = {row["namespace"]: row for row in report_of(tier.run("inspect"))["rows"]}
    assert {name: row["blocks"] for name, row in rows.items()} == {each.hex: n for each, n in _BLOCKS.items()}
    for namespace, count in _BLOCKS.items():
        row = rows[namespace.hex]
        assert row["size_bytes"] == count * (_SIZES[namespace] + 256)
        assert 0 <= row["newest_s"] <= row["oldest_s"] < 600
    done = tier.run("scrub")
    assert (done.returncode, report_of(done)["blocks"], report_of(done)["rows"]) == (0, sum(_BLOCKS.values()), [])
    dry = report_of(tier.run("gc", "--unused-for", "0.001s", "--dry-run"))
    assert {row["name"] for row in dry["rows"]} == {namespace.hex for namespace in _BLOCKS}
    assert tier.loaded(_LONG) == set(tier.stored[_LONG])
    gone = report_of(tier.run("gc", "--unused-for", "0.001s", "--keep", _LONG.hex))["removed"]
    assert gone == {"stale": 0, "namespaces": 1, "blocks": _BLOCKS[_SHORT]}
    assert (tier.loaded(_SHORT), tier.loaded(_LONG)) == (set(), set(tier.stored[_LONG]))


def test_a_single_server(server: Server, rng: random.Random, tmp_path: Path) -> None:
    """All commands work beside foreign values with similar names, which stay unchanged."""
    tier = Tier(server, rng)
    lookalike = f"{tier.prefix}{'ab' * 16}:{'cd' * 16}"
    strings = [f"x{tier.prefix}a", f"{tier.prefix}notes", lookalike, f"{lookalike}:1", f"{lookalike[:-1]}:0"]
    strings += [
        f"{tier.prefix}{'AB' * 16}:00",
        f"{tier.prefix}{_SHORT.hex[:32]}:xyz",
        f"{tier.prefix}\udcff"[:-1] + "é",
    ]
    for name in strings:
        tier.cli("SET", name, "theirs")
    tier.cli("RPUSH", tier.name(_SHORT, b"a list"), "theirs")
    tier.cli("HSET", tier.name(_LONG, b"a hash", 0), "field", "theirs")
    _whole_story(tier)
    assert [tier.cli("GET", name) for name in strings] == ["theirs"] * len(strings)
    assert tier.cli("LLEN", tier.name(_SHORT, b"a list")) == "1"
    assert tier.cli("HLEN", tier.name(_LONG, b"a hash", 0)) == "1"


@pytest.mark.matrix
def test_the_fields_of_a_namespace_are_stored_with_its_first_block(tier: Tier) -> None:
    """They expire by themselves and go with their namespace; blocks stay valid without them."""
    fields = {row["namespace"]: row["model"] for row in report_of(tier.run("inspect"))["rows"]}
    assert fields == {_SHORT.hex: "llama", _LONG.hex: "qwen"}
    names = {namespace: f"{tier.prefix}{namespace.hex[:32]}:namespace" for namespace in (_SHORT, _LONG)}
    assert int(tier.cli("TTL", names[_SHORT])) > 30 * 86400
    tier.cli("SET", names[_SHORT], "{")
    fields = {row["namespace"]: row["model"] for row in report_of(tier.run("inspect"))["rows"]}
    assert fields == {_SHORT.hex: None, _LONG.hex: "qwen"}
    assert len(tier.loaded(_SHORT)) == _BLOCKS[_SHORT]
    with Medium(parse_tier(tier.text)) as medium:
        for namespace in medium.namespaces():
            medium.remove(namespace, None)
    assert tier.cli("KEYS", f"{tier.prefix}*") == ""


def test_valkey(valkey: Server, rng: random.Random, tmp_path: Path) -> None:
    """All commands work on Valkey."""
    _whole_story(Tier(valkey, rng))


@pytest.mark.matrix
def test_a_unix_socket_and_another_database(server: Server, rng: random.Random, tmp_path: Path) -> None:
    """All commands through a Unix socket, in a database other than the first."""
    _whole_story(Tier(server, rng, url=f"unix://{server.unix_path}?db=3"))


@pytest.mark.matrix
def test_a_cluster(cluster: Sequence[Server], rng: random.Random, tmp_path: Path) -> None:
    """All commands on a cluster: every master is queried, and the parts of a block lie on several masters."""
    tier = Tier(cluster[0], rng)
    _whole_story(tier)
    assert all(int(cli(server, "DBSIZE").split()[-1]) for server in cluster)


@pytest.mark.matrix
def test_sentinels(tmp_path: Path, rng: random.Random) -> None:
    """All commands on the master that Sentinels name."""
    master = plain("redis", tmp_path / "master")
    with running(master), running(*(watchers := sentinels(master, tmp_path, count=1))):
        addresses = [f"127.0.0.1:{watcher.port}" for watcher in watchers]
        more = {"sentinels": addresses, "sentinel_master": "kv-master", "url": "redis://127.0.0.1:1"}
        _whole_story(Tier(master, rng, **more))


@pytest.mark.matrix
def test_tls_and_the_rights_of_the_docs(tmp_path: Path, rng: random.Random) -> None:
    """With the rights listed in docs/admin.md and those of an engine, all commands work and none is denied."""
    page = (Path(__file__).parents[2] / "docs" / "admin.md").read_text()
    assert ADMIN_ACL in page
    with running(secured(tmp_path / "tls", f"{ADMIN_ACL} +set +info")) as (server,):
        tier = Tier(server, rng)
        _whole_story(tier)
        assert tier.cli("ACL", "WHOAMI") == "admin"
        assert _denied(tier) == set()


@pytest.mark.matrix
def test_the_rights_of_the_docs_suffice_to_look_after_a_tier(tmp_path: Path, rng: random.Random) -> None:
    """The listed rights suffice for maintenance without an engine's rights; the engine stores with its own."""
    with running(secured(tmp_path / "tls", ADMIN_ACL)) as (server,):
        engine = Tier(replace(server, username="admin"), rng)
        engine.fill()
        tier = Tier(server, rng, prefix=engine.prefix)
        key = engine.keys(_SHORT)[0]
        engine.flip(tier.name(_SHORT, key), 300)
        engine.cli("UNLINK", tier.name(_LONG, engine.keys(_LONG)[0], 0))
        engine.make_old(*(tier.name(_LONG, engine.keys(_LONG)[0], part) for part in (1, 2)))
        assert len(report_of(tier.run("inspect"))["rows"]) == len(_BLOCKS)
        assert tier.run("scrub").returncode == 3
        gone = report_of(tier.run("gc", "--unused-for", "0.001s"))["removed"]
        assert gone == {"stale": 2, "namespaces": 2, "blocks": sum(_BLOCKS.values()) - 2}
        assert _denied(tier) == set()


def _denied(tier: Tier) -> set[str]:
    """Return the commands that the server denied, except the optional ``CLIENT NO-TOUCH``."""
    lines = tier.cli("ACL", "LOG").splitlines()
    assert not lines or "object" in lines, lines
    return {value for name, value in itertools.pairwise(lines) if name == "object"} - {"client|no-touch"}


@pytest.mark.matrix
@pytest.mark.parametrize("lacking", ["+scan", "+pttl", "+strlen", "+getrange"])
def test_the_right_that_lacks_is_named(tmp_path: Path, rng: random.Random, lacking: str) -> None:
    """If a right is missing, the error names the refused command, and nothing is changed."""
    acl = ADMIN_ACL.replace(f" {lacking}", "")
    with running(secured(tmp_path / "tls", f"{acl} +set +info")) as (server,):
        tier = Tier(server, rng)
        tier.fill(_SHORT)
        for command in ("inspect", "scrub", "gc"):
            done = tier.run(command)
            assert (done.returncode, done.stdout) == (1, "")
            assert lacking[1:].upper() in done.stderr and "docs/admin.md" in done.stderr
            assert "s3cret" not in done.stderr
        assert tier.loaded(_SHORT) == set(tier.stored[_SHORT])


@pytest.mark.parametrize(("at", "fault"), [(300, "payload"), (40, "header"), (3, "header")])
def test_a_damaged_block_is_named_and_removed(tier: Tier, at: int, fault: str) -> None:
    """A dry run only reports; a real run deletes the block. Both exit with status 3, and the other blocks stay."""
    key = tier.keys(_SHORT)[4]
    tier.flip(tier.name(_SHORT, key), at)
    for dry in (True, False):
        done = tier.run("scrub", *(["--dry-run"] if dry else []))
        report = report_of(done)
        (row,) = report["rows"]
        assert (done.returncode, row["key"], row["namespace"], row["fault"]) == (3, key.hex(), _SHORT.hex, fault)
        assert (report["blocks"], report["set_aside"]) == (sum(_BLOCKS.values()), 0 if dry else 1)
        assert tier.cli("EXISTS", tier.name(_SHORT, key)) == ("1" if dry else "0")
    assert tier.run("scrub").returncode == 0
    assert tier.loaded(_SHORT) == set(tier.stored[_SHORT]) - {key}


@pytest.mark.parametrize(("part", "at", "fault"), [(2, 1000, "payload"), (0, 60, "header"), (0, 2, "header")])
def test_damage_in_a_part_is_damage_of_its_block(tier: Tier, part: int, at: int, fault: str) -> None:
    """Damage to a part's data, its header or the record's header damages the block, which gc removes at the latest."""
    key = tier.keys(_LONG)[1]
    tier.flip(tier.name(_LONG, key, part), at)
    done = tier.run("scrub", "--namespace", _LONG.hex)
    assert [(row["key"], row["fault"]) for row in report_of(done)["rows"]] == [(key.hex(), fault)]
    left = [name for n in range(3) if tier.cli("EXISTS", name := tier.name(_LONG, key, n)) == "1"]
    tier.make_old(*left)
    # If a part's header is unreadable, the number of the other parts is unknown.
    assert report_of(tier.run("gc"))["removed"]["stale"] == len(left) == (2 if at == 2 else 0)
    assert tier.cli("EXISTS", *(tier.name(_LONG, key, n) for n in range(3))) == "0"
    assert tier.loaded(_LONG) == set(tier.stored[_LONG]) - {key}


def test_parts_of_a_later_release_stay(tier: Tier) -> None:
    """A block whose parts have a newer format is neither verified nor removed."""
    name = tier.name(_LONG, tier.keys(_LONG)[0], 0)
    tier.cli("SETRANGE", name, "3", "2")
    done = tier.run("scrub")
    assert done.returncode == 0 and not report_of(done)["rows"]
    assert tier.cli("EXISTS", name) == "1"


def test_a_value_of_absurd_length_is_not_read(tier: Tier) -> None:
    """A value longer than any of ours counts as damage, and is not read into memory."""
    name = tier.name(_SHORT, tier.keys(_SHORT)[0])
    tier.cli("SETRANGE", name, str(5 << 20), "x")
    done = tier.run("scrub")
    assert [row["key"] for row in report_of(done)["rows"]] == [tier.keys(_SHORT)[0].hex()]
    assert tier.cli("EXISTS", name) == "0"


def test_a_part_that_claims_a_long_record_takes_no_memory(tier: Tier) -> None:
    """Memory is allocated as bytes arrive: a value of a few bytes may claim any record length."""
    name = tier.name(_LONG, tier.keys(_LONG)[0])
    size_bytes = 1500 << 20
    header = struct.pack("<4sHHQ16s", b"kvp1", 0, -(-size_bytes // (4 << 20)), size_bytes, b"t" * 16)
    for number in range(3):
        tier.cli("DEL", f"{name}:{number}")
    with closing(Redis.from_url(tier.server.url)) as connection:
        connection.set(f"{name}:0", header + bytes(256))
    with memory_rise() as rise:
        done = tier.run("scrub", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert rise.bytes <= 32 << 20


def test_a_block_that_is_stored_when_only_damaged_ones_were_known_stays(tier: Tier) -> None:
    """Without a readable header half of the namespace's digest is unknown; a block stored later is not damage."""
    damaged, *others = tier.keys(_SHORT)
    tier.flip(tier.name(_SHORT, damaged), 40)
    tier.cli("UNLINK", *(tier.name(_SHORT, key) for key in others))
    with Medium(parse_tier(tier.text)) as holdings:
        (namespace,) = (each for each in holdings.namespaces() if each.hex.startswith(_SHORT.hex[:32]))
        assert namespace.hex != _SHORT.hex
        maker = tier.maker(_SHORT)
        writes = [maker.write(key, tier.stored[_SHORT][key]) for key in others]
        assert set(_with_backend(tier.options, _SHORT, lambda backend: backend.put(writes))) == {Outcome.OK}
        result = scrub(holdings, [namespace], dry=False)
        assert ([row["key"] for row in result.faults], result.set_aside) == ([damaged.hex()], 1)
        assert result.gone == len(others)
    assert tier.loaded(_SHORT) == set(others)
    done = tier.run("scrub")
    assert (done.returncode, report_of(done)["blocks"]) == (0, sum(_BLOCKS.values()) - 1)


def test_a_block_that_was_mended_since_stays(tier: Tier) -> None:
    """An engine may have stored a good block there between the verdict and the removal."""
    key = tier.keys(_SHORT)[0]
    tier.flip(tier.name(_SHORT, key), 900)
    with Medium(parse_tier(tier.text)) as holdings:
        (namespace,) = (each for each in holdings.namespaces() if each.hex == _SHORT.hex)
        (block,) = (each for each in holdings.blocks(namespace) if each.key == key)
        tier.flip(tier.name(_SHORT, key), 900)
        assert holdings.set_aside(namespace, [block]) == 0
    assert tier.loaded(_SHORT) == set(tier.stored[_SHORT])


def test_an_incomplete_block_is_missing_for_scrub_and_stale_for_gc(tier: Tier) -> None:
    """Servers evict single parts, so this is not damage; gc removes old remaining parts. Complete blocks stay."""
    torn, headless, whole = tier.keys(_LONG)
    tier.cli("UNLINK", tier.name(_LONG, torn, 1), tier.name(_LONG, headless, 0))
    done = tier.run("scrub", "--namespace", _LONG.hex)
    assert (done.returncode, report_of(done)["blocks"], report_of(done)["gone"]) == (0, 1, 1)
    # Young parts may belong to a block that is still being written.
    assert report_of(tier.run("gc"))["removed"]["stale"] == 0
    left = [tier.name(_LONG, torn, 0), tier.name(_LONG, torn, 2)]
    left += [tier.name(_LONG, headless, 1), tier.name(_LONG, headless, 2)]
    tier.make_old(*left, *(tier.name(_LONG, whole, part) for part in range(3)))
    dry = report_of(tier.run("gc", "--dry-run"))
    assert {row["name"] for row in dry["rows"]} == set(left)
    assert {row["what"] for row in dry["rows"]} == {"stale"} and dry["removed"]["stale"] == 0
    assert tier.cli("EXISTS", *left) == "4"
    # Before Redis 7.2, reading a part counts as its use.
    tier.make_old(*left)
    assert report_of(tier.run("gc"))["removed"] == {"stale": 4, "namespaces": 0, "blocks": 0}
    assert tier.cli("EXISTS", *left) == "0"
    assert tier.loaded(_LONG) == {whole}


def test_a_part_of_another_write_is_stale(tier: Tier) -> None:
    """Parts from two writers of one block do not form a block."""
    key = tier.keys(_LONG)[0]
    strange = tier.name(_LONG, tier.keys(_LONG)[1], 1)
    tier.cli("COPY", strange, tier.name(_LONG, key, 1), "REPLACE")
    tier.make_old(*(tier.name(_LONG, key, part) for part in range(3)))
    dry = report_of(tier.run("gc", "--dry-run"))
    assert [row["name"] for row in dry["rows"]] == [tier.name(_LONG, key, 1)]
    tier.make_old(*(tier.name(_LONG, key, part) for part in range(3)))
    assert report_of(tier.run("gc"))["removed"]["stale"] == 1
    # Its first part now belongs to no block, so the next run removes the remaining parts.
    assert report_of(tier.run("gc"))["removed"]["stale"] == 2
    assert tier.loaded(_LONG) == set(tier.keys(_LONG)[1:])


def test_parts_of_two_equal_writes_form_a_block(tier: Tier) -> None:
    """Two engines stored the same block at the same time: neither a load nor gc removes it."""
    key = tier.keys(_LONG)[0]
    names = [tier.name(_LONG, key, part) for part in range(3)]
    tier.cli("RENAME", names[1], "kept")
    tier.cli("UNLINK", names[0], names[2])
    write = tier.maker(_LONG).write(key, tier.stored[_LONG][key])
    assert _with_backend(tier.options, _LONG, lambda backend: backend.put([write])) == [Outcome.OK]
    tier.cli("RENAME", "kept", names[1])
    tier.make_old(*names)
    assert report_of(tier.run("gc"))["removed"]["stale"] == 0
    assert tier.loaded(_LONG) == set(tier.stored[_LONG])


def test_a_stale_file_that_was_written_again_stays(tier: Tier) -> None:
    """An engine may have stored the block again between the discovery of a part and its removal."""
    key = tier.keys(_LONG)[0]
    tier.cli("UNLINK", tier.name(_LONG, key, 0))
    tier.make_old(tier.name(_LONG, key, 1), tier.name(_LONG, key, 2))
    with Medium(parse_tier(tier.text)) as holdings:
        stale = holdings.stale_items()
        assert len(stale) == 2
        maker = tier.maker(_LONG)
        write = maker.write(key, tier.stored[_LONG][key])
        assert _with_backend(tier.options, _LONG, lambda backend: backend.put([write])) == [Outcome.OK]
        assert holdings.sweep(stale) == 0
    assert tier.loaded(_LONG) == set(tier.stored[_LONG])


def test_gc_expires_blocks_by_their_time_to_live(tier: Tier) -> None:
    """Use renews the time to live, so the remaining time shows how long a block has been unused."""
    old = tier.keys(_SHORT)[:7]
    tier.make_old(*(tier.name(_SHORT, key) for key in old))
    rows = {row["namespace"]: row for row in report_of(tier.run("inspect"))["rows"]}
    assert 3600 <= rows[_SHORT.hex]["oldest_s"] < 4200 and rows[_SHORT.hex]["newest_s"] < 600
    report = report_of(tier.run("gc", "--expire", "30m"))
    assert report["removed"] == {"stale": 0, "namespaces": 0, "blocks": 7}
    assert tier.loaded(_SHORT) == set(tier.keys(_SHORT)[7:])


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_blocks_just_stored_with_a_shorter_ttl_are_young(
    kind: str, request: pytest.FixtureRequest, rng: random.Random
) -> None:
    """A command with the default time to live treats none of their blocks, nor parts being written, as old."""
    engine = Tier(request.getfixturevalue("server" if kind == "redis" else "valkey"), rng, ttl="1h")
    engine.written_ago_s = 0
    engine.fill()
    engine.cli("UNLINK", engine.name(_LONG, engine.keys(_LONG)[0], 0))
    engine.cli("UNLINK", engine.name(_LONG, engine.keys(_LONG)[1], 2))
    text = json.dumps({"type": "redis", **engine.options, "ttl": "1d"})
    rows = report_of(engine.run("inspect", text=text))["rows"]
    assert all(0 <= row["newest_s"] <= row["oldest_s"] < 600 for row in rows)
    removed = report_of(engine.run("gc", "--expire", "12h", "--unused-for", "12h", text=text))["removed"]
    assert removed == {"stale": 0, "namespaces": 0, "blocks": 0}


@pytest.mark.matrix
def test_blocks_just_used_with_a_shorter_ttl_are_young(valkey: Server, rng: random.Random) -> None:
    """If the server allows reads that do not count as use, age counts from the last use; unused blocks are removed."""
    engine = Tier(valkey, rng, ttl="1h")
    engine.written_ago_s = 2 * 86400
    engine.fill(_SHORT)
    text = json.dumps({"type": "redis", **engine.options, "ttl": "1d"})
    unused = engine.keys(_SHORT)[:3]
    for key in unused:
        engine.make_idle(engine.name(_SHORT, key), 13 * 3600, ttl_s=3600)
    for _ in range(2):
        assert engine.run("gc", "--expire", "12h", "--dry-run", text=text).returncode == 0
    removed = report_of(engine.run("gc", "--expire", "12h", text=text))["removed"]
    assert removed == {"stale": 0, "namespaces": 0, "blocks": len(unused)}
    assert engine.loaded(_SHORT) == set(engine.keys(_SHORT)[3:])


@pytest.mark.matrix
def test_gc_uses_idle_time_as_age_without_a_ttl(valkey: Server, rng: random.Random) -> None:
    """Without a time to live the server's idle time is the age; inspecting a block does not reset it."""
    tier = Tier(valkey, rng, ttl=0)
    tier.fill()
    old = tier.keys(_SHORT)[:5]
    for key in old:
        tier.make_idle(tier.name(_SHORT, key), 4000)
    orphan = tier.name(_LONG, tier.keys(_LONG)[0], 2)
    tier.cli("UNLINK", tier.name(_LONG, tier.keys(_LONG)[0], 0))
    tier.make_idle(orphan, 4000)
    for command in (["inspect"], ["scrub"], ["gc", "--expire", "1h", "--dry-run"]):
        assert tier.run(*command).returncode == 0
    report = report_of(tier.run("gc", "--expire", "1h"))
    # The other part was written just now.
    assert report["removed"] == {"stale": 1, "namespaces": 0, "blocks": 5}
    assert tier.loaded(_SHORT) == set(tier.keys(_SHORT)[5:])


@pytest.mark.matrix
def test_headers_give_the_age_of_blocks_without_idle_times(tmp_path: Path, rng: random.Random) -> None:
    """Without idle times the record's header gives a block's age, and incomplete blocks are left alone."""
    with running(plain("redis", tmp_path, policy="allkeys-lfu")) as (server,):
        tier = Tier(server, rng, ttl=0)
        tier.fill()
        tier.cli("UNLINK", tier.name(_LONG, tier.keys(_LONG)[0], 0))
        rows = report_of(tier.run("inspect"))["rows"]
        assert all(7200 <= row["newest_s"] <= row["oldest_s"] < 7800 for row in rows)
        removed = report_of(tier.run("gc", "--unused-for", "0.001s"))["removed"]
        assert removed == {"stale": 0, "namespaces": 2, "blocks": sum(_BLOCKS.values()) - 1}


@pytest.mark.matrix
def test_permission_for_idle_times_is_needed_only_without_a_ttl(tmp_path: Path, rng: random.Random) -> None:
    """With a time to live the right is not needed; without one, nothing of unknown age is removed."""
    acl = ADMIN_ACL.replace(" +object|idletime", "")
    with running(secured(tmp_path / "tls", f"{acl} +set +info")) as (server,):
        tier = Tier(server, rng)
        tier.fill(_SHORT)
        assert tier.run("gc", "--expire", "1h").returncode == 0
        tier = Tier(server, rng, ttl=0)
        tier.fill(_SHORT)
        done = tier.run("gc", "--expire", "1h")
        assert done.returncode == 1 and "OBJECT IDLETIME" in done.stderr
        assert tier.loaded(_SHORT) == set(tier.stored[_SHORT])


@pytest.mark.matrix
def test_a_master_that_is_down_is_an_error(tmp_path: Path, rng: random.Random) -> None:
    """The blocks there are unknown, so no command reports a part of a cluster as complete."""
    servers = cluster_nodes(tmp_path)
    with running(*servers):
        join_cluster(servers)
        tier = Tier(servers[0], rng)
        tier.fill(_SHORT)
        servers[2].kill()
        for command in ("inspect", "scrub"):
            done = tier.run(command)
            assert (done.returncode, done.stdout) == (1, "")
            assert f"127.0.0.1:{servers[2].port}" in done.stderr


def test_a_server_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    """The error names the server, and the command ends."""
    server = plain("redis", tmp_path)
    text = json.dumps({"type": "redis", "url": server.url})
    done = run_here("inspect", "--tier", text)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"127.0.0.1:{server.port}" in done.stderr


def test_blocks_that_can_not_be_read_are_named(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrub continues after them, and ends with status 1."""
    lost = tier.name(_SHORT, tier.keys(_SHORT)[2]).encode()
    real = Values.read

    async def failing(self: Values, wanted: Any) -> Any:
        answers = await real(self, wanted)
        failure = RedisError("no answer within 10 s.")
        return [failure if name == lost else answer for (name, _), answer in zip(wanted, answers, strict=True)]

    monkeypatch.setattr(Values, "read", failing)
    done = tier.run("scrub")
    report = report_of(done)
    assert (done.returncode, report["blocks"], report["rows"]) == (1, sum(_BLOCKS.values()) - 1, [])
    assert [row["key"] for row in report["unread"]] == [tier.keys(_SHORT)[2].hex()]


def test_names_that_a_scan_gives_twice_count_once(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that resizes its table during a scan and a cluster that moves slots may return names twice."""
    real, last = Values._scan, list[bytes]()

    async def twice(self: Values, node: Any, cursor: bytes, pattern: bytes) -> Any:
        if cursor == b"again":
            return b"0", last
        cursor, keys = await real(self, node, cursor, pattern)
        last[:] = keys
        return b"again" if cursor == b"0" else cursor, [*keys, *keys[::2]]

    monkeypatch.setattr(Values, "_scan", twice)
    rows = report_of(tier.run("inspect"))["rows"]
    assert {row["namespace"]: row["blocks"] for row in rows} == {each.hex: n for each, n in _BLOCKS.items()}
    assert report_of(tier.run("scrub"))["blocks"] == sum(_BLOCKS.values())


@pytest.mark.torture
def test_more_blocks_than_a_page(server: Server, rng: random.Random) -> None:
    """A server lists a few hundred names at a time; all are found and removed, once each."""
    tier = Tier(server, rng)
    maker = tier.maker(_SHORT)
    tier.stored[_SHORT] = {maker.key(): rng.randbytes(64) for _ in range(1500)}
    writes = [maker.write(key, payload) for key, payload in tier.stored[_SHORT].items()]
    assert set(_with_backend(tier.options, _SHORT, lambda backend: backend.put(writes))) == {Outcome.OK}
    with Medium(parse_tier(tier.text)) as holdings:
        (namespace,) = holdings.namespaces()
        assert {block.key for block in holdings.blocks(namespace)} == set(tier.stored[_SHORT])
        result = scrub(holdings, [namespace], dry=True)
        assert (result.blocks, result.gone, result.faults, result.unread) == (1500, 0, [], [])
        assert holdings.remove(namespace, None) == 1500
        assert holdings.namespaces() == []


def test_table_of_a_redis_tier_has_no_column_in_use(tier: Tier) -> None:
    """The table omits the "in use" column that a file tier has; one block is not written "1 blocks"."""
    done = run_here("inspect", "--tier", tier.text)
    assert done.returncode == 0 and "in use" not in done.stdout
    tier.cli("UNLINK", *(tier.name(_SHORT, key) for key in tier.keys(_SHORT)[1:]))
    done = run_here("scrub", "--tier", tier.text, "--namespace", _SHORT.hex)
    assert "redis: 1 block, " in done.stdout


def test_holdings_end_with_their_connections(tier: Tier) -> None:
    """Closing ends all operations; a second close does nothing."""
    # The server may not have noticed yet that the connections of the writers are closed.
    eventually(lambda: tier.server.clients() == 0)
    holdings = Medium(parse_tier(tier.text))
    (namespace, *_) = holdings.namespaces()
    blocks = holdings.blocks(namespace)
    next(blocks)
    assert tier.server.clients() == 1
    holdings.close()
    holdings.close()
    blocks.close()
    eventually(lambda: tier.server.clients() == 0)
