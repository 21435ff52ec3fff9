"""The maintenance commands, on buckets with blocks of engines, packs, and foreign objects."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.holdings import Holdings, ReadResult, open_holdings
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.backends.s3 import S3Backend, S3Config
from kvstore.backends.s3.client import ObjectClient, make_client
from kvstore.backends.s3.names import ObjectNames
from kvstore.backends.s3.notes import Uses, read_note
from kvstore.backends.s3.packs import PackFormat
from kvstore.cli.holdings.care import scrub
from kvstore.cli.holdings.medium import Medium
from kvstore.cli.tier_argument import parse_tier
from kvstore.errors import BackendError, ConfigError
from kvstore.namespace import Namespace
from kvstore.testing.records import RecordMaker
from kvstore.testing.waiting import eventually
from kvstore.types import BlockInfo, NamespaceInfo, Outcome, RemovalCause
from tests.cli.cli import report_of
from tests.cli.in_process import run_here
from tests.project.tree import ROOT
from tests.s3.clients import EACH_CLIENT, options_for
from tests.s3.fault_server import Fault, FaultServer
from tests.s3.servers import READ_ONLY, S3Server

_T = TypeVar("_T")

_LLAMA = Namespace({"model": "llama"})
_QWEN = Namespace({"model": "qwen"})
_BLOCKS = 12
_PAYLOAD_BYTES = 4096
_RECORD_BYTES = 256 + _PAYLOAD_BYTES
_DAY_S = 86400.0
_PATIENT: dict[str, Any] = {
    **{"timeout": 60, "connect_timeout": 60, "lookup_timeout": 90},
    **{"load_timeout": 90, "store_timeout": 90},
}
"""Deadlines are tested elsewhere: these hold on any slow machine, even for a thousand blocks at once."""
_PACKED: dict[str, Any] = {"pack_below": "1MiB", "pack_blocks": 5, "pack_refresh": 0}


class Tier:
    """A tier under a prefix of its own, with its stored blocks."""

    def __init__(self, server: S3Server | FaultServer, rng: random.Random, **more: Any) -> None:
        self.options = options_for(server, **{**_PATIENT, **more})
        self.prefix: str = self.options["prefix"]
        self.text = json.dumps({"type": "s3", **self.options})
        self.argument = parse_tier(self.text)
        self.stored: dict[Namespace, dict[bytes, bytes]] = {}
        self._rng = rng

    @property
    def config(self) -> S3Config:
        """Return its configuration."""
        assert isinstance(self.argument.config, S3Config)
        return self.argument.config

    def fill(self, namespace: Namespace, count: int = _BLOCKS, payload_bytes: int = _PAYLOAD_BYTES) -> list[bytes]:
        """Store blocks as an engine does; return their keys, in order."""
        maker = self._maker(namespace)
        blocks = {maker.key(): maker.payload(payload_bytes) for _ in range(count)}
        self.put(namespace, blocks)
        return list(blocks)

    def put(self, namespace: Namespace, blocks: dict[bytes, bytes]) -> None:
        """Store these blocks."""
        writes = [self._maker(namespace).write(key, payload) for key, payload in blocks.items()]
        assert set(self.with_backend(namespace, lambda backend: backend.put(writes))) == {Outcome.OK}
        self.stored.setdefault(namespace, {}).update(blocks)

    def loaded(self, namespace: Namespace) -> list[bytes]:
        """Return the keys that an engine finds, after comparing their bytes."""
        maker, stored = self._maker(namespace), self.stored[namespace]
        targets = [maker.target(key) for key in stored]
        outcomes = self.with_backend(namespace, lambda backend: backend.get_into([target.read for target in targets]))
        found = [target for target, outcome in zip(targets, outcomes, strict=True) if outcome is Outcome.OK]
        assert all(maker.content(target) == stored[target.key] for target in found)
        return [target.key for target in found]

    def with_backend(
        self, namespace: Namespace, work: Callable[[S3Backend], Coroutine[Any, Any, _T]], **more: Any
    ) -> _T:
        """Run work with a backend as an engine has it."""

        async def run() -> _T:
            backend = S3Backend(self.argument.with_options(**more).config)  # type: ignore[arg-type]
            try:
                await backend.open(namespace, RecordGeometry(backend.alignment, _PAYLOAD_BYTES))
                return await work(backend)
            finally:
                await backend.close()

        return asyncio.run(run())

    def ask(self, work: Callable[[ObjectClient], Coroutine[Any, Any, _T]]) -> _T:
        """Run work on the bucket itself."""

        async def run() -> _T:
            client = make_client(self.config)
            try:
                await client.open()
                return await work(client)
            finally:
                await client.close()

        return asyncio.run(run())

    def names(self, folder: str = "") -> list[str]:
        """Return the names under the prefix, without the prefix; descriptions of namespaces only in their folder."""

        async def listed(client: ObjectClient) -> list[str]:
            found = [info.key.removeprefix(self.prefix) async for info in client.listed(self.prefix + folder)]
            return [name for name in found if folder or not name.startswith("_namespaces/")]

        return self.ask(listed)

    def write(self, objects: dict[str, bytes]) -> None:
        """Write objects, by their names without the prefix."""

        async def written(client: ObjectClient) -> None:
            for name, body in objects.items():
                await client.put(self.prefix + name, [body], timeout_s=30)

        self.ask(written)

    def read(self, name: str) -> bytes:
        """Return the bytes of an object."""
        body = self.ask(lambda client: client.get_start(self.prefix + name, 1 << 20))
        assert body is not None
        return body

    def flip(self, name: str, at: int) -> None:
        """Change one bit of an object."""
        body = bytearray(self.read(name))
        body[at] ^= 1
        self.write({name: bytes(body)})

    def name_of(self, namespace: Namespace, key: bytes) -> str:
        """Return the name of a block's object, without the prefix."""
        return ObjectNames("", namespace).block(key)

    def run(self, command: str, *arguments: str, text: str = "") -> Any:
        """Run a command on the tier; check that its output ends in JSON."""
        return run_here(command, "--tier", text or self.text, *arguments, "--json")

    def _maker(self, namespace: Namespace) -> RecordMaker:
        return RecordMaker(namespace, RecordGeometry(S3Backend.alignment, _PAYLOAD_BYTES), self._rng)


def _foreign(namespace: Namespace) -> dict[str, bytes]:
    """Return foreign objects under the prefix, some of them with names similar to ours."""
    packs = ObjectNames("", namespace).packs
    return {
        "photo.jpg": b"a photo",
        "000/readme": b"text",
        # The three digits do not match this key, and none of our names has a file extension.
        f"000/{namespace.hex}/{'00' * 32}": b"no block of ours",
        f"000/{namespace.hex}/notes.txt": b"text",
        f"{packs}readme": b"text",
        f"{packs}{'0' * 27}p": b"one digit is missing",
        f"_packs/elsewhere/{'0' * 28}p": b"no namespace",
        "_keeper/else": b"text",
        "_q/text": b"text",
        "_z": b"text",
        f"team/{ObjectNames('', namespace).block(b'key')}": b"of a tier with a longer prefix",
    }


@pytest.fixture(params=["moto", pytest.param("weed packed", marks=pytest.mark.matrix)])
def tier(request: pytest.FixtureRequest, rng: random.Random) -> Tier:
    """A tier with two namespaces, beside foreign objects: on two servers, as single objects and in packs."""
    kind, *more = request.param.split()
    server: S3Server = request.getfixturevalue(f"{kind}_server")
    found = Tier(server, rng, **(_PACKED if more else {}))
    for namespace in (_LLAMA, _QWEN):
        found.fill(namespace)
    found.write(_foreign(_LLAMA))
    return found


def test_holdings_need_the_configuration_of_their_tier() -> None:
    """Another backend's configuration is refused with the name of the expected one."""
    with pytest.raises(ConfigError, match="an S3Config"):
        open_holdings("s3", MemoryConfig())


def test_scrub_takes_damaged_blocks_out_of_the_way(tier: Tier) -> None:
    """A dry run reports damaged blocks, a real run deletes them for every engine; all other objects stay."""
    clean = report_of(done := tier.run("scrub"))
    assert (done.returncode, clean["blocks"], clean["rows"], clean["unread"]) == (0, 2 * _BLOCKS, [], [])
    assert clean["size_bytes"] == 2 * _BLOCKS * _RECORD_BYTES
    stored = tier.stored[_LLAMA]
    damaged = list(stored)[4]
    if "pack_below" in tier.options:
        bodies = {name: tier.read(name) for name in tier.names(f"_packs/{_LLAMA.hex}/") if name.endswith("p")}
        (name,) = (name for name, body in bodies.items() if stored[damaged] in body)
        tier.flip(name, bodies[name].index(stored[damaged]) + 1000)
    else:
        tier.flip(tier.name_of(_LLAMA, damaged), 256 + 1000)
    for dry in (True, False):
        report = report_of(done := tier.run("scrub", *(["--dry-run"] if dry else [])))
        assert (done.returncode, report["blocks"], report["set_aside"]) == (3, 2 * _BLOCKS, 0 if dry else 1)
        (row,) = report["rows"]
        assert (row["key"], row["namespace"], row["fault"]) == (damaged.hex(), _LLAMA.hex, "payload")
    report = report_of(done := tier.run("scrub"))
    assert (done.returncode, report["blocks"]) == (0, 2 * _BLOCKS - 1)
    assert tier.loaded(_LLAMA) == [key for key in stored if key != damaged]
    assert tier.loaded(_QWEN) == list(tier.stored[_QWEN])
    assert set(_foreign(_LLAMA)) <= set(tier.names())
    # An engine stores the block again.
    tier.put(_LLAMA, {damaged: stored[damaged]})
    assert set(tier.loaded(_LLAMA)) == set(stored)


def test_gc_removes_namespaces_and_nothing_of_others(tier: Tier) -> None:
    """A namespace unused for long is removed unless it is kept; engines are notified; a dry run only reports it."""
    before = tier.names()
    assert report_of(tier.run("gc"))["rows"] == []
    time_apart = ["--unused-for", "1ms"]
    dry = report_of(tier.run("gc", *time_apart, "--dry-run"))
    assert {(row["what"], row["name"]) for row in dry["rows"]} == {("namespace", _LLAMA.hex), ("namespace", _QWEN.hex)}
    assert all(row["blocks"] == _BLOCKS for row in dry["rows"])
    assert tier.names() == before
    report = report_of(done := tier.run("gc", *time_apart, "--keep", _QWEN.hex[:12]))
    assert (done.returncode, report["removed"]) == (0, {"stale": 0, "namespaces": 1, "blocks": _BLOCKS})
    assert tier.loaded(_QWEN) == list(tier.stored[_QWEN])
    assert tier.loaded(_LLAMA) == []
    gone = [name for name in before if _LLAMA.hex in name and name not in _foreign(_LLAMA)]
    notes = tier.names("_keeper/removed/")
    assert tier.names() == sorted({*before, *notes} - set(gone))
    heard = [read_note(tier.prefix, tier.read(note)) for note in notes]
    told = [name.removeprefix(tier.prefix) for found in heard if found is not None for name in found[0]]
    assert sorted(told) == sorted(gone)
    assert {found[1] for found in heard if found is not None} == {RemovalCause.EXPIRED}
    assert tier.names("_namespaces/") == [f"_namespaces/{_QWEN.hex}"]


def test_the_fields_of_a_namespace_are_stored_with_its_first_block(faults: FaultServer, rng: random.Random) -> None:
    """The admin tools show them. Blocks stay valid without them, and a failed write fails no store."""
    tier = Tier(faults, rng)
    keys = tier.fill(_LLAMA)
    assert report_of(tier.run("inspect", "--namespace", _LLAMA.hex))["fields"] == {"model": "llama"}
    for damaged in (b"{", b"[]", _QWEN.description()):
        tier.write({f"_namespaces/{_LLAMA.hex}": damaged})
        report = report_of(tier.run("inspect", "--namespace", _LLAMA.hex))
        assert (report["fields"], report["rows"][0]["blocks"]) == (None, len(keys))
    assert tier.loaded(_LLAMA) == keys
    faults.plan(Fault.FORBIDDEN, methods=("PUT",), contains="_namespaces")
    assert len(tier.fill(_QWEN)) == _BLOCKS
    assert tier.names("_namespaces/") == [f"_namespaces/{_LLAMA.hex}"]


@pytest.mark.parametrize("more", [{}, _PACKED])
def test_a_few_blocks_are_found_without_listing_all(
    faults: FaultServer, rng: random.Random, more: dict[str, Any]
) -> None:
    """Blocks are asked for by name, and namespaces found by their fields: a bucket may have millions of blocks."""
    tier, unused = Tier(faults, rng, **more), Namespace({"model": "phi"})
    keys = tier.fill(_LLAMA)
    tier.write({f"_namespaces/{unused.hex}": unused.description()})
    tier.write({"_namespaces/" + "0" * 64: _QWEN.description(), "_namespaces/notes.txt": b"{}"})
    with Medium(tier.argument) as holdings:
        found = {each.hex: each for each in holdings.described()}
        assert {name: each.fields for name, each in found.items()} == {
            _LLAMA.hex: {"model": "llama"},
            unused.hex: {"model": "phi"},
        }
        llama = found[_LLAMA.hex]
        assert time.time() - _DAY_S < llama.used_at < time.time() + _DAY_S
        before = faults.counts().get("HEAD", 0)
        assert holdings.present(llama, [*keys[:3], b"none"]) == set(keys[:3])
        assert faults.counts()["HEAD"] - before == 4
        faults.plan(Fault.FORBIDDEN, methods=("HEAD",))
        with pytest.raises(BackendError):
            holdings.present(llama, keys)


@pytest.mark.parametrize("packed", [False, True])
def test_gc_expires_unused_blocks(faults: FaultServer, rng: random.Random, packed: bool) -> None:
    """Blocks older than --expire or the tier's ttl are removed, unless an engine reports a use."""
    tier = Tier(faults, rng, **(_PACKED if packed else {}))
    old = tier.fill(_LLAMA, 5)
    before = tier.names()
    used = tier.fill(_LLAMA, 5)
    later = [name for name in tier.names() if name not in before]
    faults.age(tier.prefix, 5 * _DAY_S)
    young = tier.fill(_LLAMA, 5)
    uses = Uses()
    uses.note(tier.prefix + name for name in later)
    tier.write({"_keeper/uses/0123456789abcdef": uses.encode()})
    assert report_of(tier.run("gc"))["rows"] == []
    report = report_of(tier.run("gc", "--expire", "6d"))
    assert report["rows"] == []
    with_ttl = json.dumps({"type": "s3", **tier.options, "ttl": "4d"})
    for text, arguments in ((tier.text, ["--expire", "4d", "--dry-run"]), (with_ttl, [])):
        report = report_of(done := tier.run("gc", *arguments, text=text))
        assert done.returncode == 0
        (row,) = report["rows"]
        assert (row["what"], row["name"], row["blocks"], row["why"]) == ("blocks", _LLAMA.hex, 5, "unused for 4d")
    assert report["removed"] == {"stale": 0, "namespaces": 0, "blocks": 5}
    assert tier.loaded(_LLAMA) == [*used, *young]
    assert old


def test_some_blocks_of_a_pack_are_removed_by_a_note(faults: FaultServer, rng: random.Random) -> None:
    """Other blocks of the pack stay, for current and later engines; the pack is removed with its last block."""
    tier = Tier(faults, rng, **_PACKED)
    keys = tier.fill(_LLAMA, 5)
    with Medium(tier.argument) as holdings:
        (namespace,) = holdings.namespaces()
        blocks = {block.key: block for block in holdings.blocks(namespace)}
        assert holdings.remove(namespace, [blocks[key] for key in keys[:2]]) == 2
        assert tier_keys(holdings.blocks(namespace)) == set(keys[2:])
        assert tier.loaded(_LLAMA) == keys[2:]
        (name,) = (name for name in tier.names("_packs/") if name.endswith("p"))
        for key in keys[2:]:
            tier.flip(name, tier.read(name).index(tier.stored[_LLAMA][key]))
        rest = list(holdings.blocks(namespace))
        assert holdings.set_aside(namespace, rest) == 3
        assert list(holdings.blocks(namespace)) == []
    assert [name for name in tier.names("_packs/") if name.endswith("p")] == []
    assert tier.loaded(_LLAMA) == []


def test_block_intact_on_a_second_read_is_kept(faults: FaultServer, rng: random.Random) -> None:
    """One bad answer deletes nothing: neither a block, alone or in a pack, nor a pack because of its head."""
    for more in ({}, _PACKED):
        tier = Tier(faults, rng, **more)
        keys = tier.fill(_LLAMA, 5)
        before = tier.names()
        with Medium(tier.argument) as holdings:
            (namespace,) = holdings.namespaces()
            assert holdings.set_aside(namespace, list(holdings.blocks(namespace))) == 0
            assert tier.names() == before
            if more:
                (name,) = before
                # In its entries: a changed namespace at its start would make it foreign.
                tier.flip(name, 70)
                (hidden,) = holdings.records(namespace)
                tier.flip(name, 70)
                assert holdings.set_aside(namespace, [hidden.block]) == 0
        assert tier.loaded(_LLAMA) == keys


def test_an_object_replaced_since_it_was_found_stays(faults: FaultServer, rng: random.Random) -> None:
    """Only the version found damaged is deleted; a newer damaged version is verified by the next scrub."""
    tier = Tier(faults, rng)
    keys = tier.fill(_LLAMA, 2)
    with Medium(tier.argument) as holdings:
        (namespace,) = holdings.namespaces()
        found = list(holdings.blocks(namespace))
        tier.flip(found[0].place.name.removeprefix(tier.prefix), -1)
        assert holdings.set_aside(namespace, found) == 0
        assert len(tier.names()) == 2
        assert holdings.set_aside(namespace, list(holdings.blocks(namespace))) == 1
    assert len(tier.loaded(_LLAMA)) == len(keys) - 1


def test_objects_of_unknown_age_never_expire(faults: FaultServer, rng: random.Random) -> None:
    """Without times from the service, no block, pack or namespace expires."""
    tier = Tier(faults, rng)
    keys = tier.fill(_LLAMA)
    # To the epoch, or shortly before.
    faults.age(tier.prefix, float(int(time.time())))
    (row,) = report_of(tier.run("inspect"))["rows"]
    assert (row["oldest_s"], row["newest_s"], row["unused_s"]) == (None, None, None)
    for arguments in (["--expire", "1d"], ["--unused-for", "1d"]):
        assert report_of(tier.run("gc", *arguments))["rows"] == []
    # An old namespace does not make the others old.
    tier.fill(_LLAMA, 1)
    faults.age(f"{tier.prefix}{tier.name_of(_LLAMA, list(tier.stored[_LLAMA])[-1])}", 40 * _DAY_S)
    assert report_of(tier.run("gc"))["rows"] == []
    assert set(keys) < set(tier.loaded(_LLAMA))


def test_stale_objects_are_listed_in_bounded_numbers(
    faults: FaultServer, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are left to the next run, and the report says so."""
    for module in ("cli.holdings.care", "backends.s3.holdings"):
        monkeypatch.setattr(f"kvstore.{module}.STALE_MAX", 2)
    tier = Tier(faults, rng, **_PACKED)
    names, made = ObjectNames("", _LLAMA), PackFormat(_LLAMA)
    gone = names.new_pack()[len(names.packs) :]
    tier.write({f"_keeper/removed/{'0' * 28}": b"x", f"_keeper/uses/{'0' * 16}": b"x"})
    tier.write({names.new_note(): made.gone_note([(gone, b"a")]) for _ in range(3)})
    faults.age(tier.prefix, 31 * _DAY_S)
    for swept, more in ((2, True), (2, True), (1, False)):
        text = run_here("gc", "--unused-for", "0", "--dry-run", "--tier", tier.text).stdout
        assert ("more remain than one run takes" in text) is more
        report = report_of(tier.run("gc", "--unused-for", "0"))
        assert (report["removed"]["stale"], report["more"]) == (swept, more)
    assert tier.names() == []


def test_a_command_waits_longer_than_a_lookup(faults: FaultServer, rng: random.Random) -> None:
    """Lists and heads of packs may take longer than an engine's lookup timeout."""
    tier = Tier(faults, rng, **_PACKED)
    tier.fill(_LLAMA, 5)
    text = json.dumps({"type": "s3", **tier.options, "lookup_timeout": "50ms", "tries": 1})
    faults.plan(Fault.LATE, methods=("GET",), delay_s=0.3)
    (row,) = report_of(tier.run("inspect", text=text))["rows"]
    assert row["blocks"] == 5


def tier_keys(blocks: Iterable[BlockInfo]) -> set[bytes]:
    """Return the keys of blocks."""
    return {block.key for block in blocks}


def test_gc_removes_empty_packs_and_stale_notes(faults: FaultServer, rng: random.Random) -> None:
    """Empty packs, notes of deleted packs, and expired housekeeping objects are removed; nothing else is."""
    tier = Tier(faults, rng, **_PACKED)
    kept = tier.fill(_LLAMA, 10)
    names, made = ObjectNames("", _LLAMA), PackFormat(_LLAMA)
    live = [name for name in tier.names("_packs/") if name.endswith("p")]
    head, _ = made.pack_head([(b"a", 3), (b"b", 3)])
    orphan, damaged, gone = names.new_pack(), names.new_pack(), names.new_pack()
    folder = len(names.packs)
    notes = {
        names.new_note(): made.gone_note([(orphan[folder:], b"a"), (orphan[folder:], b"b")]),
        names.new_note(): made.gone_note([(live[0][folder:], b"nothing of it")]),
    }
    useless = {
        names.new_note(): made.gone_note([(gone[folder:], b"a")]),
        names.new_note(): made.gone_note([(gone[folder:], b"a")])[:-1],
        f"_keeper/removed/{'0' * 28}": b"{}",
        f"_keeper/uses/{'0' * 16}": b"x",
    }
    other = PackFormat(_QWEN).pack_head([(b"a", 3)])[0]
    left_alone = {
        **_foreign(_LLAMA),
        "_keeper/uses/their.parquet": b"x",
        names.new_pack(): other + b"abc",
        names.new_note(): b"no note",
    }
    broken = head[:-1] + bytes([head[-1] ^ 1])
    tier.write({**notes, **useless, **left_alone, orphan: head + b"123456", damaged: broken + b"123456"})
    faults.age(tier.prefix, 31 * _DAY_S)
    young = names.new_note()
    tier.write({young: made.gone_note([(gone[folder:], b"b")]), "_keeper/removed/young": b"{}"})
    before = tier.names()
    dry = report_of(tier.run("gc", "--unused-for", "0", "--dry-run"))
    assert {row["name"] for row in dry["rows"]} == {*useless, orphan, damaged}
    assert tier.names() == before
    report = report_of(done := tier.run("gc", "--unused-for", "0"))
    assert (done.returncode, report["removed"]) == (0, {"stale": len(useless) + 2, "namespaces": 0, "blocks": 0})
    assert tier.names() == sorted(set(before) - set(useless) - {orphan, damaged})
    # The pack of the note is gone now, so the next run removes the note.
    report = report_of(tier.run("gc", "--unused-for", "0"))
    assert {row["name"] for row in report["rows"]} == {next(iter(notes))}
    assert tier.loaded(_LLAMA) == kept


def test_a_pack_with_a_damaged_head_is_reported(faults: FaultServer, rng: random.Random) -> None:
    """Its name stands for its unknown blocks; a dry scrub leaves it, a real one deletes it."""
    tier = Tier(faults, rng, **_PACKED)
    keys = tier.fill(_LLAMA, 5), tier.fill(_LLAMA, 5)
    first, second = (name for name in tier.names("_packs/") if name.endswith("p"))
    # In its entries: a changed namespace at its start would make it foreign.
    tier.flip(first, 70)
    assert report_of(tier.run("inspect"))["rows"][0]["blocks"] == 5
    for dry in (True, False):
        report = report_of(done := tier.run("scrub", *(["--dry-run"] if dry else [])))
        assert (done.returncode, report["set_aside"]) == (3, 0 if dry else 1)
        (row,) = report["rows"]
        assert f"{row['key']}p" == first.rpartition("/")[2]
    assert tier.names("_packs/") == [second]
    assert tier.loaded(_LLAMA) == keys[1]


def test_unreadable_object_is_named_and_skipped(faults: FaultServer, rng: random.Random) -> None:
    """One object that the service refuses does not affect the others: it is named, and the status is 1."""
    tier = Tier(faults, rng, tries=1)
    keys = tier.fill(_LLAMA)
    refused = keys[5]
    faults.plan(Fault.FORBIDDEN, methods=("GET",), contains=refused.hex())
    report = report_of(done := tier.run("scrub"))
    assert (done.returncode, report["blocks"], report["rows"]) == (1, _BLOCKS - 1, [])
    (row,) = report["unread"]
    assert (row["key"], row["namespace"]) == (refused.hex(), _LLAMA.hex)
    assert "403" in row["what"]
    shown = run_here("scrub", "--tier", tier.text)
    assert refused.hex() in shown.stderr


@pytest.mark.program
def test_ctrl_c_ends_a_scrub_soon(faults: FaultServer, rng: random.Random) -> None:
    """While the service does not answer, an interrupt ends the command with status 130, long before any deadline."""
    tier = Tier(faults, rng)
    tier.fill(_LLAMA)
    faults.plan(Fault.BLACK_HOLE, methods=("GET",), contains="/" + _LLAMA.hex)
    command = [sys.executable, "-m", "kvstore", "scrub", "--tier", tier.text, "--yes"]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    try:
        eventually(lambda: bool(faults.counts().get("fault_black_hole")), timeout_s=60)
        child.send_signal(signal.SIGINT)
        # Its deadlines are 90 s.
        out, err = child.communicate(timeout=60)
        assert "Traceback" not in err.decode()
        assert (child.returncode, out) == (130, b"")
    finally:
        child.kill()
        child.communicate()
        faults.plan(None)


@pytest.mark.parametrize("fault", [Fault.FORBIDDEN, Fault.KEY_DISABLED, Fault.BAD_RANGE])
def test_a_pack_that_can_not_be_read_hides_no_other(faults: FaultServer, rng: random.Random, fault: Fault) -> None:
    """Its blocks are unknown, so the pack itself is named; a command that only counts blocks fails."""
    tier = Tier(faults, rng, tries=1, **_PACKED)
    keys = tier.fill(_LLAMA, 10)
    first, _ = (name for name in tier.names("_packs/") if name.endswith("p"))
    faults.plan(fault, methods=("GET",), contains=first)
    report = report_of(done := tier.run("scrub"))
    assert (done.returncode, report["blocks"], report["rows"]) == (1, 5, [])
    (row,) = report["unread"]
    assert first in row["what"]
    done = tier.run("inspect")
    assert (done.returncode, done.stdout) == (1, "")
    assert first in done.stderr
    faults.plan(None)
    assert tier.loaded(_LLAMA) == keys


def test_a_note_that_can_not_be_read_is_no_empty_one(faults: FaultServer, rng: random.Random) -> None:
    """Without the note the removed blocks are unknown, so every command reports it and changes nothing."""
    tier = Tier(faults, rng, tries=1, **_PACKED)
    keys = tier.fill(_LLAMA, 5)
    with Medium(tier.argument) as holdings:
        (namespace,) = holdings.namespaces()
        (removed,) = (block for block in holdings.blocks(namespace) if block.key == keys[0])
        assert holdings.remove(namespace, [removed]) == 1
    (note,) = (name for name in tier.names("_packs/") if name.endswith("r"))
    before = tier.names()
    faults.plan(Fault.KEY_DISABLED, methods=("GET",), contains=note)
    for command in ("inspect", "scrub", "gc"):
        done = tier.run(command)
        assert (done.returncode, done.stdout) == (1, "")
        assert note in done.stderr
    faults.plan(None)
    assert tier.names() == before


def test_a_service_that_fails_is_not_asked_for_every_block(faults: FaultServer, rng: random.Random) -> None:
    """If no block can be read, the command ends with status 1, without requesting all blocks."""
    tier = Tier(faults, rng, tries=1)
    tier.fill(_LLAMA, 200, 64)
    faults.plan(Fault.INTERNAL, methods=("GET",), contains=f"/{_LLAMA.hex}/")
    before = faults.counts().get("fault_internal", 0)
    report = report_of(done := tier.run("scrub"))
    assert (done.returncode, report["blocks"], len(report["unread"])) == (1, 0, 15)
    assert "500" in report["error"]
    assert "500" in done.stderr
    # The requests in flight at the sixteenth failure, and no more.
    assert 16 <= faults.counts()["fault_internal"] - before <= 32
    faults.plan(Fault.REFUSED)
    try:
        for command in ("inspect", "scrub", "gc"):
            done = tier.run(command)
            assert (done.returncode, done.stdout) == (1, "")
            assert "endpoint" in done.stderr
    finally:
        faults.plan(None)


def test_aborted_scrub_reports_its_findings(faults: FaultServer, rng: random.Random) -> None:
    """Damage found before the service failed is reported and deleted, and the status is that of damage."""
    tier = Tier(faults, rng, tries=1)
    tier.fill(_LLAMA, 40, 64)
    # The namespace used last comes first.
    faults.age(tier.prefix, _DAY_S)
    damaged, *others = tier.fill(_QWEN, 5)
    tier.flip(tier.name_of(_QWEN, damaged), 300)
    for dry in (True, False):
        faults.plan(Fault.INTERNAL, methods=("GET",), contains=f"/{_LLAMA.hex}")
        report = report_of(done := tier.run("scrub", *(["--dry-run"] if dry else [])))
        assert (done.returncode, report["blocks"], report["set_aside"]) == (3, 5, 0 if dry else 1)
        assert [row["key"] for row in report["rows"]] == [damaged.hex()]
        assert "500" in report["error"]
        assert "ended early" in done.stderr
        faults.plan(None)
    assert tier.loaded(_QWEN) == others


def test_damage_is_reported_if_deletion_fails(faults: FaultServer, rng: random.Random) -> None:
    """If the service does not delete, all findings are still reported."""
    tier = Tier(faults, rng, tries=1)
    damaged, *_ = tier.fill(_LLAMA, 5)
    tier.flip(tier.name_of(_LLAMA, damaged), 300)
    faults.plan(Fault.FORBIDDEN, methods=("POST", "DELETE"))
    report = report_of(done := tier.run("scrub"))
    assert (done.returncode, report["blocks"], report["set_aside"]) == (3, 5, 0)
    assert [row["key"] for row in report["rows"]] == [damaged.hex()]
    assert "403" in report["error"]


@pytest.mark.torture
def test_more_blocks_than_a_page(faults: FaultServer, rng: random.Random) -> None:
    """Lists continue page after page, past foreign objects between ours, for blocks and for packs."""
    more = 1100
    tier = Tier(faults, rng)
    tier.fill(_LLAMA, more, 64)
    tier.write({f"_foreign/{number:04}": b"x" for number in range(1010)})
    packed = Tier(faults, rng, **{**_PACKED, "pack_blocks": 1}, prefix=tier.prefix)
    packed.fill(_LLAMA, more, 64)
    (row,) = report_of(tier.run("inspect"))["rows"]
    assert row["blocks"] == 2 * more
    report = report_of(done := tier.run("scrub"))
    assert (done.returncode, report["blocks"], report["rows"]) == (0, 2 * more, [])
    report = report_of(tier.run("gc", "--unused-for", "1ms"))
    assert report["removed"] == {"stale": 0, "namespaces": 1, "blocks": 2 * more}
    left = tier.names()
    assert [name for name in left if not name.startswith(("_foreign/", "_keeper/removed/"))] == []
    assert sum(name.startswith("_foreign/") for name in left) == 1010
    # Each names a thousand objects, however they are mixed with others.
    assert sum(name.startswith("_keeper/removed/") for name in left) == 3


@pytest.mark.parametrize("client", EACH_CLIENT)
def test_a_tier_may_have_the_whole_bucket(faults: FaultServer, rng: random.Random, client: str) -> None:
    """Without a prefix, our names are also distinguished from foreign ones."""
    tier, packed = (Tier(faults, rng, prefix="", client=client, **more) for more in ({}, _PACKED))
    foreign = {**_foreign(_LLAMA), "zebra": b"x", "0": b"x", "_": b"x"}
    tier.write(foreign)
    keys = [tier.fill(_LLAMA), packed.fill(_LLAMA)]
    (row,) = report_of(tier.run("inspect"))["rows"]
    assert (row["namespace"], row["blocks"]) == (_LLAMA.hex, 2 * _BLOCKS)
    assert tier.run("scrub").returncode == 0
    assert [tier.loaded(_LLAMA), packed.loaded(_LLAMA)] == keys
    report = report_of(tier.run("gc", "--unused-for", "1ms"))
    assert report["removed"] == {"stale": 0, "namespaces": 1, "blocks": 2 * _BLOCKS}
    assert sorted(name for name in tier.names() if not name.startswith("_keeper/removed/")) == sorted(foreign)


def test_a_block_that_was_replaced_since_it_was_read_stays(weed_server: S3Server, rng: random.Random) -> None:
    """Between verification and deletion another writer may replace the block with a good one."""
    tier = Tier(weed_server, rng)
    key, other = tier.fill(_LLAMA, 2)
    name = tier.name_of(_LLAMA, key)
    good = tier.read(name)
    for each in (key, other):
        tier.flip(tier.name_of(_LLAMA, each), 300)
    with Medium(tier.argument) as holdings:
        (namespace,) = holdings.namespaces()
        blocks = list(holdings.blocks(namespace))
        tier.write({name: good})
        assert holdings.set_aside(namespace, blocks) == 1
    assert tier.loaded(_LLAMA) == [key]
    assert tier.name_of(_LLAMA, other) not in tier.names()


def test_read_only_credentials_inspect_and_scrub(weed_server: S3Server, rng: random.Random) -> None:
    """Read-only credentials can inspect and scrub; commands that need more give a clear error."""
    tier = Tier(weed_server, rng)
    keys = tier.fill(_LLAMA)
    access, secret = READ_ONLY
    text = json.dumps({"type": "s3", **tier.options, "access_key_id": access, "secret_access_key": secret})
    assert report_of(tier.run("inspect", text=text))["rows"][0]["blocks"] == _BLOCKS
    assert tier.run("scrub", text=text).returncode == 0
    assert tier.run("gc", "--unused-for", "1ms", "--dry-run", text=text).returncode == 0
    done = tier.run("gc", "--unused-for", "1ms", text=text)
    assert (done.returncode, done.stdout) == (1, "")
    assert "403" in done.stderr
    assert secret not in done.stderr
    assert tier.loaded(_LLAMA) == keys


def test_a_bucket_that_is_not_there_is_a_clear_error(weed_server: S3Server, rng: random.Random) -> None:
    """A missing bucket is neither searched nor created."""
    tier = Tier(weed_server, rng)
    text = json.dumps({"type": "s3", **tier.options, "bucket": "no-such-bucket-of-ours"})
    for command in ("inspect", "scrub", "gc"):
        done = tier.run(command, text=text)
        assert (done.returncode, done.stdout) == (1, "")
        assert "bucket" in done.stderr
    assert report_of(tier.run("inspect"))["rows"] == []


class Sized(Holdings):
    """Holdings of the blocks that a test has set; their records are their keys."""

    blocks: ClassVar[list[BlockInfo]] = []
    batches: ClassVar[list[list[int]]] = []  # Lengths of the blocks of each read.

    async def scan(self, namespace: NamespaceInfo) -> Any:
        for start in range(0, len(self.blocks), 70):
            yield self.blocks[start : start + 70]

    async def read(self, namespace: NamespaceInfo, blocks: Sequence[BlockInfo]) -> Sequence[ReadResult]:
        self.batches.append([block.size_bytes for block in blocks])
        return [memoryview(block.key) for block in blocks]


class SizedBackend(MemoryBackend):
    """A backend with such holdings."""

    holdings_type = f"{__name__}:Sized"


def test_concurrent_reads_are_bounded(rng: random.Random) -> None:
    """Reads at once are bounded in blocks and, except for one large block, in bytes; each is yielded once, in order."""
    Sized.blocks = [
        BlockInfo(number.to_bytes(4), rng.choice([1, 1000, 1 << 20, 30 << 20, 100 << 20])) for number in range(300)
    ]
    Sized.batches = []
    with Medium(parse_tier(json.dumps({"backend": f"{__name__}:SizedBackend"}))) as holdings:
        found = [record.block.key for record in holdings.records(NamespaceInfo("00" * 32))]
    assert found == [number.to_bytes(4) for number in range(300)]
    assert all(len(batch) <= 32 and (len(batch) == 1 or sum(batch) <= 64 << 20) for batch in Sized.batches)
    assert max(map(len, Sized.batches)) > 1


def test_a_walk_that_is_left_early_closes_well(weed_server: S3Server, rng: random.Random) -> None:
    """A caller that stops after one block leaves no task running; a second close has no effect."""
    tier = Tier(weed_server, rng)
    tier.fill(_LLAMA)
    holdings = Medium(tier.argument)
    (namespace,) = holdings.namespaces()
    walk = holdings.records(namespace)
    next(walk)
    holdings.close()
    holdings.close()
    del walk
    with Medium(tier.argument) as holdings:
        assert scrub(holdings, holdings.namespaces(), dry=True).blocks == _BLOCKS
