"""Removals: objects are deleted a thousand at a time, and notes inform other engines."""

from __future__ import annotations

import pytest

from kvstore.backends.s3.client import DELETES_MAX
from kvstore.backends.s3.failures import S3Error
from kvstore.backends.s3.names import KeeperNames
from kvstore.backends.s3.notes import outdated, read_note, remove
from kvstore.types import RemovalCause
from tests.s3.clients import opened_client
from tests.s3.fault_server import Fault, FaultServer
from tests.s3.keepers import engines, names_under, put_empty


async def test_each_request_has_a_note_of_its_own(faults: FaultServer) -> None:
    """Each removed object is in one note with the cause, and the calling engine is notified first."""
    async with engines(faults, 1) as (engine,):
        client, prefix = await opened_client(faults), engine.config.prefix
        there = ["a", "b"]
        await put_empty(engine, [*there, "stays"])
        # The last name of the first request, and the only one of the second; missing objects are not a failure.
        names = [f"{prefix}absent{number}" for number in range(DELETES_MAX - 1)] + [prefix + name for name in there]
        told: dict[str, list[str]] = {}
        await remove(
            client, prefix, names, RemovalCause.EXPIRED, on_gone=lambda some, note: told.update({note: [*some]})
        )
        assert [len(some) for some in told.values()] == [DELETES_MAX, 1]
        notes = [prefix + name for name in await names_under(engine, "_keeper/removed/")]
        assert sorted(notes) == sorted(told)
        assert [note.startswith(KeeperNames(prefix).notes) for note in notes] == [True, True]
        for note in notes:
            body = await client.get_start(note, 1 << 20)
            assert body is not None
            assert read_note(prefix, body) == (told[note], RemovalCause.EXPIRED)
        assert [each for group in told.values() for each in group] == names
        assert [name for name in await names_under(engine, "") if not name.startswith("_keeper/")] == ["stays"]


async def test_refused_removal_note_notifies_the_caller(faults: FaultServer) -> None:
    """If a note is refused, its objects are gone and the caller is notified; later objects are still there."""
    async with engines(faults, 1, tries=1) as (engine,):
        client, prefix = await opened_client(faults, tries=1), engine.config.prefix
        await put_empty(engine, ["first", "late"])
        names = [f"{prefix}first", *(f"{prefix}absent{number}" for number in range(DELETES_MAX - 1)), f"{prefix}late"]
        told: list[str] = []
        faults.plan(Fault.INTERNAL, methods=("PUT",), contains="removed")
        with pytest.raises(S3Error, match="500"):
            await remove(client, prefix, names, RemovalCause.EVICTED, on_gone=lambda some, _: told.extend(some))
        faults.plan(None)
        assert told == names[:DELETES_MAX]
        assert await names_under(engine, "") == ["late"]


async def test_foreign_objects_in_engine_folders_are_kept(faults: FaultServer) -> None:
    """Foreign objects in the engines' folders stay, however old they are."""
    async with engines(faults, 1) as (engine,):
        ours = [f"removed/{'0' * 28}", f"uses/{'a' * 16}"]
        foreign = ["removed/photos/1.jpg", "uses/data.parquet", f"uses/{'A' * 16}"]
        await put_empty(engine, [f"_keeper/{name}" for name in (*ours, *foreign)])
        faults.age(f"{engine.config.prefix}_keeper/", 40 * 86400)
        found = [info.key async for info, _ in outdated(await opened_client(faults), engine.config.prefix)]
        assert sorted(found) == sorted(f"{engine.config.prefix}_keeper/{name}" for name in ours)
