"""Maintenance commands, run against tiers that hold blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import AsyncTier, Namespace, RequestContext, TransferJob, open_tier
from kvstore.cli.holdings.care import make_plan, run_plan, scrub
from kvstore.cli.holdings.medium import Medium
from kvstore.cli.terminal import print_line
from kvstore.cli.tier_argument import TierArgument, parse_tier
from kvstore.codec.checksum import header_checksum
from kvstore.codec.keyring import new_document
from kvstore.errors import ConfigError
from kvstore.primary import Region
from kvstore.testing.waiting import eventually
from kvstore.types import JobResult, LookupResult
from tests.cli.cli import report_of
from tests.cli.in_process import run_here
from tests.disk.placed import flip, placed, write_header
from tests.project.tree import ROOT

_SLOT_BYTES = 16384
_BLOCKS = 12
_LLAMA = Namespace({"model": "llama"})
_QWEN = Namespace({"model": "qwen"})


class Fixture:
    """A tier that holds blocks, with the payload stored under each key."""

    def __init__(self, backend: str, root: Path, **options: Any) -> None:
        self.root = root
        options |= {"path": str(root), "capacity": "64MiB", "reserve": 0}
        self.text = json.dumps({"type": backend, **options})
        self.argument = parse_tier(self.text)
        generator = np.random.default_rng(7)
        self.payloads = generator.integers(0, 256, (_BLOCKS, _SLOT_BYTES), dtype=np.uint8)
        self.keys = [b"key-%03d" % number for number in range(_BLOCKS)]

    @contextmanager
    def opened(self, namespace: Namespace, **more: Any) -> Iterator[tuple[AsyncTier, Region]]:
        """Open the tier as an engine does."""
        with Region.create(_BLOCKS, _SLOT_BYTES) as region:
            tier = open_tier(
                self.argument.as_config(**more), primary=region.view(), slot_bytes=_SLOT_BYTES, namespace=namespace
            )
            with closing(tier):
                yield tier, region

    def fill(self, namespace: Namespace) -> None:
        """Store all blocks."""
        with self.opened(namespace) as (tier, region):
            rows = region.rows()
            rows[:] = self.payloads
            del rows
            assert _run(tier, TransferJob(1, self.keys, range(_BLOCKS)), store=True).success

    def loaded(self, namespace: Namespace) -> list[bytes]:
        """Return the keys that an engine finds, after comparing their bytes."""
        with self.opened(namespace) as (tier, region):
            found = [key for key in self.keys if _answer(tier, key) is LookupResult.HIT]
            slots = [self.keys.index(key) for key in found]
            result = _run(tier, TransferJob(2, found, slots), store=False)
            for key in result.successful_keys:
                slot = self.keys.index(key)
                with region.view() as view:
                    row = view[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES]
                    assert bytes(row) == self.payloads[slot].tobytes()
                    row.release()
            return list(result.successful_keys)

    def flip(self, key: bytes, at: int) -> None:
        """Damage a block at an offset in its slot: the record's header is at 0, the payload at 4096."""
        flip(placed(self.root / _LLAMA.hex)[key], at)

    def rewrite(self, key: bytes, change: Callable[[bytearray], None], namespace: Namespace = _LLAMA) -> None:
        """Change the header of a block's record and recompute all checksums."""
        place = placed(self.root / namespace.hex)[key]
        with place.segment.open("rb") as file:
            file.seek(place.offset)
            page = bytearray(file.read(4096))
        change(page)
        page[248:256] = header_checksum(bytes(page[:248])).to_bytes(8, "little")
        write_header(key, place, page)

    def date(self, created_s: float, namespace: Namespace = _LLAMA, count: int = _BLOCKS) -> None:
        """Set the time at which blocks were written and their namespace was last used."""

        def change(page: bytearray) -> None:
            page[112:120] = int(created_s * 1e9).to_bytes(8, "little")

        for key in self.keys[:count]:
            self.rewrite(key, change, namespace)
        if count == _BLOCKS:
            for path in (self.root / namespace.hex).rglob("*"):
                os.utime(path, (created_s, created_s))


def _run(tier: AsyncTier, job: TransferJob, *, store: bool) -> JobResult:
    (tier.submit_store if store else tier.submit_load)(job)
    tier.flush()
    assert tier.drain(30)
    (result,) = tier.get_finished()
    return result


def _answer(tier: AsyncTier, key: bytes) -> LookupResult:
    answers: list[LookupResult] = []

    def asked() -> bool:
        tier.get_finished()
        answers.append(tier.lookup(key, RequestContext("r")))
        tier.flush()
        return answers[-1] is not LookupResult.RETRY

    eventually(asked)
    return answers[-1]


def _kvstore(command: str, *arguments: str, tier: str) -> Any:
    return run_here(command, "--tier", tier, *arguments)


@pytest.fixture
def held(tmp_path: Path) -> Fixture:
    """A tier with one namespace in it."""
    fixture = Fixture("file", tmp_path / "tier")
    fixture.fill(_LLAMA)
    return fixture


@pytest.fixture
def files(tmp_path: Path) -> Fixture:
    """A file tier with two namespaces in it."""
    fixture = Fixture("file", tmp_path / "tier")
    fixture.fill(_LLAMA)
    fixture.fill(_QWEN)
    return fixture


def test_inspect_shows_the_header_of_a_block(held: Fixture) -> None:
    """The fields follow the format and belong to the requested block."""
    key = held.keys[3]
    done = _kvstore("inspect", "--block", key.hex(), "--json", tier=held.text)
    block = report_of(done)["block"]
    assert (block["key"], block["namespace_digest"]) == (key.hex(), _LLAMA.hex)
    assert (block["plain_bytes"], block["stored_bytes"], block["version"]) == (_SLOT_BYTES, _SLOT_BYTES, 1)
    assert "plain_bytes" in _kvstore("inspect", "--block", key.hex()[:10], tier=held.text).stdout
    assert _kvstore("inspect", "--block", "ffff", tier=held.text).returncode == 2


def test_inspect_names_the_model_of_an_engine(tmp_path: Path) -> None:
    """An engine describes its model by several fields; the row has its name alone, also in JSON."""
    fixture = Fixture("file", tmp_path / "tier")
    fixture.fill(Namespace({"model": {"name": "org/llama", "dtype": "torch.bfloat16", "weights": None}}))
    (row,) = report_of(_kvstore("inspect", "--json", tier=fixture.text))["rows"]
    assert row["model"] == "org/llama"
    assert "dtype" not in _kvstore("inspect", tier=fixture.text).stdout


def test_inspect_prints_a_table_and_the_fields_of_a_namespace(files: Fixture) -> None:
    """The table fits 80 columns without colour; for a single namespace the output also has its fields."""
    done = _kvstore("inspect", tier=files.text)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"llama", "qwen"} <= set(done.stdout.split())
    assert "\x1b" not in done.stdout
    assert max(map(len, (line.rstrip() for line in done.stdout.splitlines()))) <= 80
    report = report_of(_kvstore("inspect", "--json", "--namespace", _QWEN.hex[:12], tier=files.text))
    assert report["fields"] == {"model": "qwen"}
    assert [row["model"] for row in report["rows"]] == ["qwen"]
    unknown = _kvstore("inspect", "--namespace", "0123", tier=files.text)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert _QWEN.hex[:16] in unknown.stderr


def test_namespace_document_with_a_wrong_digest_is_ignored(files: Fixture) -> None:
    """``namespace.json`` is used only if its digest matches the directory's name."""
    (files.root / _QWEN.hex / "namespace.json").write_text('{"fields": {"model": "other"}}')
    rows = report_of(_kvstore("inspect", "--json", tier=files.text))["rows"]
    assert {row["namespace"]: row["model"] for row in rows} == {_LLAMA.hex: "llama", _QWEN.hex: None}


def test_foreign_links_files_and_pipes_are_left_alone(files: Fixture, tmp_path: Path) -> None:
    """Links, files and pipes in place of ours are neither read nor reported nor removed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    planted = [
        files.root / ("a" * 64),
        files.root / _LLAMA.hex / ("a" * 16),
        files.root / _QWEN.hex / "namespace.json",
        files.root / _LLAMA.hex / "000099.seg",
        files.root / _LLAMA.hex / "000098.seg",
    ]
    planted[2].unlink()
    for path in planted[:2]:
        path.symlink_to(outside)
    for path in planted[2:4]:
        path.symlink_to(outside / "secret")
    os.mkfifo(planted[4])
    (files.root / ("b" * 64)).write_text("a file")
    (files.root / _LLAMA.hex / ("b" * 16)).write_text("a file")
    rows = report_of(_kvstore("inspect", "--json", tier=files.text))["rows"]
    assert {row["namespace"]: row["blocks"] for row in rows} == {_LLAMA.hex: _BLOCKS, _QWEN.hex: _BLOCKS}
    assert _kvstore("scrub", tier=files.text).returncode == 0
    assert report_of(_kvstore("gc", "--json", tier=files.text))["rows"] == []
    assert all(path.is_symlink() or path.is_fifo() for path in planted)
    assert [path.name for path in outside.iterdir()] == ["secret"]


@pytest.mark.parametrize(("at", "fault"), [(8, "header"), (40, "header"), (5000, "payload")])
def test_scrub_takes_damaged_blocks_out_of_the_way(files: Fixture, at: int, fault: str) -> None:
    """A dry run only reports; a real run takes the slot out of use. Both exit with status 3."""
    key = files.keys[4]
    files.flip(key, at)
    for dry in (True, False):
        done = _kvstore("scrub", "--json", *(["--dry-run"] if dry else []), tier=files.text)
        report = report_of(done)
        assert (done.returncode, report["blocks"]) == (3, 2 * _BLOCKS)
        (row,) = report["rows"]
        assert (row["key"], row["namespace"], row["fault"]) == (key.hex(), _LLAMA.hex, fault)
        assert report["set_aside"] == (0 if dry else 1)
    assert _kvstore("scrub", tier=files.text).returncode == 0
    assert files.loaded(_LLAMA) == [other for other in files.keys if other != key]
    assert files.loaded(_QWEN) == files.keys


def test_scrub_table_has_the_whole_key_of_a_damaged_block(files: Fixture) -> None:
    """The table has the whole key, so that users can search for it."""
    files.flip(files.keys[0], 9000)
    done = _kvstore("scrub", "--dry-run", tier=files.text)
    assert files.keys[0].hex() in done.stdout
    assert "payload" in done.stdout


@pytest.mark.parametrize("option", ["--dry-run", "--json"])
def test_scrub_of_damage_fails_after_its_reader_closed_the_pipe(files: Fixture, option: str) -> None:
    """``kvstore scrub | head`` exits with a non-zero status if there is damage, even if the reader closes early."""
    files.flip(files.keys[2], 6000)
    command = f'set -o pipefail; {sys.executable} -m kvstore scrub --dry-run {option} --tier "$1" | true'
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command, "-", files.text], env=env, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode in (1, 3)
    assert "Error" not in done.stderr


def test_a_slot_that_was_damaged_is_not_used_again(files: Fixture) -> None:
    """A slot found damaged stays out of use, whatever is stored later, and the segment keeps its length."""
    place = placed(files.root / _LLAMA.hex)[files.keys[5]]
    size_bytes = place.segment.stat().st_size
    files.flip(files.keys[5], 4096 + 77)
    assert _kvstore("scrub", tier=files.text).returncode == 3
    assert place.segment.stat().st_size == size_bytes
    with files.opened(_LLAMA) as (tier, _):
        for number in range(20):
            assert _run(
                tier, TransferJob(number, [b"new-%d-%d" % (number, i) for i in range(12)], range(12)), store=True
            )
    with place.segment.open("rb") as file:
        file.seek(place.offset)
        assert file.read(4096) == bytes(4096)


def test_a_record_of_another_version_is_reported_and_left_alone(files: Fixture) -> None:
    """The record may be a good block of a newer release."""

    def change(page: bytearray) -> None:
        page[8:10] = (99).to_bytes(2, "little")

    files.rewrite(files.keys[1], change)
    done = _kvstore("scrub", "--json", tier=files.text)
    assert done.returncode == 3
    assert [(row["fault"], row["damage"]) for row in report_of(done)["rows"]] == [("version", False)]
    assert files.keys[1] in placed(files.root / _LLAMA.hex)


def test_a_block_that_was_replaced_since_it_was_read_stays(files: Fixture) -> None:
    """An engine may store a good block there between the verdict and the removal."""
    with Medium(files.argument) as holdings:
        (namespace,) = (each for each in holdings.namespaces() if each.hex == _LLAMA.hex)
        block = next(block for block in holdings.blocks(namespace) if block.key == files.keys[0])
        files.flip(block.key, 6000)
        with files.opened(_LLAMA) as (tier, region):
            assert not _run(tier, TransferJob(1, [block.key], [0]), store=False).success
            rows = region.rows()
            rows[0] = files.payloads[0]
            del rows
            assert _run(tier, TransferJob(2, [block.key], [0]), store=True).success
        assert holdings.set_aside(namespace, [block]) == 0
    assert files.loaded(_LLAMA) == files.keys


def test_looking_and_scrubbing_go_on_beside_a_running_engine(held: Fixture) -> None:
    """A namespace in use is reported; its engine misses damaged blocks, and only that engine removes them."""
    held.fill(_QWEN)
    with held.opened(_LLAMA) as (tier, _):
        rows = {row["namespace"]: row for row in report_of(_kvstore("inspect", "--json", tier=held.text))["rows"]}
        assert (rows[_LLAMA.hex]["holder"], rows[_QWEN.hex]["holder"]) == ("engines hold 1 of 1 segments", None)
        held.flip(held.keys[2], 6000)
        done = _kvstore("scrub", "--json", tier=held.text)
        assert (done.returncode, report_of(done)["set_aside"]) == (3, 0)
        result = _run(tier, TransferJob(5, held.keys, range(_BLOCKS)), store=False)
        assert list(result.successful_keys) == [key for key in held.keys if key != held.keys[2]]
        result = _run(tier, TransferJob(6, [held.keys[2]], [2]), store=True)
        assert result.success


def test_block_evicted_during_a_scrub_is_gone_not_damaged(files: Fixture) -> None:
    """A slot reused since it was listed is no longer a block, whatever its content."""
    with Medium(files.argument) as holdings, files.opened(_LLAMA) as (tier, _):
        (namespace,) = (each for each in holdings.namespaces() if each.hex == _LLAMA.hex)
        blocks = list(holdings.blocks(namespace))
        assert sorted(block.key for block in blocks) == files.keys
        for number in range(60):
            keys = [b"new-%d-%d" % (number, i) for i in range(_BLOCKS)]
            _run(tier, TransferJob(number, keys * 5, list(range(_BLOCKS)) * 5), store=True)
            if tier.stats().backend_counters.get("evicted_blocks", 0) > _BLOCKS:
                break
        for block in blocks:
            (record,) = holdings.read(namespace, [block])
            assert (
                record.data is None or bytes(record.data[256:]) == files.payloads[files.keys.index(block.key)].tobytes()
            )


def test_gc_removes_stale_files_and_expired_namespaces(files: Fixture) -> None:
    """Stale files and expired, unused namespaces are removed; a dry run only lists them."""
    stale = [files.root / _LLAMA.hex / "000098.tab.tmp", files.root / _LLAMA.hex / "000099.seg"]
    foreign = [files.root / _LLAMA.hex / "README", files.root / "notes.txt", files.root / ".kvstore" / "mine"]
    for path in (*stale, *foreign):
        path.write_bytes(b"x" * 100)
    wanted = ("gc", "--unused-for", "0.01s", "--keep", _LLAMA.hex[:16], "--json")
    eventually(lambda: time.time() - max(path.stat().st_mtime for path in files.root.rglob("*")) > 0.05)
    report = report_of(_kvstore(*wanted, "--dry-run", tier=files.text))
    assert sorted(Path(row["name"]).name for row in report["rows"] if row["what"] == "stale") == sorted(
        path.name for path in stale
    )
    assert [(row["name"], row["blocks"]) for row in report["rows"] if row["what"] == "namespace"] == [
        (_QWEN.hex, _BLOCKS)
    ]
    assert report["removed"] == {"stale": 0, "namespaces": 0, "blocks": 0}
    assert all(path.exists() for path in stale)
    done = _kvstore(*wanted, tier=files.text)
    assert (done.returncode, report_of(done)["removed"]) == (0, {"stale": 2, "namespaces": 1, "blocks": _BLOCKS})
    assert not any(path.exists() for path in stale)
    assert all(path.exists() for path in foreign)
    assert not (files.root / _QWEN.hex).exists()
    assert files.loaded(_LLAMA) == files.keys


@pytest.mark.parametrize("as_json", [False, True])
def test_names_on_a_medium_are_escaped_for_terminals(files: Fixture, as_json: bool) -> None:
    """Control and bidirectional characters in names are shown as escapes; JSON contains the original names."""
    name = "\x1b]0;owned\x07\x1b[31mRED\x9b\u202e\nremoved: all"
    namespace = Namespace({"model": name})
    files.fill(namespace)
    done = _kvstore("inspect", *(["--json"] if as_json else []), "-n", namespace.hex, tier=files.text)
    assert done.returncode == 0, done.stderr
    assert all(each.isprintable() or each == "\n" for each in done.stdout + done.stderr)
    if as_json:
        assert report_of(done)["rows"][0]["model"] == name
    else:
        assert "\\u001b[31mRED\\u009b\\u202e" in done.stdout.replace("\n", "")


def test_stale_names_cannot_forge_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Text printed as one line stays one line, whatever names it contains."""
    print_line("stale a\nremoved: 0 of stale")
    assert capsys.readouterr().out == "stale a\\nremoved: 0 of stale\n"


def test_errors_are_escaped_for_terminals(tmp_path: Path) -> None:
    """Text from arguments or servers is escaped in errors, too."""
    done = run_here("inspect", "--tier", f"@{tmp_path}/\x1b[2J\x9b")
    assert (done.returncode, "1b[2J" in done.stderr) == (2, True)
    assert done.stderr.rstrip("\n").isprintable(), repr(done.stderr)


def test_gc_keeps_a_namespace_in_use(files: Fixture) -> None:
    """A namespace in use stays, whatever its age, and is reported: its engine does the eviction."""
    with files.opened(_LLAMA), files.opened(_QWEN):
        report = report_of(_kvstore("gc", "--unused-for", "0.001s", "--json", tier=files.text))
    assert set(report["held"]) == {_LLAMA.hex, _QWEN.hex}
    assert report["removed"]["blocks"] == 0
    assert files.loaded(_QWEN) == files.keys


def test_a_namespace_that_an_engine_opens_after_the_plan_keeps_its_fields(files: Fixture) -> None:
    """The engine's blocks and ``namespace.json`` stay; the other namespace is removed."""
    with Medium(files.argument) as holdings:
        plan = make_plan(holdings, unused_for_s=1.0, expire_s=None, now=time.time() + 3600)
        with files.opened(_LLAMA):
            run_plan(holdings, plan)
            assert (files.root / _LLAMA.hex / "namespace.json").exists()
    assert not (files.root / _QWEN.hex).exists()


def test_gc_expires_single_blocks(held: Fixture) -> None:
    """Old blocks are removed, and the others stay."""
    held.date(1e9, count=5)
    report = report_of(_kvstore("gc", "--unused-for", "0", "--expire", "100d", "--json", tier=held.text))
    assert report["removed"] == {"stale": 0, "namespaces": 0, "blocks": 5}
    assert held.loaded(_LLAMA) == held.keys[5:]


def test_gc_expires_nothing_with_0(files: Fixture) -> None:
    """0 means never, as everywhere, however old the blocks are."""
    files.date(1e9)
    report = report_of(_kvstore("gc", "--unused-for", "0", "--expire", "0", "--json", tier=files.text))
    assert (report["rows"], report["removed"]["blocks"]) == ([], 0)
    assert files.loaded(_LLAMA) == files.keys


def test_gc_expires_no_block_of_a_namespace_listed_with_keep(files: Fixture) -> None:
    """Blocks of a namespace listed with --keep never expire; old blocks of other namespaces do."""
    files.date(1e9)
    files.date(1e9, _QWEN)
    wanted = ("gc", "--unused-for", "0", "--expire", "100d", "--keep", _LLAMA.hex[:16], "--json")
    report = report_of(_kvstore(*wanted, tier=files.text))
    assert [(row["what"], row["name"], row["blocks"]) for row in report["rows"]] == [("blocks", _QWEN.hex, _BLOCKS)]
    assert (files.loaded(_LLAMA), files.loaded(_QWEN)) == (files.keys, [])


def test_gc_keeps_namespaces_and_blocks_of_unknown_age(files: Fixture) -> None:
    """A time of zero means unknown: namespaces and blocks with it are kept, and no age is shown."""
    files.date(0)
    files.date(0, _QWEN)
    rows = report_of(_kvstore("inspect", "--json", tier=files.text))["rows"]
    assert [(row["oldest_s"], row["newest_s"], row["unused_s"]) for row in rows] == [(None, None, None)] * 2
    for arguments in (["--expire", "1s"], ["--unused-for", "1s"]):
        report = report_of(_kvstore("gc", *arguments, "--json", tier=files.text))
        assert [row for row in report["rows"] if row["what"] != "stale"] == []
    assert (files.loaded(_LLAMA), files.loaded(_QWEN)) == (files.keys, files.keys)


def test_gc_takes_so_many_blocks_at_once(files: Fixture) -> None:
    """Blocks over the limit of one plan are left to the next plan and reported; the last plan reports none."""
    files.date(1e9)
    files.date(1e9, _QWEN)
    with Medium(parse_tier(files.text)) as holdings:
        for removed, more in ((20, True), (2 * _BLOCKS - 20, False)):
            plan = make_plan(holdings, unused_for_s=None, expire_s=100 * 86400.0, expired_max=20)
            assert (run_plan(holdings, plan)["blocks"], plan.more) == (removed, more)
    assert (files.loaded(_LLAMA), files.loaded(_QWEN)) == ([], [])


@pytest.mark.parametrize("seal", [None, "mac", "aead"])
def test_encoded_and_sealed_blocks_need_no_key_to_be_looked_after(tmp_path: Path, seal: str | None) -> None:
    """Such blocks are verified in their stored form; only the engine with the keys opens them."""
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(new_document())
    codec: list[Any] = ["zstd", *([{seal: {"keys": {"file": str(keys)}}}] if seal else [])]
    here = Fixture("file", tmp_path / "here", codec=codec)
    here.payloads //= 64
    here.fill(_LLAMA)
    keys.rename(tmp_path / "away")
    plain = json.dumps(json.loads(here.text) | {"codec": "raw"})
    done = _kvstore("scrub", "--json", tier=plain)
    report = report_of(done)
    assert (done.returncode, report["blocks"], report["rows"]) == (0, _BLOCKS, [])
    assert report["size_bytes"] < _BLOCKS * _SLOT_BYTES
    (tmp_path / "away").rename(keys)
    assert here.loaded(_LLAMA) == here.keys


def test_a_record_that_claims_a_long_block_does_not_end_a_scrub(files: Fixture) -> None:
    """The block is reported as unreadable, and the blocks beside it are verified."""

    def change(page: bytearray) -> None:
        # The header claims that a codec has compressed the block.
        page[16:24] = (1 << 40).to_bytes(8, "little")
        page[120] = 3

    files.rewrite(files.keys[3], change)
    done = _kvstore("scrub", "--dry-run", "--json", tier=files.text)
    report = report_of(done)
    assert (done.returncode, report["blocks"]) == (3, 2 * _BLOCKS)
    assert [row["fault"] for row in report["rows"]] == ["geometry"]


def test_nothing_is_made_where_there_is_no_tier(tmp_path: Path) -> None:
    """A path without a tier is an error, and is not changed."""
    empty = Fixture("file", tmp_path / "empty")
    for make in (False, True):
        if make:
            empty.root.mkdir()
        with pytest.raises(ConfigError, match="There is no"):
            Medium(empty.argument)
        assert empty.root.exists() is make
    assert not list(empty.root.iterdir())


def test_a_tier_in_memory_can_not_be_listed() -> None:
    """The error gives the reason: a memory tier ends with its engine."""
    with Medium(parse_tier("memory")) as medium, pytest.raises(ConfigError, match="ends with its engine"):
        medium.namespaces()


def test_a_plan_changes_nothing(files: Fixture) -> None:
    """Making a plan removes nothing; only its execution does."""
    with Medium(files.argument) as holdings:
        plan = make_plan(holdings, unused_for_s=1.0, expire_s=None, now=time.time() + 3600)
        assert {namespace.hex for namespace in plan.namespaces} == {_LLAMA.hex, _QWEN.hex}
        plan = make_plan(holdings, unused_for_s=None, expire_s=1.0, now=time.time() + 3600)
        assert sum(len(blocks) for _, blocks in plan.blocks) == 2 * _BLOCKS
        assert scrub(holdings, holdings.namespaces(), dry=True).blocks == 2 * _BLOCKS
    assert isinstance(files.argument, TierArgument)
    assert files.loaded(_LLAMA) == files.keys
