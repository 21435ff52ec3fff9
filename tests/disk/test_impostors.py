"""Intact files of another segment, namespace, user or time: their records do not count, and none of them is loaded."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.backends.disk.files import open_regular
from kvstore.backends.disk.layout import FORMAT, PAGE, encode_head
from kvstore.backends.disk.ledger import LedgerBusyError, ledger_held
from kvstore.diskio import OsDisk
from kvstore.errors import ConfigError
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import (
    GEOMETRY,
    NAMESPACE,
    OTHER_NAMESPACE,
    SLOT,
    clone,
    filled,
    head_of,
    opened,
    proved,
    segment_bytes,
    tables,
)
from tests.sizes import sized

HEAD_BYTES = 72
"""Length of a head with its checksum."""


def overwrite(path: Path, content: bytes, offset: int = 0) -> None:
    """Overwrite the bytes of a file at an offset."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


async def test_a_damaged_head_costs_its_segment_alone(tmp_path: Path) -> None:
    """Each bit counts, and so does the format: the blocks of the segment are misses, and its room is used again."""
    rng = random.Random(seed := fresh_seed())
    values = await filled(tmp_path / "a", 20)
    head = encode_head(head_of(tables(tmp_path / "a")[1]))
    bits = rng.sample(range(HEAD_BYTES * 8), sized(4, full=40))
    later = bytearray(head)
    struct.pack_into("<I", later, 8, FORMAT + 1)
    for number, change in enumerate([*bits, bytes(PAGE), bytes(later)]):
        copy = clone(tmp_path / "a", tmp_path / str(number))
        damaged = bytearray(head)
        if isinstance(change, int):
            damaged[change // 8] ^= 1 << change % 8
        overwrite(tables(copy)[1], damaged if isinstance(change, int) else change)
        async with opened(copy, 64) as rig:
            assert await proved(rig, values) == 16, (seed, change)
            # The last slots stay free: without any, some blocks are evicted ahead of need.
            for count in (*[4] * 11, 1):
                await rig.put_new(count)
            assert rig.removed == []
            assert segment_bytes(copy) == rig.backend.stats().gauges["segment_bytes"] == 64 * SLOT, (seed, change)


async def test_an_earlier_table_brings_nothing_back(tmp_path: Path) -> None:
    """With the table of an earlier time, blocks that were removed since are misses, also in slots that were reused."""
    async with opened(tmp_path, 128) as rig:
        values = await rig.put_new(8)
        (table,) = tables(tmp_path)
        old = table.read_bytes()
        gone = list(values)[:4]
        await rig.backend.delete(gone)
        await rig.put_new(2)
    table.write_bytes(old)
    async with opened(tmp_path, 128) as rig:
        assert await rig.get(list(values)) == [None] * 4 + list(values.values())[4:]
        assert {key for key, _ in rig.removed} == set(gone)
        await rig.has_all(await rig.put_new(8))


@pytest.mark.parametrize("ending", [".tab", ".seg"])
async def test_files_of_another_segment(tmp_path: Path, ending: str) -> None:
    """If two tables, or two segments, change places, no block is loaded, and all slots are used again."""
    values = await filled(tmp_path, 8)
    first, second = (table.with_suffix(ending) for table in tables(tmp_path))
    first.rename(tmp_path / "first")
    second.rename(first)
    (tmp_path / "first").rename(second)
    async with opened(tmp_path, 64) as rig:
        assert await rig.get(list(values)) == [None] * 8
        assert len(rig.removed) == 8, "they are known to be lost, not handed to the tier to find out"
        assert await rig.put(values) == [Outcome.OK] * 8
        await rig.has_all(values)
        assert segment_bytes(tmp_path) == 8 * SLOT


async def test_slots_of_another_namespace(tmp_path: Path) -> None:
    """A segment of another model with blocks of the same keys, in place of ours, is not delivered."""
    payloads: dict[BlockKey, bytes] = {}
    for namespace in (NAMESPACE, OTHER_NAMESPACE):
        async with opened(tmp_path, 128, namespace=namespace) as rig:
            payloads = payloads or rig.new(6)
            for key in payloads:
                assert await rig.put({key: rig.maker.payload()}) == [Outcome.OK]
    shutil.copy(tmp_path / OTHER_NAMESPACE.hex / "000000.seg", tmp_path / NAMESPACE.hex / "000000.seg")
    async with opened(tmp_path, 128) as rig:
        assert await rig.get(list(payloads)) == [None] * 6
        assert len(rig.removed) == 6


async def test_a_directory_that_was_copied_to_another_namespace(tmp_path: Path) -> None:
    """Its blocks are unknown there, although tables and slots are intact, and its room is used again."""
    values = await filled(tmp_path, 32)
    shutil.copytree(tmp_path / NAMESPACE.hex, tmp_path / OTHER_NAMESPACE.hex)
    async with opened(tmp_path, 64, namespace=OTHER_NAMESPACE) as rig:
        assert await rig.scanned() == set()
        assert await rig.backend.exists(list(values)) == [False] * 32
        for _ in range(16):
            await rig.put_new(4)
        assert segment_bytes(tmp_path) == 64 * SLOT


async def test_a_link_in_the_place_of_a_namespace(tmp_path: Path) -> None:
    """The link is not followed, whatever its target: the engine names it, and those of other models ignore it."""
    await filled(tmp_path / "a", 3)
    ours = tmp_path / "a" / NAMESPACE.hex
    ours.rename(tmp_path / "elsewhere")
    ours.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"{NAMESPACE.hex}.*not a directory of this user"):
        async with opened(tmp_path / "a", 64):
            pass
    async with opened(tmp_path / "a", 64, namespace=OTHER_NAMESPACE) as rig:
        for _ in range(16):
            await rig.put_new(4)
    assert segment_bytes(tmp_path / "elsewhere") == 4 * SLOT


async def test_a_description_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    """A sparse file in place of namespace.json takes no memory and does not prevent a start."""
    values = await filled(tmp_path, 3)
    os.truncate(tmp_path / NAMESPACE.hex / "namespace.json", 1 << 40)
    async with opened(tmp_path, 64) as rig:
        await rig.has_all(values)


@pytest.mark.parametrize("ending", [".tab", ".seg", ".use", ".notes"])
async def test_files_of_another_user(tmp_path: Path, ending: str) -> None:
    """Files of another user are neither read nor changed, and cost only what they stand for."""
    values = await filled(tmp_path, 4)
    (table,) = tables(tmp_path)
    path = table.with_suffix(ending)
    path.touch()
    os.chown(path, 1000, 1000)
    before = path.read_bytes()
    async with opened(tmp_path, 64) as rig:
        assert await proved(rig, values) == (0 if ending in (".tab", ".seg") else 4)
        rig.backend.note([(key, b"note") for key in values])
        await rig.has_all(await rig.put_new(3))
    assert path.read_bytes() == before


async def test_another_engines_block_that_is_longer_than_its_target(tmp_path: Path) -> None:
    """The record is refused, and no byte is written outside the target."""
    async with opened(tmp_path, 64) as one, opened(tmp_path, 64) as two:
        values = await one.put_new(2)
        await eventually_async(lambda: len(two.arrived) == 2, what="the other engine is told")
        for rig in (one, two):
            for size in (0, 100, 4096, GEOMETRY.payload_bytes_max - 1):
                targets = [rig.maker.target(key, size) for key in values]
                outcomes = await rig.backend.get_into([target.read for target in targets])
                assert outcomes == [Outcome.CORRUPT] * 2, size
                assert all(target.guards_intact for target in targets)
        await two.has_all(values)


def make_fifo(path: Path) -> None:
    """Make a FIFO."""
    os.mkfifo(path)


def make_link(path: Path) -> None:
    """Make a second name of a file."""
    path.with_name("other").touch()
    os.link(path.with_name("other"), path)


@pytest.mark.parametrize("make", [make_fifo, make_link])
def test_a_fifo_is_no_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Any path that can be opened but is not a regular file with one name is refused."""
    make(tmp_path / "000000.seg")
    here = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(PermissionError, match="not a regular file"):
        open_regular(OsDisk(), "000000.seg", os.O_RDWR, here)
    os.close(here)


class Renames(OsDisk):
    """A disk where another process replaces a file between its opening and the first lock on it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def flock(self, fd: int, operation: int) -> None:
        if not self.path.with_name("old").exists():
            self.path.rename(self.path.with_name("old"))
            self.path.touch()
        super().flock(fd, operation)


def test_lock_on_a_replaced_file_counts_as_no_lock(tmp_path: Path) -> None:
    """Only a lock on the file that has the name now excludes other processes, so that one is locked."""
    path = tmp_path / "ledger.lock"
    here = os.open(tmp_path, os.O_RDONLY)
    with ledger_held(Renames(path), here), pytest.raises(LedgerBusyError), ledger_held(OsDisk(), here, 0.0):
        pass
    os.close(here)
