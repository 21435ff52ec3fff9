"""Write order: a slot is reused only after the journal has recorded the removal of its old block."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.backends.disk.layout import FRAME_BYTES, RECORD, Kind, decode_descriptor
from kvstore.backends.disk.records import SlotWrite
from kvstore.diskio import OsDisk
from kvstore.types import BlockKey, Outcome
from tests.disk.rig import SLOT, opened, room_for

PATIENCE_S = 0.05
"""Time that a frame waits for a premature write of a slot."""


class OrderedDisk(OsDisk):
    """The real disk, checking each write against the journal written so far; for one engine on threads.

    A frame waits a moment for a write that should have waited for the frame.
    """

    def __init__(self, *, durable: bool) -> None:
        self.wrong: list[str] = []  # Writes that came too early.
        # Blocks by file and offset of their slots, according to the frames written.
        self.told: dict[tuple[int, int], BlockKey] = {}
        self.frames = 0
        self._durable = durable
        self._written: dict[tuple[int, int], BlockKey] = {}
        self._unsynced: dict[int, set[int]] = {}
        self._lock = threading.Lock()
        self._slot_write = threading.Event()

    def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name.endswith(".seg"):
            return self._write_slots(int(name[:6]), fd, buffers, offset)
        if name.startswith("journal.") and offset:
            return self._write_frame(fd, buffers, offset)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        super().fdatasync(fd)
        if name.endswith(".seg"):
            with self._lock:
                self._unsynced.pop(int(name[:6]), None)

    def _write_slots(self, segment: int, fd: int, buffers: Sequence[Any], offset: int) -> int:
        places: dict[tuple[int, int], BlockKey] = {}
        at = offset
        for buffer in buffers:
            header = decode_descriptor(memoryview(buffer)) if len(buffer) == 4096 and at % SLOT == 0 else None
            if header is not None:
                places[segment, at // SLOT] = header.key
            at += len(buffer)
        with self._lock:
            for place, key in places.items():
                if self.told.get(place, key) != key:
                    self.wrong.append(f"slot {place} was given away before the journal said so")
            self._unsynced.setdefault(segment, set()).update(slot for _, slot in places)
        if places:
            self._slot_write.set()
        done = super().pwritev(fd, buffers, offset)
        with self._lock:
            self._written |= places
        return done

    def _write_frame(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        records = np.frombuffer(b"".join(map(bytes, buffers))[FRAME_BYTES:], RECORD)
        slots = room_for(16) // SLOT // 16
        rows = [
            (int(row["kind"]), divmod(int(row["slot"]), slots), bytes(row["key"])[: row["key_length"]])
            for row in records
        ]
        with self._lock:
            for kind, place, key in rows:
                if kind == Kind.ADD and self._written.get(place) != key:
                    self.wrong.append(f"slot {place} was announced before it was written")
                if kind == Kind.ADD and self._durable and place[1] in self._unsynced.get(place[0], ()):
                    self.wrong.append(f"slot {place} was announced before it was synced")
        self._slot_write.clear()
        if any(kind == Kind.REMOVE for kind, *_ in rows):
            self._slot_write.wait(PATIENCE_S)
        done = super().pwritev(fd, buffers, offset)
        with self._lock:
            self.frames += 1
            for kind, place, key in rows:
                if kind == Kind.ADD:
                    self.told[place] = key
                elif kind == Kind.REMOVE:
                    self.told.pop(place, None)
        return done


@pytest.mark.parametrize("durability", ["none", "data"])
async def test_slots_are_reused_after_the_journal_records_the_removal(tmp_path: Path, durability: str) -> None:
    """In stores, evictions and removals, the journal records a removal before the slot is written."""
    disk = OrderedDisk(durable=durability == "data")
    async with opened(tmp_path, room_for(16), disk=disk, engine="threads", durability=durability) as rig:
        values: dict[BlockKey, bytes] = {}
        for round_ in range(14):
            new = rig.new(4)
            await rig.put(new)
            values |= new
            if round_ % 4 == 3:
                await rig.backend.delete(list(new)[:2])
        assert len(rig.removed) > 16
        assert disk.wrong == []
        assert disk.frames > 20
        held = [key for key, there in zip(values, await rig.backend.exists(list(values)), strict=True) if there]
        assert sorted(held) == sorted(disk.told.values())


async def test_a_block_is_announced_after_its_write_has_ended(tmp_path: Path) -> None:
    """While a slot is being written, neither its owner nor another engine finds the block."""
    async with opened(tmp_path, room_for(16)) as one, opened(tmp_path, room_for(16)) as two:
        late, other = one.new(1), one.new(1)
        engine, write, found = one.session.engine, one.session.engine.write, []

        async def write_after_another_put(transfers: Any, *args: Any) -> None:
            if isinstance(transfers[0], SlotWrite):
                engine.write = write  # type: ignore[method-assign]
                # Frames are written in order: a premature one of the late block would precede this one.
                assert await one.put(other) == [Outcome.OK]
                await two.session.followers.refresh()
                found.extend([await rig.backend.exists([*late, *other]) for rig in (one, two)])
            await write(transfers, *args)

        engine.write = write_after_another_put  # type: ignore[method-assign]
        assert await one.put(late) == [Outcome.OK]
        assert found == [[False, True], [False, True]]
        await two.session.followers.refresh()
        await two.has_all(late | other)
