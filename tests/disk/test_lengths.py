"""Records of several lengths: short ones take short slots, and segments follow what is stored."""

from __future__ import annotations

import random
from pathlib import Path

from kvstore.backends.base import RecordGeometry
from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.backends.disk.limits import LIMITS, Limits
from kvstore.codec.record import HEADER_BYTES
from kvstore.config import Capacity
from kvstore.diskio import OsDisk
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import NAMESPACE, NoRows, Rig, head_of, segment_bytes, tables

PAYLOAD = 64 << 10
WHOLE = 4096 + PAYLOAD
SLOTS = 256
"""Capacity in whole slots: sixteen segments."""


async def opened_rig(
    path: Path, limits: Limits = LIMITS, disk: OsDisk | None = None, payload_bytes: int = PAYLOAD
) -> Rig:
    """Return an open backend."""
    config = DiskConfig(path=str(path), capacity=Capacity(SLOTS * WHOLE), reserve=Capacity(0), engine="threads")
    backend = DiskBackend(config, limits=limits, disk=disk)
    rig = Rig(backend, random.Random(1), NAMESPACE)
    await backend.open(NAMESPACE, RecordGeometry(HEADER_BYTES, payload_bytes))
    return rig


async def store(rig: Rig, sizes: list[int]) -> dict[BlockKey, bytes]:
    """Store a new block of each length; return those that were stored."""
    values = {rig.maker.key(): rig.maker.payload(size) for size in sizes}
    outcomes = await rig.put(values)
    return {key: value for (key, value), outcome in zip(values.items(), outcomes, strict=True) if outcome is Outcome.OK}


async def fill(rig: Rig, size: int, count: int) -> None:
    """Store blocks of one length."""
    for _ in range(count // 16):
        assert await store(rig, [size] * 16)


async def test_short_records_take_less_room(tmp_path: Path) -> None:
    """A root holds a quarter more records of three quarters of a block than whole ones, and thrice as many quarters."""
    for number, (size, expected) in enumerate(
        [(PAYLOAD, SLOTS), (PAYLOAD * 3 // 4, SLOTS * 5 // 4), (PAYLOAD // 4, SLOTS * 3)]
    ):
        rig = await opened_rig(tmp_path / str(number))
        try:
            await fill(rig, size, 4 * SLOTS)
            assert rig.backend.stats().blocks >= expected * 0.95
            assert segment_bytes(tmp_path / str(number)) <= SLOTS * WHOLE
        finally:
            await rig.backend.close()


async def test_records_of_all_lengths_are_loaded(tmp_path: Path) -> None:
    """Records of any length are loaded, also after a restart, and a batch may mix them."""
    rig = await opened_rig(tmp_path)
    sizes = [
        1,
        4096,
        PAYLOAD // 4,
        PAYLOAD // 4 + 1,
        PAYLOAD // 2,
        PAYLOAD // 2 + 1,
        PAYLOAD * 3 // 4,
        PAYLOAD - 1,
        PAYLOAD,
    ]
    values = await store(rig, sizes)
    assert len(values) == len(sizes)

    async def are_loaded() -> bool:
        targets = [rig.maker.target(key, len(value)) for key, value in values.items()]
        outcomes = await rig.backend.get_into([target.read for target in targets])
        assert outcomes == [Outcome.OK] * len(values)
        return [rig.maker.content(target) for target in targets] == list(values.values())

    assert await are_loaded()
    assert len({head_of(table).slot_bytes for table in tables(tmp_path)}) == 4
    await rig.backend.close()
    rig = await opened_rig(tmp_path)
    assert await are_loaded()
    await rig.backend.close()


async def test_segments_follow_the_lengths_that_are_stored(tmp_path: Path) -> None:
    """After a change of the codec, in either direction, segments get slots of the length that is needed now."""
    rig = await opened_rig(tmp_path, Limits(ask_again_s=0.0))
    try:
        await fill(rig, PAYLOAD // 4, 4 * SLOTS)
        for size, expected in ((PAYLOAD, SLOTS), (PAYLOAD // 4, SLOTS * 2)):
            for _ in range(60):
                await fill(rig, size, 64)
            of_length = [head_of(table) for table in tables(tmp_path)]
            held = sum(head.slots for head in of_length if head.slot_bytes == 4096 + size)
            assert held >= expected * 0.7, (size, [(head.slots, head.slot_bytes) for head in of_length])
            assert segment_bytes(tmp_path) <= SLOTS * WHOLE
    finally:
        await rig.backend.close()


async def test_slots_for_longer_blocks_of_an_earlier_run_are_used(tmp_path: Path) -> None:
    """After a start with shorter blocks under the same namespace, stores evict, and blocks are found."""
    rig = await opened_rig(tmp_path)
    await fill(rig, PAYLOAD, 2 * SLOTS)
    await rig.backend.close()
    rig = await opened_rig(tmp_path, payload_bytes=PAYLOAD // 8)
    try:
        values = await store(rig, [PAYLOAD // 8] * 64)
        assert len(values) == 64
        await rig.has_all(values)
    finally:
        await rig.backend.close()


async def test_failed_eviction_returns_the_slots_of_other_lengths(tmp_path: Path) -> None:
    """A put whose short records get no slot, because rows can't be written, keeps none for its long ones either."""
    disk = NoRows()
    rig = await opened_rig(tmp_path, disk=disk)
    try:
        await fill(rig, PAYLOAD, 2 * SLOTS)
        free = int(rig.backend.stats().gauges["free_slots"])
        disk.fails = True
        for _ in range(3):
            assert not await store(rig, [PAYLOAD] * free + [PAYLOAD // 4] * 4)
        assert rig.backend.stats().gauges["free_slots"] == free
    finally:
        await rig.backend.close()
