"""Epochs of a tier: the two halves alone, the source of the name, and old epochs on the medium."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import EpochConfig, TierConfig, decode_config
from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.runtime.messages import (
    AskExistence,
    BeginEpoch,
    Delete,
    EpochBegun,
    ExistsDone,
    HostDown,
    HostUp,
    JobDone,
    LineageFound,
    PresenceAdded,
    PresenceComplete,
    PresenceRemoved,
    Probe,
)
from kvstore.runtime.process import ProcessChannel
from kvstore.testing import TierRig
from kvstore.testing.waiting import eventually
from kvstore.tiers import epochs
from kvstore.tiers.epochs import EpochNames
from kvstore.types import LookupResult, Outcome, RemovalCause, RequestContext, TierEvent
from tests.no_threads import no_threads
from tests.tiers.bench import Bench, job

MISS, HIT, RETRY = LookupResult.MISS, LookupResult.HIT, LookupResult.RETRY


def rig(directory: Path, **options: Any) -> TierRig:
    """Open a file tier with its surroundings."""
    config = {"backend": "file", "path": str(directory), "capacity": "64MiB", "load_timeout": 60, "lookup_timeout": 60}
    return TierRig(
        {**config, **options}, namespace=Namespace({"test": "epochs"}), slot_bytes=4096, slots=32
    ).recovered()


def begun(bench: Bench, name: str = "e1") -> EpochBegun:
    """Return the answer to the latest request."""
    return EpochBegun(bench.channel.of(BeginEpoch)[-1].number, name)


def test_answers_of_an_earlier_epoch_are_ignored() -> None:
    """Presence and answers that arrive before the new epoch begins concern other blocks, and cause no hit."""
    bench = Bench()
    bench.hold(b"a")
    bench.tier.take_events()
    bench.tier.begin_epoch()
    assert bench.tier.take_events() == [TierEvent((b"a",), RemovalCause.REMOVED)]
    bench.answer(
        PresenceAdded((b"a",), recovered=False),
        PresenceAdded((b"b",), recovered=True),
        PresenceComplete(True, 2, 0.0),
        PresenceRemoved((b"c",), RemovalCause.EVICTED),
    )
    assert [bench.tier.lookup(key) for key in (b"a", b"b")] == [MISS, MISS]
    assert bench.tier.take_events() == []
    bench.answer(begun(bench), PresenceComplete(True, 0, 0.0))
    assert [bench.tier.lookup(key) for key in (b"a", b"b")] == [MISS, MISS]
    bench.hold(b"a")
    assert bench.tier.lookup(b"a") is HIT


def test_a_late_report_concerns_no_block_of_the_new_epoch() -> None:
    """A removal that arrives before the new epoch begins hides no block of it, and a late lineage describes none."""
    bench = Bench()
    bench.tier.begin_epoch()
    bench.answer(PresenceRemoved((b"a",), RemovalCause.EVICTED), LineageFound((b"a",), (b"old",), (b"",)))
    bench.answer(begun(bench), PresenceAdded((b"a",), recovered=True), PresenceComplete(True, 1, 0.0))
    assert bench.tier.lookup(b"a") is HIT
    assert bench.tier.take_lineage(b"a") is None


def test_a_question_about_an_earlier_epoch_answers_no_later_one() -> None:
    """In a shared tier, an answer about the old epoch does not count in the new one."""
    bench = Bench(authoritative=False)
    assert bench.tier.lookup(b"a") is RETRY
    bench.tier.flush()
    bench.tier.begin_epoch()
    bench.answer(ExistsDone(bench.channel.of(AskExistence)[0].question_id, b"\1", ""))
    assert bench.tier.lookup(b"a") is MISS
    bench.answer(begun(bench), PresenceComplete(False, 0, 0.0))
    assert bench.tier.lookup(b"a") is RETRY


def test_nothing_reaches_the_medium_while_an_epoch_changes() -> None:
    """Stores are shed, loads fail, removals do nothing; the medium's health is not affected."""
    bench = Bench(breaker_failures=1)
    bench.hold(b"a")
    bench.tier.submit_load(job(1, [b"x"]))
    bench.tier.begin_epoch()
    bench.tier.submit_store(job(2, [b"a"]))
    bench.tier.submit_load(job(3, [b"a"]))
    bench.tier.remove([b"a"])
    results = {result.job_id: result.outcomes for result in bench.tier.get_finished()}
    assert results == {2: (Outcome.SHED,), 3: (Outcome.IO_ERROR,)}
    assert bench.channel.of(Delete) == []
    [late] = bench.answer(JobDone(1, bytes([Outcome.IO_ERROR]), 0, 0.0, {}, "late"))
    assert late.job_id == 1
    bench.answer(begun(bench), PresenceComplete(True, 0, 0.0))
    stats = bench.tier.stats()
    assert (stats.load_breaker, stats.store_breaker, stats.epoch) == ("closed", "closed", "e1")


def test_a_late_failure_is_not_held_against_the_new_epoch() -> None:
    """A failed load or lookup of the previous epoch opens no breaker, sends no probe, and hides no later block."""
    bench = Bench(breaker_failures=1)
    ctx = RequestContext("r")
    bench.tier.submit_load(job(1, [b"a"], ctx))
    bench.tier.begin_epoch()
    [late] = bench.finish(1, Outcome.IO_ERROR, error="late")
    assert not late.success
    bench.answer(ExistsDone(0, b"", "late"))
    assert bench.tier.stats().load_breaker == "closed"
    bench.answer(begun(bench), PresenceComplete(True, 0, 0.0))
    bench.hold(b"a")
    assert bench.tier.lookup(b"a", ctx) is HIT
    bench.tier.flush()
    assert bench.channel.of(Probe) == []


def test_a_new_epoch_trusts_the_medium_again() -> None:
    """A breaker opened in the last epoch does not hide the new one."""
    bench = Bench(breaker_failures=1)
    bench.fail_loads(1)
    assert bench.tier.stats().load_breaker == "open"
    bench.tier.begin_epoch()
    bench.answer(begun(bench), PresenceComplete(True, 0, 0.0))
    bench.hold(b"a")
    assert bench.tier.lookup(b"a", RequestContext("r")) is HIT


def test_only_the_answer_to_the_last_reset_counts() -> None:
    """After several resets, every lookup is a miss until the last one is answered."""
    bench = Bench()
    bench.tier.begin_epoch()
    first = begun(bench, "e1")
    bench.tier.begin_epoch()
    bench.answer(first, PresenceAdded((b"a",), recovered=True), PresenceComplete(True, 1, 0.0))
    assert (bench.tier.lookup(b"a"), bench.tier.stats().epoch) == (MISS, None)
    bench.answer(begun(bench, "e2"), PresenceComplete(True, 0, 0.0))
    assert (bench.tier.lookup(b"a"), bench.tier.stats().epoch) == (MISS, "e2")


def test_an_answer_to_an_earlier_reset_is_not_where_a_new_io_process_goes() -> None:
    """Blocks stored between two resets belong to the first one's epoch: a new process must not open that epoch."""
    bench = Bench()
    bench.tier.begin_epoch()
    first = begun(bench, "e1")
    bench.tier.begin_epoch()
    bench.answer(first)
    bench.answer(HostDown("killed"))
    sent = len(bench.channel.of(BeginEpoch))
    bench.answer(HostUp())
    bench.tier.flush()
    assert [message.name for message in bench.channel.of(BeginEpoch)[sent:]] == [None]


def test_a_new_io_process_is_brought_to_the_present_epoch() -> None:
    """A new process opens in the base epoch: its reports do not count until it has changed to the current epoch."""
    bench = Bench()
    bench.tier.begin_epoch()
    bench.answer(begun(bench, "e1"), PresenceComplete(True, 0, 0.0))
    assert bench.tier.stats().ready
    bench.answer(HostDown("killed"))
    assert not bench.tier.stats().ready, "its process is down"
    bench.answer(HostUp(), PresenceAdded((b"old",), recovered=True), PresenceComplete(True, 1, 0.0))
    assert bench.tier.lookup(b"old") is MISS
    bench.tier.flush()
    assert bench.channel.of(BeginEpoch)[-1].name == "e1"
    assert bench.tier.stats().epoch is None, "it is not there yet"
    assert not bench.tier.stats().ready, "its epoch has not begun"
    bench.answer(begun(bench, "e1"), PresenceAdded((b"new",), recovered=True), PresenceComplete(True, 1, 0.0))
    assert bench.tier.stats().ready
    assert [bench.tier.lookup(key) for key in (b"old", b"new")] == [MISS, HIT]


def test_a_reset_while_the_io_process_is_down_is_not_forgotten() -> None:
    """A request lost with its process is sent to the next one."""
    bench = Bench()
    bench.tier.begin_epoch()
    bench.answer(HostDown("killed"))
    sent = len(bench.channel.of(BeginEpoch))
    bench.answer(HostUp(), PresenceAdded((b"old",), recovered=True), PresenceComplete(True, 1, 0.0))
    bench.tier.flush()
    assert [message.name for message in bench.channel.of(BeginEpoch)[sent:]] == [None]
    assert bench.tier.lookup(b"old") is MISS


def test_a_killed_io_process_does_not_lead_back(tmp_path: Path) -> None:
    """After a reset and a SIGKILL of the I/O process, earlier blocks are not found, and later ones are."""
    with rig(tmp_path, io="process") as open_rig:
        channel = open_rig.tier._channel
        assert isinstance(channel, ProcessChannel)
        old, new = [b"old-%d" % i for i in range(4)], [b"new-%d" % i for i in range(4)]
        open_rig.store(old)
        name = open_rig.begin_epoch()
        open_rig.recovered().store(new)
        before = channel.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        open_rig.until(lambda: channel.pid not in (None, before) and open_rig.tier.stats().epoch, "a new process")
        open_rig.recovered()
        assert open_rig.tier.stats().epoch == name
        assert [open_rig.lookup(key) for key in (*old, *new)] == [MISS] * 4 + [HIT] * 4
        # A reset of the new process must not reuse the epoch in which the killed one stored blocks.
        open_rig.begin_epoch()
        assert [open_rig.recovered().lookup(key) for key in new] == [MISS] * 4


@pytest.mark.parametrize("host", ["thread", "process"])
def test_engines_share_an_epoch_by_its_name(tmp_path: Path, host: str) -> None:
    """Engines in the same named epoch find each other's blocks, and none of another epoch."""
    name = tmp_path / "name"
    name.write_text("v1\n")
    options = {"epoch": {"file": str(name)}, "io": host}
    with rig(tmp_path / "kv", **options) as one, rig(tmp_path / "kv", **options) as two:
        assert (one.tier.stats().epoch, two.tier.stats().epoch) == ("v1", "v1")
        one.store([b"first"])
        eventually(lambda: two.lookup(b"first") is HIT)
        name.write_text("v2\n")
        assert one.begin_epoch() == "v2"
        one.store([b"second"])
        assert [two.lookup(key) for key in (b"first", b"second")] == [HIT, MISS]
        assert two.begin_epoch() == "v2"
        assert [two.lookup(key) for key in (b"first", b"second")] == [MISS, HIT]
        assert two.load([b"second"]).success
        # The name identifies the weights: the same name, the same blocks.
        assert two.begin_epoch() == "v2"
        assert two.lookup(b"second") is HIT


@pytest.mark.parametrize("content", [None, b"", b" \n", b"x" * 300, b"two\nlines", b"\xff\xfe"])
def test_a_name_that_can_not_be_read_shares_nothing(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing, empty or unusable file causes one warning and an epoch of this engine alone, never the base epoch."""
    name = tmp_path / "name"
    with rig(tmp_path / "kv") as base:
        base.store([b"base"])
    if content is not None:
        name.write_bytes(content)
    with rig(tmp_path / "kv", epoch={"file": str(name)}) as alone:
        first = alone.tier.stats().epoch
        assert first and first.startswith("engine-")
        assert [record.levelname for record in caplog.records if str(name) in record.getMessage()] == ["WARNING"]
        assert alone.lookup(b"base") is MISS
        alone.store([b"mine"])
        assert alone.begin_epoch() != first
        assert alone.recovered().lookup(b"mine") is MISS


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["named-pipe", "directory"])
async def test_a_name_is_read_from_a_regular_file_only(
    tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe without a writer causes an immediate warning, and blocks no thread, however often the engine is reset."""
    make(tmp_path / "name")
    names = EpochNames(EpochConfig(file=str(tmp_path / "name")))
    found = {await names.next() for _ in range(3)}
    assert len(found) == 3 and all(name.startswith("engine-") for name in found)
    assert [record.getMessage().count("is not a regular file") for record in caplog.records] == [1] * 3
    eventually(lambda: "kvstore-epoch" not in {thread.name for thread in threading.enumerate()}, 20, "idle threads")


async def test_a_file_system_that_hangs_takes_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a read is running no other starts, and the name is random; afterwards the file is read again."""
    (tmp_path / "name").write_text("v1")
    end, opener = threading.Event(), epochs.open_regular
    monkeypatch.setattr(epochs, "_READ_TIMEOUT_S", 0.01)
    monkeypatch.setattr(epochs, "open_regular", lambda path: end.wait(60) and opener(path))
    names = EpochNames(EpochConfig(file=str(tmp_path / "name")))
    found = [await names.next() for _ in range(4)]
    assert len(set(found)) == 4 and all(name.startswith("engine-") for name in found)
    threads = [thread for thread in threading.enumerate() if thread.name == "kvstore-epoch"]
    assert len(threads) == 1
    end.set()
    monkeypatch.setattr(epochs, "_READ_TIMEOUT_S", 60.0)
    async with asyncio.timeout(60):
        while await names.next() != "v1":
            await asyncio.sleep(0.001)
    assert [await names.next() for _ in range(20)] == ["v1"] * 20, "reads in a row don't get in each other's way"


async def test_a_process_without_threads_to_spare_enters_an_epoch(tmp_path: Path) -> None:
    """If no thread can be started, the name is random; later the file is read again."""
    (tmp_path / "name").write_text("v1")
    names = EpochNames(EpochConfig(file=str(tmp_path / "name")))
    with no_threads():
        assert (await names.next()).startswith("engine-")
    assert await names.next() == "v1"


def test_the_path_of_a_name_has_to_be_absolute() -> None:
    """A relative path would depend on the working directory of the engine."""
    with pytest.raises(ConfigError, match=r"'file' is 'epoch'\. Expected an absolute path"):
        decode_config(TierConfig, {"epoch": {"file": "epoch"}}, where="test tier")
    with pytest.raises(ConfigError, match=r"'reset' is 'forgot'\. Expected one of 'forget', 'keep'"):
        decode_config(TierConfig, {"reset": "forgot"}, where="test tier")


def test_the_base_epoch_is_the_namespace_itself() -> None:
    """Existing namespaces are unchanged; each epoch is a separate namespace, the same in every engine."""
    base = Namespace({"model": "m"})
    assert base.of_epoch("") == base
    assert base.of_epoch("a") == base.of_epoch("a") != base.of_epoch("b")
    assert base.of_epoch("a").document()["fields"] == {"model": "m", "epoch": "a"}


def test_blocks_of_old_epochs_are_evicted_first(tmp_path: Path) -> None:
    """A new epoch takes its room from earlier ones: none of its own blocks is evicted while they have any."""
    room_for = 40
    with rig(tmp_path, capacity=f"{room_for * 8192}B") as full:
        for start in range(0, 36, 12):
            full.store([b"old-%02d" % i for i in range(start, start + 12)])
        full.begin_epoch()
        full.recovered()
        new = [b"new-%02d" % i for i in range(24)]
        for start in range(0, 24, 8):
            full.store(new[start : start + 8])

        def all_there() -> bool:
            # A store that precedes the eviction finds no room.
            full.store([key for key in new if full.lookup(key) is not HIT])
            return [full.lookup(key) for key in new] == [HIT] * 24

        full.until(all_there, "all blocks of the new epoch")
        assert full.tier.stats().backend_counters["evicted_blocks"] == 0


def test_resets_without_stores_need_one_epoch(tmp_path: Path) -> None:
    """An epoch without stores also serves the next reset, so idle engines leave no epochs behind."""
    with rig(tmp_path) as quiet:
        quiet.store([b"a"])
        names = {quiet.begin_epoch() for _ in range(5)}
        assert len(names) == 1
        quiet.recovered().store([b"a"])
        assert quiet.begin_epoch() not in names
        assert quiet.recovered().lookup(b"a") is MISS
