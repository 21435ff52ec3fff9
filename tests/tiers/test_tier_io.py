"""The I/O half alone: the order in which messages and epoch changes reach the medium; deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvstore.backends.base import RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.memory import MemoryBackend, MemoryConfig
from kvstore.config import EpochConfig, decode_config
from kvstore.errors import BackendError
from kvstore.namespace import Namespace
from kvstore.runtime.messages import (
    AskExistence,
    BeginEpoch,
    Delete,
    Drain,
    Drained,
    EpochBegun,
    ExistsDone,
    FromIO,
    JobDone,
    JobKind,
    PresenceAdded,
    PresenceComplete,
    PresenceRemoved,
    SubmitJob,
)
from kvstore.testing.waiting import eventually_async
from kvstore.tiers.epochs import EpochNames
from kvstore.tiers.tier_io import TierIO, TierIOSpec
from kvstore.types import BlockKey, Outcome, RemovalCause

SLOT = 4096
TURNS = 100
"""Turns of the loop: far more than an epoch change needs if nothing blocks it."""


class Recorder(MemoryBackend):
    """Records its calls, and blocks puts and openings until the test allows them."""

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__(config)
        self.calls: list[str] = []
        self.may_put, self.may_open, self.may_answer = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_put.set()
        self.may_open.set()
        self.failures = 0
        """The number of openings that will fail."""

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Record the call, and wait."""
        self.calls.append(f"open {namespace.document()['fields'].get('epoch', '')}")
        await self.may_open.wait()
        if self.failures:
            self.failures -= 1
            raise BackendError("the medium is away", backend=self.name)
        await super().open(namespace, geometry)

    async def close(self) -> None:
        """Record the call."""
        self.calls.append("close")
        await super().close()

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Record the start and the end; the call ends only when cancelled."""
        self.calls.append("exists")
        try:
            await self.may_answer.wait()
        finally:
            self.calls.append("exists ended")
        return await super().exists(keys)

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        """Record the call."""
        self.calls.append("get")
        return await super().get_into(reads)

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        """Record the start and the end."""
        self.calls.append("put")
        await self.may_put.wait()
        outcomes = await super().put(writes)
        self.calls.append("put ended")
        return outcomes


@asynccontextmanager
async def opened(
    failures: int = 0, medium: type[Recorder] = Recorder
) -> AsyncIterator[tuple[TierIO, Recorder, list[FromIO]]]:
    """Open an I/O half; yield it, its backend, and its messages. The first openings of the medium may fail."""
    options = {"breaker_cooldown": "1ms", "required": not failures}
    backend, said = medium(decode_config(MemoryConfig, options, where="test")), list[FromIO]()
    backend.failures = failures
    with memoryview(bytearray(8 * SLOT)) as primary:
        spec = TierIOSpec(backend, backend.config, Namespace({"model": "m"}), primary, SLOT)
        half = TierIO(spec, said.append)
        await half.open()
        await turns()
        try:
            yield half, backend, said
        finally:
            await half.close()


async def turns() -> None:
    """Run everything that is not blocked."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


def kinds(said: Sequence[FromIO]) -> list[type[FromIO]]:
    """Return the types of the answers to jobs and requests, in order."""
    return [type(message) for message in said if isinstance(message, JobDone | EpochBegun | PresenceComplete)]


async def test_an_epoch_does_not_change_under_a_store() -> None:
    """The medium stays open in its namespace until all earlier jobs have ended and been answered."""
    async with opened() as (half, backend, said):
        backend.may_put.clear()
        backend.calls.clear()
        said.clear()
        store = SubmitJob(1, JobKind.STORE, (b"a", b"b"), (0, 1), time.monotonic() + 60)
        half.deliver([store, BeginEpoch(1, "e1")])
        await turns()
        assert backend.calls == ["put"], "the epoch changed while a store was under way"
        backend.may_put.set()
        await turns()
        assert backend.calls == ["put", "put ended", "close", "open e1"]
        assert kinds(said) == [JobDone, EpochBegun, PresenceComplete]


class Evicting(Recorder):
    """Evicts a block during the call that stores it."""

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        outcomes = await super().put(writes)
        assert list(await self.delete([b"a"])) == [True]
        self._removal_listener([b"a"], RemovalCause.EVICTED)
        return outcomes


async def test_a_block_evicted_before_its_put_has_ended_is_not_reported() -> None:
    """The removal is reported first, so a later report of the store would make an absent block present."""
    async with opened(medium=Evicting) as (half, backend, said):
        backend.may_answer.set()
        said.clear()
        half.deliver([SubmitJob(1, JobKind.STORE, (b"a", b"b"), (0, 1), time.monotonic() + 60), Drain(1)])
        async with asyncio.timeout(30):
            while Drained(1) not in said:
                await asyncio.sleep(0.001)
        assert PresenceRemoved((b"a",), RemovalCause.EVICTED) in said
        assert [message.keys for message in said if isinstance(message, PresenceAdded)] == [(b"b",)]


async def test_a_question_ends_at_its_deadline() -> None:
    """The medium's call is cancelled, and the answer is an error, which does not count as absence."""
    async with opened() as (half, backend, said):
        half.deliver([AskExistence(1, (b"a",), time.monotonic() + 0.05)])
        async with asyncio.timeout(30):
            while not (answers := [message for message in said if isinstance(message, ExistsDone)]):
                await asyncio.sleep(0.01)
        assert answers[0].found == b"" and "deadline" in answers[0].error
        assert backend.calls[-1] == "exists ended"


async def test_a_job_ends_at_its_deadline() -> None:
    """A store without an answer from the medium is cancelled and reported at its deadline."""
    async with opened() as (half, backend, said):
        backend.may_put.clear()
        said.clear()
        half.deliver([SubmitJob(1, JobKind.STORE, (b"a", b"b"), (0, 1), time.monotonic() + 0.05)])
        async with asyncio.timeout(30):
            while JobDone not in kinds(said):
                await asyncio.sleep(0.01)
        (done,) = [message for message in said if isinstance(message, JobDone)]
        assert done.outcomes == bytes([Outcome.TIMEOUT] * 2)
        assert "deadline" in done.error and "put ended" not in backend.calls


async def test_a_reset_while_an_epoch_changes_is_the_one_that_counts() -> None:
    """After two resets in a row the first epoch gets no answer, and the second does."""
    async with opened() as (half, backend, said):
        backend.may_open.clear()
        backend.calls.clear()
        said.clear()
        half.deliver([BeginEpoch(1, "e1")])
        await turns()
        half.deliver([BeginEpoch(2, "e2")])
        backend.may_open.set()
        await turns()
        assert backend.calls == ["close", "open e1", "close", "open e2"]
        assert [message for message in said if isinstance(message, EpochBegun)] == [EpochBegun(2, "e2")]
        assert kinds(said) == [EpochBegun, PresenceComplete], "blocks of an epoch that was left at once are told"


async def test_a_question_ends_with_its_epoch() -> None:
    """Queries about the ending epoch are cancelled before the medium closes."""
    async with opened() as (half, backend, said):
        half.deliver([AskExistence(1, (b"a",), time.monotonic() + 60)])
        await turns()
        backend.calls.clear()
        half.deliver([BeginEpoch(1, "e1")])
        await turns()
        assert backend.calls == ["exists ended", "close", "open e1"]
        assert not any(isinstance(message, ExistsDone) for message in said)


async def test_an_epoch_begins_when_its_medium_is_open() -> None:
    """If the medium refuses, it is opened again under the same name; until then the epoch has not begun."""
    async with opened() as (half, backend, said):
        backend.failures = 2
        backend.calls.clear()
        half.deliver([BeginEpoch(1, "e1")])
        async with asyncio.timeout(60):
            while not any(isinstance(message, EpochBegun) for message in said):
                await asyncio.sleep(0.001)
        assert [call for call in backend.calls if call != "close"] == ["open e1"] * 3
        assert half._opened


async def test_a_medium_that_refuses_is_closed_before_it_is_opened_again() -> None:
    """Each failed opening is followed by a close, so no connection or file is left; time alone leads to the next."""
    async with opened(failures=2) as (_, backend, _):
        await eventually_async(lambda: backend.calls.count("open ") == 3)
        assert backend.calls == ["open ", "close", "open ", "close", "open "]


class Unreadable(Recorder):
    """Its scan fails after the first block."""

    async def scan_keys(self) -> AsyncIterator[Sequence[BlockKey]]:
        yield [b"a"]
        raise BackendError("unreadable", backend=self.name)


@pytest.mark.parametrize(("medium", "is_whole"), [(Recorder, True), (Unreadable, False)])
async def test_a_scan_that_fails_is_not_authoritative(medium: type[Recorder], is_whole: bool) -> None:
    """The medium is queried for blocks that the scan did not reach; after a complete scan they are misses."""
    async with opened(medium=medium) as (_, _, said):
        (complete,) = [message for message in said if isinstance(message, PresenceComplete)]
        assert complete.authoritative is is_whole


async def test_a_damaged_block_is_reported_after_its_quarantine() -> None:
    """The quarantine precedes the report; otherwise a new record of the block might be quarantined."""
    gate = asyncio.Event()

    class Quarantining(Recorder):
        async def quarantine(self, keys: Sequence[BlockKey]) -> None:
            await gate.wait()

    async with opened(medium=Quarantining) as (half, backend, said):
        await backend.put([RecordWrite(b"a", [memoryview(bytes(backend.alignment + SLOT))])])
        said.clear()
        half.deliver([SubmitJob(1, JobKind.LOAD, (b"a",), (0,), time.monotonic() + 60)])
        await turns()
        assert kinds(said) == []
        gate.set()
        await turns()
        assert [type(each) for each in said if isinstance(each, PresenceRemoved | JobDone)] == [
            PresenceRemoved,
            JobDone,
        ]


async def test_closing_the_tier_does_not_cancel_a_close_of_its_medium() -> None:
    """A started close of the medium is completed, because a half-closed medium may stay locked."""
    gate, ends = asyncio.Event(), list[str]()

    class Closing(Recorder):
        async def close(self) -> None:
            try:
                await gate.wait()
            except asyncio.CancelledError:
                ends.append("cancelled")
                raise
            await super().close()
            ends.append("closed")

    async with opened(medium=Closing) as (half, _, _):
        half.deliver([BeginEpoch(1, "e1")])
        await turns()
        closing = asyncio.create_task(half.close())
        await turns()
        gate.set()
        await closing
    assert ends == ["closed", "closed"]


async def test_an_epoch_is_left_for_another_one_unless_it_is_unused(tmp_path: Path) -> None:
    """Without a fleet an unused name is used again, but only in its own epoch; with a fleet never."""
    alone = EpochNames(None)
    first = await alone.after("", None)
    assert await alone.after(first, None) == first
    assert await alone.after("another", None) not in (first, "another")
    (tmp_path / "name").write_text("v1")
    fleet = EpochNames(EpochConfig(file=str(tmp_path / "name")))
    assert await fleet.after("", None) == "v1"
    (tmp_path / "name").write_text("v2")
    assert await fleet.after("v1", None) == "v2"


async def test_a_load_starts_before_the_stores_of_its_step_and_a_drain_waits_for_both() -> None:
    """A waiting request needs the load first; a drain covers all jobs of its step, at any position."""
    async with opened() as (half, backend, said):
        backend.calls.clear()
        said.clear()
        deadline = time.monotonic() + 60
        store = SubmitJob(1, JobKind.STORE, (b"a",), (0,), deadline)
        half.deliver([Drain(1), store, SubmitJob(2, JobKind.LOAD, (b"b",), (1,), deadline)])
        await turns()
        # A missed block is queried again after the report, because a store may have ended since.
        assert [call for call in backend.calls if call != "exists"] == ["get", "put", "put ended"]
        answers = [type(message) for message in said if isinstance(message, JobDone | Drained)]
        assert answers == [JobDone, JobDone, Drained]


async def test_a_block_removed_during_its_store_is_never_reported_as_present() -> None:
    """A report between the put and the second deletion would make a block a hit that is about to be deleted."""
    async with opened() as (half, backend, said):
        backend.may_put.clear()
        half.deliver([SubmitJob(1, JobKind.STORE, (b"a", b"b"), (0, 1), time.monotonic() + 60)])
        await turns()
        half.deliver([Delete((b"a",))])
        await turns()
        backend.may_put.set()
        await turns()
        assert [message.keys for message in said if isinstance(message, PresenceAdded)] == [(b"b",)]
        backend.may_answer.set()
        assert await backend.exists([b"a", b"b"]) == [False, True]


async def test_recovery_waits_while_the_receiver_is_behind() -> None:
    """Recovery pauses for a slow receiver; otherwise answers would queue behind millions of recovered keys."""
    keys = [b"%d" % number for number in range(10_000)]

    class Recovering(Recorder):
        async def scan_keys(self) -> AsyncIterator[Sequence[BlockKey]]:
            yield keys

    room, said = asyncio.Event(), list[FromIO]()
    backend = Recovering(MemoryConfig())
    with memoryview(bytearray(SLOT)) as primary:
        spec = TierIOSpec(backend, backend.config, Namespace({"model": "m"}), primary, SLOT)

        async def wait_for_room() -> None:
            await room.wait()

        half = TierIO(spec, said.append, wait_for_room)
        await half.open()
        await turns()
        recovered = [message for message in said if isinstance(message, PresenceAdded)]
        assert len(recovered) == 1
        assert kinds(said) == []
        room.set()
        await turns()
        recovered = [message for message in said if isinstance(message, PresenceAdded)]
        assert [key for message in recovered for key in message.keys] == keys
        assert kinds(said) == [PresenceComplete]
        await half.close()


async def test_a_required_tier_does_not_start_without_its_medium() -> None:
    """A required tier fails at startup without its medium; an optional tier starts and retries."""
    for required in (True, False):
        options = {"breaker_cooldown": "1ms", "required": required}
        backend, said = Recorder(decode_config(MemoryConfig, options, where="test")), list[FromIO]()
        backend.failures = 1
        with memoryview(bytearray(8 * SLOT)) as primary:
            half = TierIO(TierIOSpec(backend, backend.config, Namespace({"model": "m"}), primary, SLOT), said.append)
            try:
                if required:
                    with pytest.raises(BackendError, match="the medium is away"):
                        await half.open()
                else:
                    await half.open()
            finally:
                await half.close()


async def test_failures_of_a_tier_without_its_medium_name_the_reason() -> None:
    """Stores, loads and lookups fail with the reason for which the medium could not be opened."""
    async with opened(failures=1 << 30) as (half, backend, said):
        backend.may_answer.set()
        later = time.monotonic() + 60
        half.deliver([AskExistence(1, (b"a",), later)])
        half.deliver([SubmitJob(n, kind, (b"a",), (0,), later) for n, kind in enumerate(JobKind)])
        await turns()
        errors = [message.error for message in said if isinstance(message, JobDone | ExistsDone)]
        assert len(errors) == 3
        assert all("the medium is away" in error for error in errors), errors


class Erring(Recorder):
    """Stores one block only."""

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        return [Outcome.OK if write.key == b"a" else Outcome.IO_ERROR for write in writes]


async def test_a_block_that_could_not_be_put_is_not_reported_as_present() -> None:
    """A block whose put failed is not reported, because it would be a hit whose load fails."""
    async with opened(medium=Erring) as (half, _, said):
        half.deliver([SubmitJob(1, JobKind.STORE, (b"a", b"b"), (0, 1), time.monotonic() + 60)])
        await turns()
        [done] = [message for message in said if isinstance(message, JobDone)]
        assert done.outcomes == bytes([Outcome.OK, Outcome.IO_ERROR])
        assert [message.keys for message in said if isinstance(message, PresenceAdded)] == [(b"a",)]
