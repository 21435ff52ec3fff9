"""Work that a frozen disk holds up until after the close: it ends with a named failure, and leaves no file open."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.disk import records as records_module
from kvstore.backends.disk.root import LedgerBusyError
from kvstore.errors import BackendError
from kvstore.testing.waiting import eventually_async
from tests.disk.rig import SLOT, Rig, opened, room_for
from tests.diskio.faulty_disk import DiskFault, FaultyDisk

pytestmark = pytest.mark.parametrize("engine", ["threads", "io_uring"])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return the event that ends a freeze."""
    monkeypatch.setattr("kvstore.backends.disk.backend._CLOSE_TIMEOUT_S", 0.05)
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("op", ["pwritev", "preadv", "open", "fallocate", "fdatasync", "unlink", "statvfs"])
async def test_everything_ends_after_a_close(tmp_path: Path, engine: str, op: str, gate: threading.Event) -> None:
    """No call raises another exception than those of its interface, and no task ends with an unnoticed one."""
    disk, unnoticed = FaultyDisk(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unnoticed.append(context))
    async with opened(tmp_path, room_for(16), disk=disk, engine=engine, durability="data") as rig:
        values = list(await rig.put_new(8))
        disk.add(DiskFault(op, stall=gate, forever=True))
        calls = [asyncio.create_task(call) for call in outcomes(rig, values)]
        work = [asyncio.create_task(call) for call in upkeep(rig)]
        await eventually_async(lambda: disk.stalled, what="a call stalls")
        await rig.backend.close()
        gate.set()
        disk.heal()
        await asyncio.gather(*calls)
        for error in await asyncio.gather(*work, return_exceptions=True):
            assert error is None or isinstance(error, (OSError, BackendError, LedgerBusyError)), repr(error)
    await eventually_async(lambda: not disk.open_fds, what="all files are closed")
    del error, calls, work
    gc.collect()
    assert unnoticed == []


def outcomes(rig: Rig, values: list[bytes]) -> list[Any]:
    """Return calls that report failures as outcomes."""
    backend = rig.backend
    reads = [rig.maker.target(key).read for key in values]
    return [
        rig.put(rig.new(4)), backend.get_into(reads), backend.delete(values[:1]), backend.quarantine(values[1:2]),
        rig.put(rig.new(8)),
    ]  # fmt: skip


def upkeep(rig: Rig) -> list[Any]:
    """Return duties of upkeep, and calls that may raise."""
    session = rig.session
    return [
        session._write_snapshot(), session.space.match_files(), session.space.give_up_excess(),
        session.followers.refresh(), rig.backend.probe(),
    ]  # fmt: skip


@pytest.mark.parametrize("flush", [1, 2], ids=["of the new journal", "of the last frame"])
async def test_a_new_journal_is_closed(tmp_path: Path, engine: str, flush: int, gate: threading.Event) -> None:
    """A journal that was created for a snapshot does not stay open."""
    disk = FaultyDisk()
    async with opened(tmp_path, room_for(16), disk=disk, engine=engine, durability="data") as rig:
        await rig.put_new(1)
        disk.add(DiskFault("fdatasync", flush, stall=gate, forever=True))
        writing = asyncio.create_task(rig.session._write_snapshot())
        await eventually_async(lambda: disk.stalled, what="the flush stalls")
        await rig.backend.close()
    gate.set()
    await writing
    await eventually_async(lambda: not disk.open_fds, what="all files are closed")


async def test_a_block_quarantined_before_its_load_begins(
    tmp_path: Path, engine: str, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load reads one slot at most, although the slot was retired while the segment was being opened."""
    disk = FaultyDisk()
    async with opened(tmp_path, room_for(16), disk=disk, engine=engine) as rig:
        values = await rig.put_new(1)
        rig.session.segments.close()
        disk.add(DiskFault("open", stall=gate))
        loading = asyncio.create_task(rig.get(list(values)))
        await eventually_async(lambda: disk.stalled, what="the segment is being opened")
        sizes: list[int] = []
        make = records_module.aligned_buffer
        monkeypatch.setattr(records_module, "aligned_buffer", lambda size: (sizes.append(size), make(SLOT))[1])
        await rig.backend.quarantine(list(values))
        gate.set()
        assert await loading in ([None], list(values.values()))
        assert max(sizes, default=0) <= SLOT
