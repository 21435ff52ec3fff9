"""Removals: objects go a thousand at once, and engines are told by notes."""

from __future__ import annotations

import pytest

from kvstore.backends.s3.client import DELETES_MAX
from kvstore.backends.s3.failures import S3Error
from kvstore.backends.s3.names import KeeperNames
from kvstore.backends.s3.notes import outdated, read_note, remove
from kvstore.types import RemovalCause
from tests.s3.fault_server import Fault, FaultServer
from tests.s3.test_keeper import engines, names_under, put_empty


async def test_each_request_has_a_note_of_its_own(faults: FaultServer) -> None:
    """However many objects leave, each is named by one note with the cause, and whoever asked hears of it first."""
    async with engines(faults, 1) as (engine,):
        client, prefix = engine._ready(), engine.config.prefix
        there = ["a", "b"]
        await put_empty(engine, [*there, "stays"])
        # The last of the first request, and the only one of the second; the rest is not there, which is no failure.
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


async def test_who_can_not_tell_others_knows_itself(faults: FaultServer) -> None:
    """When a note is refused, its objects are gone and whoever asked knows; those behind them are there still."""
    async with engines(faults, 1, tries=1) as (engine,):
        prefix = engine.config.prefix
        await put_empty(engine, ["first", "late"])
        names = [f"{prefix}first", *(f"{prefix}absent{number}" for number in range(DELETES_MAX - 1)), f"{prefix}late"]
        told: list[str] = []
        faults.plan(Fault.INTERNAL, methods=("PUT",), contains="removed")
        with pytest.raises(S3Error, match="500"):
            await remove(
                engine._ready(), prefix, names, RemovalCause.EVICTED, on_gone=lambda some, _: told.extend(some)
            )
        faults.plan(None)
        assert told == names[:DELETES_MAX]
        assert await names_under(engine, "") == ["late"]


async def test_only_what_engines_name_is_outdated(faults: FaultServer) -> None:
    """Objects that somebody else put into the folders of engines stay, however old they are."""
    async with engines(faults, 1) as (engine,):
        ours = [f"removed/{'0' * 28}", f"uses/{'a' * 16}", f"presence/{'b' * 64}"]
        foreign = ["removed/photos/1.jpg", "uses/data.parquet", f"presence/{'b' * 64}.bak", f"uses/{'A' * 16}"]
        await put_empty(engine, [f"_keeper/{name}" for name in (*ours, *foreign)])
        faults.age(f"{engine.config.prefix}_keeper/", 40 * 86400)
        found = [info.key async for info, _ in outdated(engine._ready(), engine.config.prefix)]
        assert sorted(found) == sorted(f"{engine.config.prefix}_keeper/{name}" for name in ours)
