"""Blocks on an engine's disk are served to peers, within limits, whatever the state of the disk."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvstore.backends.base import Backend, RecordGeometry, RecordRead
from kvstore.backends.disk import DiskBackend
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.backends.peer.server import BATCH_MAX, StoredRecords
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.config import TierConfig
from kvstore.errors import BackendUnavailableError
from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier, Region
from kvstore.primary.lending import Lender
from kvstore.testing.tier_rig import TierRig
from kvstore.testing.waiting import eventually
from kvstore.tiers import AsyncTier, open_tier
from kvstore.types import LookupResult, Outcome, TransferJob
from tests.peer.ports import free_port

SLOT_BYTES = 65536
SLOTS = 16
NAMESPACE = Namespace({"suite": "stored"})
KEYS = [b"stored-%d" % number for number in range(SLOTS)]


def payload(key: bytes) -> bytes:
    """Return the bytes of a block, as ``TierRig`` expects them."""
    return random.Random(key).randbytes(SLOT_BYTES)


class Engine:
    """An engine with half of its blocks in memory, and all of them on disk."""

    def __init__(self, directory: Path, served: Mapping[str, Any] | None = None, **disk: Any) -> None:
        self.region = Region.create(slots=SLOTS, slot_bytes=SLOT_BYTES)
        self.primary = PrimaryTier(self.region.view(), SLOT_BYTES)
        self.lender = Lender(self.primary)
        self._jobs = 0
        self.address = f"127.0.0.1:{free_port()}"
        self.served = self._open({"backend": "peer", "listen": self.address, "timeout": 5, **(served or {})})
        self.disk = self._open({"backend": "file", "path": str(directory), "capacity": "64MiB", **disk})
        self.fill()

    def fill(self) -> None:
        """Store all blocks on disk, and half of them in memory."""
        for key, slot in zip(KEYS, self.primary.allocate(KEYS) or (), strict=True):
            with self.primary.row(slot) as row:
                row[:] = payload(key)
        self._jobs += 1
        self.disk.submit_store(TransferJob(self._jobs, KEYS, range(SLOTS)))
        assert self.disk.drain(30)
        assert [result.success for result in self.disk.get_finished()] == [True]
        self.primary.commit(KEYS[::2])
        self.primary.abort(KEYS[1::2])
        # Beside an I/O process, they are read by a second backend, which soon finds them.
        eventually(lambda: all(map(self._has_all, self.lender.backends)), 60, "blocks on disk that can be lent")

    def _open(self, options: dict[str, Any]) -> AsyncTier:
        return open_tier(
            options, primary=self.region.view(), slot_bytes=SLOT_BYTES, namespace=NAMESPACE, lender=self.lender
        )

    def begin_epoch(self) -> None:
        """Leave all blocks, as the manager does at a reset, and wait until both tiers have begun another epoch."""
        tiers = self.served, self.disk
        self.primary.clear()
        for tier in tiers:
            tier.begin_epoch()
        eventually(lambda: [tier.get_finished() for tier in tiers] and all(tier.stats().epoch for tier in tiers))

    def _has_all(self, backend: Backend) -> bool:
        stats = backend.stats()
        return stats.blocks + stats.gauges.get("foreign_blocks", 0) == SLOTS

    def close(self) -> None:
        """End it."""
        self.disk.close()
        self.served.close()
        self.primary.close()
        self.region.close()


@pytest.fixture(params=["thread", "process"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with a disk, with its I/O on a thread and in another process."""
    engine = Engine(tmp_path, io=request.param)
    yield engine
    engine.close()


def rig_of(engine: Engine, **options: Any) -> TierRig:
    """Return a rig over a tier that loads from the engine."""
    patient = {"lookup_timeout": 10, "load_timeout": 20, "timeout": 10}
    options = {"backend": "peer", "peers": [engine.address], **patient, **options}
    return TierRig(options, namespace=NAMESPACE, slot_bytes=SLOT_BYTES, slots=SLOTS)


def test_blocks_in_memory_and_on_disk_come_in_one_load(engine: Engine) -> None:
    """A load finds each block in memory or on disk; all bytes are compared; only missing blocks are read from disk."""
    with rig_of(engine) as rig:
        assert [rig.lookup(key) for key in KEYS] == [LookupResult.HIT] * SLOTS
        keys = [*KEYS, b"nobody has it"][-SLOTS:]
        loaded = rig.load(keys)
        assert list(loaded.outcomes) == [Outcome.OK] * (SLOTS - 1) + [Outcome.MISS]
    assert engine.served.drain(10)
    engine.served.get_finished()
    counters = engine.served.stats().backend_counters
    assert counters["served_blocks_from_storage"] == SLOTS // 2


def test_a_damaged_block_is_absent_and_its_engine_is_trusted(engine: Engine, tmp_path: Path) -> None:
    """A block damaged on the disk is not sent, so that the peer keeps requesting the others."""
    damaged = 0
    for path in tmp_path.rglob("*"):
        if path.is_file() and (content := path.read_bytes()).count(payload(KEYS[1])[:64]):
            at = content.index(payload(KEYS[1])[:64])
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(b"rotten")
            damaged += 1
    assert damaged == 1
    with rig_of(engine) as rig:
        assert list(rig.load(KEYS[:4]).outcomes) == [Outcome.OK, Outcome.MISS, Outcome.OK, Outcome.OK]
        assert rig.load(KEYS[2:6]).success


def test_blocks_on_disk_are_lent_while_the_io_process_is_replaced(tmp_path: Path) -> None:
    """Peers load blocks from the disk of an engine whose I/O process was killed, and later those of the next one."""
    engine = Engine(tmp_path, io="process")
    try:
        with rig_of(engine) as rig:
            pid = engine.disk.io_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert rig.load(KEYS).success
            disk = engine.disk
            eventually(lambda: disk.get_finished() or disk.io_pid not in (None, pid), 60, "another I/O process")
            assert rig.load(KEYS).success
    finally:
        engine.close()


def test_the_reader_of_a_disk_follows_its_epoch(tmp_path: Path) -> None:
    """After each change of weights, peers get blocks on disk of the new epoch, and none of the earlier one."""
    file = tmp_path / "epoch"
    file.write_text("step-1")
    epoch = {"epoch": {"file": str(file)}}
    engine = Engine(tmp_path / "kv", epoch, io="process", **epoch)
    try:
        with rig_of(engine, **epoch) as rig:
            assert rig.load(KEYS).success
            for name in ("step-2", "step-3"):
                file.write_text(name)
                engine.begin_epoch()
                assert rig.begin_epoch() == name
                assert set(rig.load(KEYS).outcomes) == {Outcome.MISS}
                engine.fill()
                eventually(lambda: rig.load(KEYS).success, 60, "the blocks of the new epoch")
    finally:
        engine.close()


def test_a_disk_closes_before_the_begin_of_its_epoch_is_received(tmp_path: Path) -> None:
    """An engine may end right after a reset: the answer of its I/O process, received at the end, raises nothing."""
    engine = Engine(tmp_path, io="process")
    names = set(tmp_path.iterdir())
    engine.disk.begin_epoch()
    engine.disk.flush()
    eventually(lambda: set(tmp_path.iterdir()) > names and engine.disk.has_answers, 60, "another epoch")
    engine.close()


def test_the_reader_of_a_disk_follows_its_io_process_into_another_directory(tmp_path: Path) -> None:
    """If another directory has the name of the disk's, peers get the blocks of the next I/O process, which opens it."""
    root = tmp_path / "kv"
    engine = Engine(root, io="process")
    try:
        root.rename(tmp_path / "before")
        pid = engine.disk.io_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: engine.disk.get_finished() or engine.disk.io_pid not in (None, pid), 60, "another process")
        engine.primary.clear()
        engine.fill()
        with rig_of(engine) as rig:
            # Those in the earlier one have served so far.
            for path in (tmp_path / "before").rglob("*.tab"):
                path.unlink()
            eventually(lambda: rig.load(KEYS).success, 60, "the blocks in the new directory")
        assert list((root / ".kvstore").glob("engine.*"))
    finally:
        engine.close()


class Stubborn(MemoryBackend):
    """A reader that neither opens nor, if it is stuck, closes."""

    is_stuck = False

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        raise BackendUnavailableError("no descriptor is left", backend="memory")

    async def close(self) -> None:
        if self.is_stuck:
            await asyncio.sleep(3600)


class BadlyRead(DiskBackend):
    """A disk with such a reader."""

    its_reader: ClassVar[Stubborn]

    def reader(self) -> Stubborn:
        return self.its_reader


def test_a_disk_is_there_without_its_reader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A reader that can't be opened costs the disk nothing; one that does not close may still use the memory."""
    reader = BadlyRead.its_reader = Stubborn(MemoryConfig())
    region = Region.create(slots=SLOTS, slot_bytes=SLOT_BYTES)
    primary = PrimaryTier(region.view(), SLOT_BYTES)
    options = {"backend": f"{__name__}:BadlyRead", "path": str(tmp_path), "capacity": "64MiB", "io": "process"}
    lender = Lender(primary)
    tier = open_tier(options, primary=region.view(), slot_bytes=SLOT_BYTES, namespace=NAMESPACE, lender=lender)
    assert tier.io_pid is not None and lender.backends == [reader]
    reader.is_stuck = True
    tier.close(5)
    assert "did not close in time" in caplog.text
    primary.close()
    region.close()


def test_a_stopped_io_process_takes_no_time_from_the_reader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An I/O process that does not answer is killed at the end of its time, and the reader still closes."""
    engine = Engine(tmp_path, io="process")
    pid = engine.disk.io_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    engine.disk.close(1)
    assert "did not close in time" not in caplog.text
    engine.close()


def test_a_disk_that_is_gone_leaves_memory(engine: Engine) -> None:
    """An engine with a closed disk tier still serves its memory."""
    engine.disk.close()
    with rig_of(engine) as rig:
        assert [rig.lookup(key) for key in KEYS[:4]] == [LookupResult.HIT, LookupResult.MISS] * 2
        assert list(rig.load(KEYS[:2]).outcomes) == [Outcome.OK, Outcome.MISS]


@pytest.mark.parametrize(
    "disk",
    [
        pytest.param({"codec": "zstd:1"}, id="encoded"),
        pytest.param({"namespace": "another"}, id="another-namespace"),
        pytest.param({"epoch": {"file": "/nowhere/epoch"}}, id="an-epoch"),
    ],
)
def test_disk_with_unusable_records_is_not_offered(tmp_path: Path, disk: dict[str, Any]) -> None:
    """If the disk's records are encoded or under other names, only memory is served."""
    engine = Engine(tmp_path, **disk)
    try:
        with rig_of(engine) as rig:
            assert [rig.lookup(key) for key in KEYS[:4]] == [LookupResult.HIT, LookupResult.MISS] * 2
    finally:
        engine.close()


class Hanging(MemoryBackend):
    """A disk that holds every block, and hangs until released."""

    def __init__(self) -> None:
        super().__init__(TierConfig())
        self.released = asyncio.Event()
        self.targets: list[memoryview] = []

    async def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        if keys[0] == b"failing":
            raise BackendUnavailableError("failing", backend="memory")
        if keys[0] == b"hanging":
            await self.released.wait()
        return [True] * len(keys)

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        self.targets += [buffer for read in reads for buffer in read.buffers]
        await self.released.wait()
        codec = RecordCodec(NAMESPACE, header_bytes=HEADER_BYTES)
        for read in reads:
            header, target = read.buffers
            target[:] = payload(read.key)
            codec.encode_header(header, read.key, target)
            read.filled_bytes = HEADER_BYTES + SLOT_BYTES
        return [Outcome.OK] * len(reads)


async def test_a_hanging_disk_keeps_its_buffers_and_nothing_else() -> None:
    """Reads of a hung disk end in time; their buffers are reused only after the disk has finished with them."""
    disk = Hanging()
    backends: list[Backend] = [disk]
    stored = StoredRecords(backends, TierConfig(), NAMESPACE, SLOT_BYTES)
    pool = stored._pool
    count = pool.count
    for number in range(count // BATCH_MAX):
        keys = [b"%d-%d" % (number, place) for place in range(BATCH_MAX)]
        async with stored.reading(keys, 0.001) as records:
            assert records == {}
    assert pool.free_count < BATCH_MAX
    async with stored.reading([b"more"] * BATCH_MAX, 0.001) as records:
        assert records == {}
    assert await stored.find([b"failing"], 30) == set()
    async with asyncio.timeout(30):
        assert await stored.find([b"hanging"], 0.001) == set()
    stored.close()
    disk.released.set()
    async with stored.reading([b"a", b"b"], 30) as records:
        assert {key: bytes(body) for key, (_, body) in records.items()} == {key: payload(key) for key in (b"a", b"b")}
    del records
    assert pool.free_count == count
    disk.targets.clear()
    stored.close()
    assert pool._map.closed
