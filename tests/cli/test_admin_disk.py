"""The commands that look after a medium, against disk tiers that really stored what is there."""

from __future__ import annotations

import io
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import AsyncTier, Namespace, RequestContext, TransferJob, open_tier
from kvstore.backends.disk import DiskConfig
from kvstore.backends.disk.layout import decode_descriptor, encode_descriptor
from kvstore.cli.holdings.archive import write_archive
from kvstore.cli.holdings.care import import_archive, open_holdings
from kvstore.cli.holdings.disk import DiskHoldings
from kvstore.cli.tier_argument import parse_tier
from kvstore.codec.checksum import header_checksum
from kvstore.errors import ConfigError, LockedError
from kvstore.primary import Region
from kvstore.testing.waiting import eventually
from kvstore.types import JobResult, LookupResult
from tests.cli.cli import report_of
from tests.cli.in_process import run_here

_SLOT_BYTES = 16384
_BLOCKS = 12
_LLAMA = Namespace({"model": "llama"})
_QWEN = Namespace({"model": "qwen"})


class Fixture:
    """A tier with blocks in it, and what was stored under which key."""

    def __init__(self, backend: str, root: Path, **options: Any) -> None:
        self.root = root
        backend, _, alone = backend.partition("-")
        options |= {"path": str(root), "capacity": "64MiB"} | ({"reserve": 0} if backend != "nvme" else {})
        options |= {"exclusive": True} if alone else {}
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
        """Return the keys that an engine finds, having compared their bytes."""
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

    def slot_of(self, key: bytes, namespace: Namespace = _LLAMA) -> tuple[Path, int]:
        """Return the segment of a block, and where in it its slot begins."""
        for path in (self.root / namespace.hex).rglob("*.seg"):
            content = memoryview(path.read_bytes())
            for at in range(0, len(content), 4096):
                found = decode_descriptor(content[at : at + 4096])
                if found is not None and found.key == key:
                    return path, at
        raise AssertionError(f"no slot holds {key!r}")

    def flip(self, key: bytes, at: int) -> None:
        """Damage a block: its record's header lies at 0, its payload at 4096."""
        path, start = self.slot_of(key)
        with path.open("r+b") as file:
            file.seek(start + at)
            byte = file.read(1)[0]
            file.seek(start + at)
            file.write(bytes([byte ^ 1]))

    def rewrite(self, key: bytes, change: Callable[[bytearray], None], namespace: Namespace = _LLAMA) -> None:
        """Change the header of a block's record, with all checksums right."""
        path, start = self.slot_of(key, namespace)
        with path.open("r+b") as file:
            file.seek(start)
            page = bytearray(file.read(4096))
            change(page)
            page[248:256] = header_checksum(bytes(page[:248])).to_bytes(8, "little")
            found = decode_descriptor(memoryview(bytes(_resealed(page))))
            assert found is not None
            file.seek(start)
            file.write(_resealed(page))

    def date(self, created_s: float, namespace: Namespace = _LLAMA, count: int = _BLOCKS) -> None:
        """Let blocks have been written, and their namespace used, at another time."""

        def change(page: bytearray) -> None:
            page[112:120] = int(created_s * 1e9).to_bytes(8, "little")

        for key in self.keys[:count]:
            self.rewrite(key, change, namespace)
        if count == _BLOCKS:
            for path in (self.root / namespace.hex).rglob("*"):
                os.utime(path, (created_s, created_s))

    @property
    def owner(self) -> Path:
        """The only owner's directory of the first namespace."""
        (found,) = (path for path in (self.root / _LLAMA.hex).iterdir() if path.is_dir())
        return found


def _resealed(page: bytearray) -> bytearray:
    """Return a header page with a right descriptor, whatever its record says now."""
    _, owner, slot, size, key_length, digest, key = struct.unpack_from("<8sQQQH6x32s64s", page, 256)
    made = bytearray(page)
    encode_descriptor(memoryview(made), owner, slot, size, digest, key[:key_length])
    return made


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


@pytest.fixture(params=["disk", "disk-alone"])
def held(request: pytest.FixtureRequest, tmp_path: Path) -> Fixture:
    """A tier of each kind with one namespace in it."""
    fixture = Fixture(request.param, tmp_path / "tier")
    fixture.fill(_LLAMA)
    return fixture


@pytest.fixture
def files(tmp_path: Path) -> Fixture:
    """A file tier with two namespaces in it."""
    fixture = Fixture("disk", tmp_path / "tier")
    fixture.fill(_LLAMA)
    fixture.fill(_QWEN)
    return fixture


def test_inspect_says_what_lies_there(held: Fixture) -> None:
    """Namespaces with their blocks, bytes and ages; nothing is changed by looking."""
    before = sorted(path for path in held.root.rglob("*"))
    done = _kvstore("inspect", "--json", tier=held.text)
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = report_of(done)["rows"]
    assert (row["namespace"], row["blocks"]) == (_LLAMA.hex, _BLOCKS)
    assert row["size_bytes"] >= _BLOCKS * (_SLOT_BYTES + 256)
    assert 0 <= row["newest_s"] <= row["oldest_s"] < 600
    assert row["holder"] is None
    assert sorted(path for path in held.root.rglob("*")) == before
    assert held.loaded(_LLAMA) == held.keys


def test_a_document_that_lies_is_not_believed(files: Fixture) -> None:
    """What namespace.json says counts only if it has the digest that the directory is named for."""
    (files.root / _QWEN.hex / "namespace.json").write_text('{"fields": {"model": "other"}}')
    rows = report_of(_kvstore("inspect", "--json", tier=files.text))["rows"]
    assert {row["namespace"]: row["model"] for row in rows} == {_LLAMA.hex: "llama", _QWEN.hex: None}


def test_what_others_put_there_is_not_followed(files: Fixture, tmp_path: Path) -> None:
    """Links, files and pipes in the place of ours are neither read nor reported, nor removed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    planted = [
        files.root / ("a" * 64),
        files.root / _LLAMA.hex / ("a" * 16),
        files.root / _QWEN.hex / "namespace.json",
        files.owner / "000099.seg",
        files.owner / "000098.seg",
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


def test_scrub_finds_nothing_where_nothing_is_wrong(held: Fixture) -> None:
    """Every record is read and verified, and the status is 0."""
    done = _kvstore("scrub", "--json", tier=held.text)
    report = report_of(done)
    assert (done.returncode, report["blocks"], report["rows"], report["set_aside"]) == (0, _BLOCKS, [], 0)
    assert held.loaded(_LLAMA) == held.keys


@pytest.mark.parametrize(("at", "fault"), [(300, "length"), (40, "length"), (5000, "payload")])
def test_scrub_takes_damaged_blocks_out_of_the_way(files: Fixture, at: int, fault: str) -> None:
    """A dry run only reports; a real one takes the slot out of use, and both end with status 3."""
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


def test_a_slot_that_was_damaged_is_not_used_again(files: Fixture) -> None:
    """What a scrub has found stays out of use, whatever is stored after it; the length of the segment stays, too."""
    path, at = files.slot_of(files.keys[5])
    size_bytes = path.stat().st_size
    files.flip(files.keys[5], 4096 + 77)
    assert _kvstore("scrub", tier=files.text).returncode == 3
    assert path.stat().st_size == size_bytes
    with files.opened(_LLAMA) as (tier, _):
        for number in range(20):
            assert _run(
                tier, TransferJob(number, [b"new-%d-%d" % (number, i) for i in range(12)], range(12)), store=True
            )
    with path.open("rb") as file:
        file.seek(at)
        assert file.read(4096) == bytes(4096)


def test_a_record_of_another_version_is_reported_and_left_alone(files: Fixture) -> None:
    """It may be a good block of a newer release."""

    def change(page: bytearray) -> None:
        page[8:10] = (99).to_bytes(2, "little")

    files.rewrite(files.keys[1], change)
    done = _kvstore("scrub", "--json", tier=files.text)
    assert done.returncode == 3
    assert [(row["fault"], row["damage"]) for row in report_of(done)["rows"]] == [("version", False)]
    assert files.slot_of(files.keys[1])


def test_a_block_that_was_replaced_since_it_was_read_stays(files: Fixture) -> None:
    """Between the verdict and the removal an engine may put a good block there."""
    assert isinstance(files.argument.config, DiskConfig)
    with DiskHoldings(files.argument.config) as holdings:
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
    """A namespace that an engine holds is said to be; it misses what was damaged, which is its own to remove."""
    held.fill(_QWEN)
    with held.opened(_LLAMA) as (tier, _):
        rows = {row["namespace"]: row for row in report_of(_kvstore("inspect", "--json", tier=held.text))["rows"]}
        assert (rows[_LLAMA.hex]["holder"], rows[_QWEN.hex]["holder"]) == ("an engine", None)
        held.flip(held.keys[2], 6000)
        done = _kvstore("scrub", "--json", tier=held.text)
        assert (done.returncode, report_of(done)["set_aside"]) == (3, 0)
        result = _run(tier, TransferJob(5, held.keys, range(_BLOCKS)), store=False)
        assert list(result.successful_keys) == [key for key in held.keys if key != held.keys[2]]
        result = _run(tier, TransferJob(6, [held.keys[2]], [2]), store=True)
        assert result.success


def test_what_an_engine_evicts_during_a_scrub_is_gone_and_not_damaged(files: Fixture) -> None:
    """A slot that has another block since it was listed is no block any more, whatever is in it."""
    assert isinstance(files.argument.config, DiskConfig)
    with DiskHoldings(files.argument.config) as holdings, files.opened(_LLAMA) as (tier, _):
        (namespace,) = (each for each in holdings.namespaces() if each.hex == _LLAMA.hex)
        blocks = list(holdings.blocks(namespace))
        assert sorted(block.key for block in blocks) == files.keys
        for number in range(60):
            keys = [b"new-%d-%d" % (number, i) for i in range(_BLOCKS)]
            _run(tier, TransferJob(number, keys * 5, list(range(_BLOCKS)) * 5), store=True)
            if tier.stats().backend_counters.get("evicted_blocks", 0) > _BLOCKS:
                break
        for block in blocks:
            record = holdings.read(namespace, block)
            assert record is None or bytes(record[256:]) == files.payloads[files.keys.index(block.key)].tobytes()


def test_gc_removes_what_is_unused_and_what_the_dead_left(files: Fixture) -> None:
    """Litter, and namespaces that are too old and that nobody holds or wants kept; a dry run only says so."""
    litter = [files.owner / "index.tmp", files.owner / "000099.seg"]
    foreign = [files.owner / "README", files.root / "notes.txt", files.root / ".kvstore" / "mine"]
    for path in (*litter, *foreign):
        path.write_bytes(b"x" * 100)
    wanted = ("gc", "--unused-for", "0.01s", "--keep", _LLAMA.hex[:16], "--json")
    eventually(lambda: time.time() - max(path.stat().st_mtime for path in files.root.rglob("*")) > 0.05)
    report = report_of(_kvstore(*wanted, "--dry-run", tier=files.text))
    assert sorted(Path(row["name"]).name for row in report["rows"] if row["what"] == "litter") == sorted(
        path.name for path in litter
    )
    assert [(row["name"], row["blocks"]) for row in report["rows"] if row["what"] == "namespace"] == [
        (_QWEN.hex, _BLOCKS)
    ]
    assert report["removed"] == {"litter": 0, "namespaces": 0, "blocks": 0}
    assert all(path.exists() for path in litter)
    done = _kvstore(*wanted, tier=files.text)
    assert (done.returncode, report_of(done)["removed"]) == (0, {"litter": 2, "namespaces": 1, "blocks": _BLOCKS})
    assert not any(path.exists() for path in litter)
    assert all(path.exists() for path in foreign)
    assert not (files.root / _QWEN.hex).exists()
    assert files.loaded(_LLAMA) == files.keys


def test_gc_leaves_alone_what_an_engine_holds(files: Fixture) -> None:
    """However old: its engine evicts for itself. It is reported."""
    with files.opened(_LLAMA), files.opened(_QWEN):
        report = report_of(_kvstore("gc", "--unused-for", "0.001s", "--json", tier=files.text))
    assert set(report["held"]) == {_LLAMA.hex, _QWEN.hex}
    assert report["removed"]["blocks"] == 0
    assert files.loaded(_QWEN) == files.keys


def test_gc_expires_single_blocks(held: Fixture) -> None:
    """Blocks that were written long ago go, and the others stay."""
    held.date(1e9, count=5)
    report = report_of(_kvstore("gc", "--unused-for", "0", "--expire", "100d", "--json", tier=held.text))
    assert report["removed"] == {"litter": 0, "namespaces": 0, "blocks": 5}
    assert held.loaded(_LLAMA) == held.keys[5:]


def test_gc_leaves_what_nobody_knows_the_age_of(files: Fixture) -> None:
    """A time of zero is none: neither blocks nor namespaces go by it, and no age is shown."""
    files.date(0)
    files.date(0, _QWEN)
    rows = report_of(_kvstore("inspect", "--json", tier=files.text))["rows"]
    assert [(row["oldest_s"], row["newest_s"], row["unused_s"]) for row in rows] == [(None, None, None)] * 2
    for arguments in (["--expire", "1s"], ["--unused-for", "1s"]):
        report = report_of(_kvstore("gc", *arguments, "--json", tier=files.text))
        assert [row for row in report["rows"] if row["what"] != "litter"] == []
    assert (files.loaded(_LLAMA), files.loaded(_QWEN)) == (files.keys, files.keys)


@pytest.mark.parametrize(("source", "target"), [("disk", "disk"), ("disk", "nvme"), ("file", "disk")])
def test_blocks_move_between_media(tmp_path: Path, source: str, target: str) -> None:
    """What is exported from one tier is found by an engine in another, whatever the two lie on."""
    here, there = Fixture(source, tmp_path / "here"), Fixture(target, tmp_path / "there")
    here.fill(_LLAMA)
    here.fill(_QWEN)
    archive = str(tmp_path / "blocks.tar")
    done = _kvstore("export", archive, "--namespace", _LLAMA.hex, "--json", tier=here.text)
    assert (done.returncode, report_of(done)["blocks"]) == (0, _BLOCKS)
    dry = report_of(_kvstore("import", archive, "--dry-run", "--json", tier=there.text))
    assert dry["outcomes"] == {"intact": _BLOCKS}
    assert not there.root.exists()
    done = _kvstore("import", archive, "--json", tier=there.text)
    assert (done.returncode, report_of(done)["outcomes"]) == (0, {"ok": _BLOCKS})
    assert (there.loaded(_LLAMA), there.loaded(_QWEN)) == (there.keys, [])
    again = report_of(_kvstore("import", archive, "--json", tier=there.text))
    assert again["outcomes"] == {"exists": _BLOCKS}
    if source == target == "disk":
        assert (there.root / _LLAMA.hex / "namespace.json").read_text() == (
            here.root / _LLAMA.hex / "namespace.json"
        ).read_text()


def _archive(files: Fixture) -> bytes:
    out = io.BytesIO()
    with open_holdings(files.argument) as holdings:
        write_archive(holdings, holdings.namespaces(), out)
    return out.getvalue()


def test_an_import_waits_for_no_engine_that_does_not_share(files: Fixture, tmp_path: Path) -> None:
    """The error says what to do; into a directory that engines share it is imported beside them."""
    data = _archive(files)
    alone = Fixture("disk-alone", tmp_path / "alone")
    with alone.opened(_LLAMA), pytest.raises(LockedError, match="another engine uses it"):
        import_archive(alone.argument.with_options(lock_timeout="50ms"), io.BytesIO(data), dry=False)
    there = Fixture("disk", tmp_path / "there")
    with there.opened(_LLAMA) as (tier, _):
        assert import_archive(there.argument, io.BytesIO(data), dry=False).is_whole
        eventually(lambda: all(_answer(tier, key) is LookupResult.HIT for key in there.keys))


@pytest.mark.parametrize("backend", ["disk"])
def test_nothing_is_made_where_there_is_no_tier(tmp_path: Path, backend: str) -> None:
    """Looking at a path that holds no tier is an error, and leaves it as it is."""
    empty = Fixture(backend, tmp_path / "empty")
    for make in (False, True):
        if make:
            empty.root.mkdir()
        with pytest.raises(ConfigError, match="There is no"):
            open_holdings(empty.argument)
        assert empty.root.exists() is make
    assert not list(empty.root.iterdir())
