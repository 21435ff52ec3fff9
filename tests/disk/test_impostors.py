"""Intact files of another owner or an earlier time: their records do not count, and none of them is delivered."""

from __future__ import annotations

import os
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.backends.disk import journal as journal_module
from kvstore.backends.disk.files import open_regular
from kvstore.backends.disk.layout import (
    FORMAT,
    FRAME_BYTES,
    JOURNAL_HEADER_BYTES,
    RECORD,
    Geometry,
    Kind,
    Row,
    decode_descriptor,
    decode_journal_header,
    encode_descriptor,
    encode_frame,
    encode_journal_header,
    read_frames,
    records_of,
)
from kvstore.diskio import OsDisk
from kvstore.testing.seeds import fresh_seed
from kvstore.testing.waiting import eventually_async
from kvstore.types import KEY_BYTES_MAX, BlockKey, Outcome
from tests.disk.filled_root import FRAME, filled, home, journal, proved
from tests.disk.rig import GEOMETRY, NAMESPACE, OTHER_NAMESPACE, PAYLOAD, clone, opened, room_for
from tests.sizes import sized

LENGTH_AT = 256 + 24
"""Offset of the record's length in a slot's page."""


async def test_a_damaged_head_of_a_journal(tmp_path: Path) -> None:
    """Each bit of the header counts: a journal with a damaged one is ignored, and all blocks are found in slots."""
    rng = random.Random(seed := fresh_seed())
    values = await filled(tmp_path / "a", 6)
    for bit in rng.sample(range(JOURNAL_HEADER_BYTES * 8), sized(8, full=40)):
        copy = clone(tmp_path / "a", tmp_path / f"b{bit}")
        content = bytearray(journal(copy).read_bytes())
        content[bit // 8] ^= 1 << bit % 8
        journal(copy).write_bytes(content)
        async with opened(copy, "64MiB") as rig:
            assert await proved(rig, values) == 6, (seed, bit)
            await rig.put_new(1)
        shutil.rmtree(copy)


async def test_a_damaged_frame(tmp_path: Path) -> None:
    """Each bit of a frame counts: a damaged frame ends its journal, and the other blocks are found in the slots."""
    rng = random.Random(seed := fresh_seed())
    values = await filled(tmp_path / "a", 6)
    size = journal(tmp_path / "a").stat().st_size
    # The fields of a record that name the key and its place; the rest of its 88 bytes is padding.
    places = [at for at in range(size - 4 * FRAME, size) if (at - size) % FRAME in (*range(20), *range(24, 36), 48, 60)]
    for at in rng.sample(places, 16):
        copy = clone(tmp_path / "a", tmp_path / f"b{at}")
        content = bytearray(journal(copy).read_bytes())
        content[at] ^= 1 << rng.randrange(8)
        journal(copy).write_bytes(content)
        async with opened(copy, "64MiB") as rig:
            assert await proved(rig, values) == 6, (seed, at)
        shutil.rmtree(copy)


async def test_frames_of_an_older_journal(tmp_path: Path) -> None:
    """Frames of an owner's previous journal after those of its current one are ignored, even with matching numbers."""
    async with opened(tmp_path / "a", "64MiB") as rig:
        values: dict[BlockKey, bytes] = {}
        for _ in range(8):
            values |= await rig.put_new(1)
        old = journal(tmp_path / "a").read_bytes()
    async with opened(tmp_path / "a", "64MiB") as rig:
        await rig.backend.delete(list(values))
        copy = clone(tmp_path / "a", tmp_path / "b")
    new = journal(copy).read_bytes()
    count = len(frames_of(new))
    assert 0 < count < len(frames_of(old)) - 4
    journal(copy).write_bytes(new + b"".join(frames_of(old)[count:]))
    async with opened(copy, "64MiB") as rig:
        await rig.session.recovered.wait()
        assert await rig.scanned() == set()
        assert await rig.backend.exists(list(values)) == [False] * 8


def frames_of(content: bytes) -> list[bytes]:
    """Split a journal into its frames."""
    frames, at = [], JOURNAL_HEADER_BYTES
    while at < len(content):
        length = FRAME_BYTES + int.from_bytes(content[at + 4 : at + 8], "little") * RECORD.itemsize
        frames.append(content[at : at + length])
        at += length
    return frames


async def test_frames_that_changed_places_bring_nothing_back(tmp_path: Path) -> None:
    """A frame that removes a block is never read before the frame that adds it."""
    async with opened(tmp_path / "a", "64MiB") as rig:
        await rig.put_new(1)
        (key,) = await rig.put_new(1)
        await rig.backend.delete([key])
        copy = clone(tmp_path / "a", tmp_path / "b")
    content = bytearray(journal(copy).read_bytes())
    marks = [at for at in range(JOURNAL_HEADER_BYTES, len(content) - FRAME + 1) if content[at:].startswith(b"Kfrm")]
    added, removed = [at for at in marks if key in content[at : at + FRAME]]
    content[added : added + FRAME], content[removed : removed + FRAME] = (
        content[removed : removed + FRAME],
        content[added : added + FRAME],
    )
    journal(copy).write_bytes(content)
    async with opened(copy, "64MiB") as rig:
        await rig.session.recovered.wait()
        assert await rig.backend.exists([key]) == [False]


async def test_another_owners_journal(tmp_path: Path) -> None:
    """An intact journal of another owner, in place of an owner's own, is ignored for its slots."""
    values, strange = await filled(tmp_path / "a", 6), await filled(tmp_path / "b", 9)
    shutil.copy(journal(tmp_path / "b"), journal(tmp_path / "a"))
    async with opened(tmp_path / "a", "64MiB") as rig:
        assert await proved(rig, values) == 6
        assert await rig.backend.exists(list(strange)) == [False] * 9


async def test_a_journal_of_a_later_format(tmp_path: Path) -> None:
    """The journal is ignored, as its records may have another meaning; all blocks are found in the slots."""
    values = await filled(tmp_path / "a", 6)
    content = bytearray(journal(tmp_path / "a").read_bytes())
    struct.pack_into("<I", content, 8, FORMAT + 1)
    checked = JOURNAL_HEADER_BYTES - 8
    struct.pack_into("<Q", content, checked, xxhash.xxh3_64_intdigest(content[:checked]))
    journal(tmp_path / "a").write_bytes(content)
    async with opened(tmp_path / "a", "64MiB") as rig:
        assert not rig.session.owner.intact
        assert await proved(rig, values) == 6


@pytest.mark.parametrize(
    "geometry",
    [(0, 4, 1), (4096, 4, 1), (12288 + 512, 4, 1), (12288, 0, 1), (12288, 4, 0), (1 << 30, 1 << 11, 1)],
)
def test_geometry_out_of_range_is_refused(geometry: tuple[int, int, int]) -> None:
    """Sizes out of range are refused even if the checksum of the journal's header is right."""
    good = Geometry(12288, 4, 1)
    assert decode_journal_header(encode_journal_header(1, 5, good, bytes(32)), 1, 5, bytes(32)) == good
    bad = encode_journal_header(1, 5, Geometry(*geometry), bytes(32))
    assert decode_journal_header(bad, 1, 5, bytes(32)) is None


async def test_a_segment_of_another_length(tmp_path: Path) -> None:
    """A segment that was truncated while it had no owner is forgotten at the next start, with its blocks."""
    values = await filled(tmp_path / "a", 3)
    (segment,) = (tmp_path / "a").rglob("*.seg")
    os.truncate(segment, 4096 + PAYLOAD)
    async with opened(tmp_path / "a", "64MiB") as rig:
        assert await rig.backend.exists(list(values)) == [False] * 3
        await rig.has_all(await rig.put_new(3))


async def test_a_segment_of_another_length_without_a_journal(tmp_path: Path) -> None:
    """A truncated segment that no journal names is not scanned: its file would end within a slot."""
    await filled(tmp_path / "a", 3)
    (segment,) = (tmp_path / "a").rglob("*.seg")
    os.truncate(segment, 2 * (4096 + PAYLOAD))
    os.truncate(journal(tmp_path / "a"), 5)
    async with opened(tmp_path / "a", "64MiB") as rig:
        await rig.session.recovered.wait()
        assert await rig.scanned() == set()
        await rig.has_all(await rig.put_new(3))


async def test_a_link_in_the_place_of_an_owners_directory(tmp_path: Path) -> None:
    """The link is not followed, whatever its target."""
    values = await filled(tmp_path / "a", 3)
    owner = home(tmp_path / "a")
    shutil.move(owner, tmp_path / "elsewhere")
    owner.symlink_to(tmp_path / "elsewhere")
    async with opened(tmp_path / "a", "64MiB") as rig:
        assert rig.session.owner.name != owner.name
        assert await rig.backend.exists(list(values)) == [False] * 3


async def test_slots_of_another_namespace(tmp_path: Path) -> None:
    """A segment of another model with blocks of the same keys, in place of ours, is not delivered."""
    payloads: dict[BlockKey, bytes] = {}
    for namespace in (NAMESPACE, OTHER_NAMESPACE):
        async with opened(tmp_path / namespace.hex[:4], "64MiB", namespace=namespace) as rig:
            payloads = payloads or rig.new(6)
            for key in payloads:
                assert await rig.put({key: rig.maker.payload()}) == [Outcome.OK]
    (ours,) = (tmp_path / NAMESPACE.hex[:4]).rglob("*.seg")
    (theirs,) = (tmp_path / OTHER_NAMESPACE.hex[:4]).rglob("*.seg")
    shutil.copy(theirs, ours)
    async with opened(tmp_path / NAMESPACE.hex[:4], "64MiB") as rig:
        assert await rig.get(list(payloads)) == [None] * 6
        assert len(rig.removed) == 6, "they are known to be lost, not handed to the tier to find out"


async def test_a_directory_that_was_copied_to_another_namespace(tmp_path: Path) -> None:
    """Its blocks are unknown there, although owner and slots are the same."""
    values = await filled(tmp_path / "a", 6)
    root = tmp_path / "a"
    shutil.copytree(home(root), root / OTHER_NAMESPACE.hex / home(root).name)
    (root / OTHER_NAMESPACE.hex).chmod(0o700)
    async with opened(root, "64MiB", namespace=OTHER_NAMESPACE) as rig:
        await rig.session.recovered.wait()
        assert await rig.scanned() == set()
        assert await rig.backend.exists(list(values)) == [False] * 6
        await rig.put_new(2)


async def test_a_length_that_is_not_the_records(tmp_path: Path) -> None:
    """A slot's page with a length other than the record's is damaged: another engine and a scan both refuse it."""
    values = await filled(tmp_path / "a", 8)
    (segment,) = (tmp_path / "a").rglob("*.seg")
    content = bytearray(segment.read_bytes())
    for slot in range(8):
        content[slot * (4096 + PAYLOAD) + LENGTH_AT + slot % 2] ^= 1 << slot % 7
    segment.write_bytes(content)
    scanned = clone(tmp_path / "a", tmp_path / "b")
    os.truncate(journal(scanned), 5)
    async with opened(scanned, "64MiB") as rig:
        await rig.session.recovered.wait()
        assert await rig.scanned() == set()
    # The owner knows the lengths from its journal; the reader does not.
    async with opened(tmp_path / "a", "64MiB") as one, opened(tmp_path / "a", "64MiB") as two:
        assert await one.backend.exists(list(values)) == [True] * 8
        assert await two.backend.exists(list(values)) == [True] * 8
        assert await two.get(list(values)) == [None] * 8


async def test_a_scan_takes_no_length_beyond_a_slot(tmp_path: Path) -> None:
    """An intact page whose record would reach into the next slot names no block."""
    values = await filled(tmp_path / "a", 3)
    (segment,) = (tmp_path / "a").rglob("*.seg")
    page = memoryview(bytearray(segment.read_bytes()[: 4096 + PAYLOAD]))
    found = decode_descriptor(page)
    assert found is not None
    encode_descriptor(page, found.owner, found.slot, 4096 + PAYLOAD + 1, found.namespace_digest, found.key)
    with segment.open("r+b") as file:
        file.write(page)
    os.truncate(journal(tmp_path / "a"), 5)
    async with opened(tmp_path / "a", "64MiB") as rig:
        await rig.session.recovered.wait()
        assert await rig.scanned() == set(values) - {found.key}


async def test_a_description_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    """A sparse file in place of namespace.json takes no memory and does not prevent a start."""
    values = await filled(tmp_path / "a", 3)
    os.truncate(tmp_path / "a" / NAMESPACE.hex / "namespace.json", 1 << 40)
    async with opened(tmp_path / "a", "64MiB") as rig:
        await rig.has_all(values)


@pytest.mark.parametrize("name", ["journal", "index", "segment", "lock"])
async def test_files_of_another_user(tmp_path: Path, name: str) -> None:
    """Files of another user are neither read nor written, wherever they are."""
    values = await filled(tmp_path / "a", 5)
    root = tmp_path / "a"
    path = {
        "journal": journal(root),
        "index": home(root) / "index",
        "segment": home(root) / "000000.seg",
        "lock": home(root) / "lock",
    }[name]
    path.touch()
    os.chown(path, 1000, 1000)
    before = path.read_bytes()
    async with opened(root, "64MiB") as rig:
        found = [payload for payload in await rig.get(list(values)) if payload is not None]
        assert found == [] if name in ("journal", "segment") else found in ([], list(values.values()))
        await rig.put_new(3)
    assert not path.exists() or path.stat().st_uid != 1000 or path.read_bytes() == before


async def test_another_engines_block_that_is_longer_than_its_target(tmp_path: Path) -> None:
    """The record is refused, and no byte is written outside the target."""
    async with opened(tmp_path, "64MiB") as one, opened(tmp_path, "64MiB") as two:
        values = await one.put_new(2)
        await eventually_async(lambda: len(two.arrived) == 2, what="the other engine is told")
        for rig in (one, two):
            for size in (0, 100, 4096, GEOMETRY.payload_bytes_max - 1):
                targets = [rig.maker.target(key, size) for key in values]
                outcomes = await rig.backend.get_into([target.read for target in targets])
                assert outcomes == [Outcome.CORRUPT] * 2, size
                assert all(target.guards_intact for target in targets)
        await two.has_all(values)


@pytest.mark.parametrize(
    "row",
    [(Kind.ADD, 1, 5000, 77, b"k"), (Kind.SEGMENT, 0, 255, 0, b""), (Kind.SEGMENT, 0, 1 << 31, 0, b"")],
    ids=["key", "path", "far path"],
)
def test_a_record_out_of_range_ends_a_journal(row: Row) -> None:
    """A record out of range ends the journal like damage, even if the checksum of its frame is right."""
    records = bytearray(records_of([row]))
    if row[0] == Kind.ADD:
        np.frombuffer(records, RECORD)["key_length"] = KEY_BYTES_MAX + 1
    good = encode_frame(records_of([(Kind.SEGMENT, 0, 1, 0, b"")]), 1, 5, 1)
    frames = read_frames(memoryview(good + encode_frame(bytes(records), 2, 5, 1) + good), 5, 1, 1)
    assert (frames.size_bytes, frames.sequence, len(frames.records)) == (len(good), 2, 1)


async def test_a_forged_segment_takes_no_memory(tmp_path: Path) -> None:
    """An intact frame that creates a segment of the highest number takes no room in the index unless files prove it."""
    values = await filled(tmp_path / "a", 6)
    path = journal(tmp_path / "a")
    highest = 0xFFFFFFFF
    forged = records_of([(Kind.SEGMENT, highest, 0, 0, b""), (Kind.ADD, highest, 4096, 1, b"x" * 36)])
    owner = int(home(tmp_path / "a").name, 16)
    sequence = read_frames(memoryview(path.read_bytes())[JOURNAL_HEADER_BYTES:], owner, 1, 1).sequence
    with path.open("ab") as file:
        file.write(encode_frame(forged, sequence, owner, 1))
    slots_max = 1 << 20
    async with opened(tmp_path / "a", "64MiB") as rig, opened(tmp_path / "a", "64MiB") as other:
        assert rig.session.owner.intact
        assert await proved(rig, values) == 6
        assert len(rig.session.index.columns.size) <= slots_max
        (columns,) = await other.session.followers.scan()
        assert len(columns.size) <= slots_max
        await other.has_all(values)


async def test_a_segment_beyond_the_first_million_slots_is_proved_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When slots have to be proved, slots of existing segments count and those of deleted segments do not."""
    monkeypatch.setattr(journal_module, "_SLOTS_UNPROVEN_MAX", 1)
    async with opened(tmp_path / "a", room_for(68)) as rig:
        values = await rig.put_new(64)
        clone(tmp_path / "a", tmp_path / "b")
    async with opened(tmp_path / "b", room_for(68)) as rig:
        await rig.has_all(values)
    (tmp_path / "b" / NAMESPACE.hex / home(tmp_path / "b").name / "000015.seg").unlink()
    async with opened(tmp_path / "b", room_for(68)) as rig:
        assert rig.backend.stats().blocks == 60


def test_a_fifo_is_no_file(tmp_path: Path) -> None:
    """Any path that can be opened but is not a regular file is refused."""
    os.mkfifo(tmp_path / "index")
    here = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(PermissionError, match="not a regular file"):
        open_regular(OsDisk(), "index", os.O_RDWR, here)
    os.close(here)


def test_a_frame_is_read_in_its_own_place_only() -> None:
    """A frame is read up to the last byte; one with another number, or of another journal or owner, ends the read."""
    frame = encode_frame(records_of([(Kind.SEGMENT, 0, 1, 0, b"")]), 3, 5, 7)
    assert len(read_frames(memoryview(frame), 5, 7, 3).records) == 1
    assert len(read_frames(memoryview(frame)[:-1], 5, 7, 3).records) == 0
    # In each pair, sequence number, journal and owner alone differ.
    for owner, journal_number, sequence in ((5, 7, 2), (5, 7, 4), (5, 8, 3), (5, 6, 3), (6, 7, 3)):
        assert len(read_frames(memoryview(frame), owner, journal_number, sequence).records) == 0


def test_the_header_of_another_journal_is_refused() -> None:
    """A journal under the name of another one is not read, nor is one of another owner or namespace."""
    geometry, digest = Geometry(8192, 4, 2), bytes(32)
    header = encode_journal_header(7, 5, geometry, digest)
    assert decode_journal_header(header, 7, 5, digest) == geometry
    for number, owner, namespace in ((8, 5, digest), (7, 6, digest), (7, 5, bytes(31) + b"x")):
        assert decode_journal_header(header, number, owner, namespace) is None
