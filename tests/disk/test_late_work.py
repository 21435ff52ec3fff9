"""Work that a frozen disk holds up until after the close: it ends with a named failure, and leaves no file open."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.disk import DiskBackend, DiskConfig
from kvstore.backends.disk.ledger import LedgerBusyError
from kvstore.backends.disk.limits import Limits
from kvstore.config import Capacity
from kvstore.errors import BackendError, BackendUnavailableError
from kvstore.testing.waiting import eventually_async
from tests.disk.rig import GEOMETRY, NAMESPACE, Rig, opened
from tests.diskio.faulty_disk import DiskFault, FaultyDisk


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Return the event that ends a freeze."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
@pytest.mark.parametrize(
    "op", ["pwritev", "preadv", "open", "fallocate", "fdatasync", "rename", "unlink", "statvfs", "flock", "fstat"]
)
async def test_everything_ends_after_a_close(tmp_path: Path, engine: str, op: str, gate: threading.Event) -> None:
    """No call raises another exception than those of its interface, and no task ends with an unnoticed one."""
    disk, unnoticed = FaultyDisk(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unnoticed.append(context))
    async with (
        opened(tmp_path, 16) as other,
        opened(tmp_path, 16, disk=disk, engine=engine, durability="data", limits=Limits(close_s=0.05)) as rig,
    ):
        values = list(await rig.put_new(6))
        theirs = list(await other.put_new(2))
        await rig.session.followers[0].refresh()
        # One of its segments is to be taken, another one to be followed, and the file of a killed engine removed.
        await other.backend.close()
        (tmp_path / ".kvstore" / f"engine.{0:016x}").touch(mode=0o600)
        disk.add(DiskFault(op, stall=gate, forever=True))
        calls = [asyncio.create_task(call) for call in outcomes(rig, values, theirs)]
        work = [asyncio.create_task(call) for call in upkeep(rig)]
        await asyncio.sleep(0)
        await eventually_async(lambda: disk.stalled, what="a call stalls")
        await rig.backend.close()
        # A number that was free before the end of a read or write could be given to another file.
        assert op not in ("preadv", "pwritev") or any(name.endswith(".seg") for name in disk.open_fds.values())
        gate.set()
        disk.heal()
        await asyncio.gather(*calls)
        for error in await asyncio.gather(*work, return_exceptions=True):
            assert error is None or isinstance(error, (OSError, BackendError, LedgerBusyError)), repr(error)
    await eventually_async(lambda: not disk.open_fds, what="all files are closed")
    del error, calls, work
    gc.collect()
    assert unnoticed == []
    async with opened(tmp_path, 16) as rig:
        assert rig.backend.stats().blocks >= 4
        await rig.has_all(await rig.put_new(8))


def outcomes(rig: Rig, values: list[bytes], theirs: list[bytes]) -> list[Any]:
    """Return calls that report failures as outcomes."""
    backend = rig.backend
    reads = [rig.maker.target(key).read for key in values + theirs]
    return [
        rig.put(rig.new(4)), backend.get_into(reads), backend.delete(values[:1]), backend.quarantine(values[1:2]),
        rig.put(rig.new(8)),
    ]  # fmt: skip


def upkeep(rig: Rig) -> list[Any]:
    """Return the duties of upkeep, and calls that may raise."""
    session = rig.session
    rig.backend.note([(b"key", b"note")])
    return [duty() for duty in session.duties(session.roots[0]).values()] + [
        session.followers[0].refresh(), session.notes.settle(), rig.backend.probe(),
    ]  # fmt: skip


async def test_start_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start on a hung disk fails in time, as does the next one; once the disk responds, a start succeeds."""
    disk, gate = FaultyDisk(), threading.Event()
    disk.add(DiskFault("open", stall=gate, forever=True))
    config = DiskConfig(path=str(tmp_path), capacity=Capacity("64MiB"), reserve=Capacity(0))
    backend = DiskBackend(config, disk=disk, limits=Limits(open_s=0.1, close_s=0.1))
    for _ in range(2):
        with pytest.raises(BackendUnavailableError, match="do not answer"):
            await backend.open(NAMESPACE, GEOMETRY)
        await backend.close()
    gate.set()
    assert backend._opening is not None
    await eventually_async(backend._opening.done, what="the first start has ended")

    async def starts() -> bool:
        # A busy machine may take as long as a disk that hangs.
        with contextlib.suppress(BackendUnavailableError):
            await backend.open(NAMESPACE, GEOMETRY)
            return True
        return False

    await eventually_async(starts, what="a start succeeds")
    await backend.probe()
    await backend.close()
    assert disk.open_fds == {}
