"""The parts that decide without doing: names, space, ledger, index, locks."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.backends.file import layout
from kvstore.backends.file.index import Index
from kvstore.backends.file.ledger import LEDGER_BYTES, Ledger, Removal
from kvstore.backends.file.locks import FileLock
from kvstore.backends.file.quarantine import surplus
from kvstore.backends.file.space import Goal, Limits, Usage, charge, goal, granted, shortage
from kvstore.backends.file.writers import holds_lock, is_alive, new_writer, retire_writer
from kvstore.diskio import OsDisk
from kvstore.eviction import make_policy
from kvstore.testing import FaultyDisk
from kvstore.testing.seeds import fresh_seed
from tests.file.rig import keys

pytestmark = pytest.mark.usefixtures("either_engine")

HAND_MADE = [
    "", ".", "..", "../x", "/", "/etc/passwd", "a/b", "\0", "x\0.kv", "é.kv", "٣٣.kv", "ab.KV", "AB.kv", "ab.kv\n",
    "\nab.kv", " ab.kv", "ab.kv ", "abc.kv", ".kv", "kv", "ab.kv.kv", "0x.kv", "ab\u202e.kv", "%61%62.kv", "CON",
    "nul.kv", "a" * 300, "ab" * 65 + ".kv", "-rf", "~", "$HOME", ".tmp.", ".tmp.x", "ab.tmp", "lock.", "ab..kv",
]  # fmt: skip

LIMITS = Limits(capacity_bytes=1000, high_bytes=900, low_bytes=800, reserve_bytes=100, reserve_files=10)


@given(st.binary(min_size=1, max_size=64))
def test_names_of_blocks_are_safe_and_tell_the_key(key: bytes) -> None:
    """A key's name has only hexadecimal digits, is short enough, and gives the key back."""
    name = layout.block_name(key)
    assert set(name.removesuffix(".kv")) <= set("0123456789abcdef")
    assert len(name) <= 255
    assert layout.key_of(name) == key
    assert layout.is_shard(layout.shard_name(layout.shard_of(key, 256)))


@given(st.text(max_size=300))
def test_other_names_are_nobodys(name: str) -> None:
    """Any text is either exactly a name that we would have made, or none."""
    key = layout.key_of(name)
    assert key is None or layout.block_name(key) == name
    assert layout.tmp_writer(name) is None or name.startswith(".tmp.")


@pytest.mark.parametrize("name", HAND_MADE)
def test_odd_names_are_nobodys(name: str) -> None:
    """Names that people and attackers think of are not taken for ours."""
    assert layout.key_of(name) is None
    assert layout.tmp_writer(name) is None
    assert layout.writer_of(name) is None
    assert not layout.is_namespace(name)
    assert not layout.is_shard(name)
    assert not layout.is_quarantined(name)


def test_names_of_state_are_recognised() -> None:
    """What is written under a name is found under it."""
    writer = new_writer()
    retire_writer(writer)
    assert layout.tmp_writer(layout.tmp_name(writer, 1)) == writer
    assert layout.tmp_writer(layout.tmp_name(writer, 0xFFFFFFFF)) == writer
    assert layout.writer_of(layout.writer_name(writer)) == writer
    assert layout.is_quarantined(layout.quarantine_name("ab" * 32, b"\xff" * 64, 2**63))
    assert len(layout.quarantine_name("ab" * 32, b"\xff" * 64, 2**63)) <= 255


def test_shards_are_even() -> None:
    """Keys that differ in few bits are spread over all shards."""
    counts = [0] * 16
    for number in range(16_000):
        counts[layout.shard_of(number.to_bytes(4, "big"), 16)] += 1
    assert min(counts) > 800


def test_few_inodes_mean_few_directories() -> None:
    """Directories never take most of the inodes."""
    assert [layout.suggested_fanout(files) for files in (0, 100, 5000, 10**6)] == [256, 1, 16, 256]


def usage(
    used: int = 0, pending: int = 0, free: int = 10**6, files: int | None = None, pending_files: int = 0
) -> Usage:
    """Return a usage."""
    return Usage(used, pending, pending_files, free, files)


@pytest.mark.parametrize(
    ("state", "count"),
    [
        (usage(), 3),
        (usage(used=700), 3),
        (usage(used=701), 2),
        (usage(used=1000), 0),
        (usage(used=5000), 0),
        (usage(free=400), 3),
        (usage(free=399), 2),
        (usage(free=500, pending=200), 2),
        (usage(free=50), 0),
        (usage(files=13), 3),
        (usage(files=13, pending_files=1), 2),
        (usage(files=5), 0),
    ],
)
def test_what_is_granted_keeps_all_limits(state: Usage, count: int) -> None:
    """Three blocks of 100: as many as capacity, reserve and inodes allow, whatever others are writing."""
    assert granted([100, 100, 100], state, LIMITS) == count
    assert bool(shortage([100, 100, 100], state, LIMITS)) == (count < 3)


@given(
    st.lists(st.integers(1, 500), max_size=6),
    st.builds(
        usage,
        st.integers(0, 1200),
        st.integers(0, 300),
        st.integers(0, 2000),
        st.none() | st.integers(0, 40),
        st.integers(0, 5),
    ),
)
def test_what_is_granted_never_breaks_a_limit(charges: list[int], state: Usage) -> None:
    """After any grant, and after any eviction of what is called the shortage, all limits hold."""
    count = granted(charges, state, LIMITS)
    size = sum(charges[:count])
    if count:
        assert state.used_bytes + size <= LIMITS.capacity_bytes
        assert state.free_bytes - state.pending_bytes - size >= LIMITS.reserve_bytes
        assert state.free_files is None or state.free_files - state.pending_files - count >= LIMITS.reserve_files
    lacking = shortage(charges, state, LIMITS)
    assert (count == len(charges)) <= (not lacking or not charges)


def test_eviction_starts_above_high_and_ends_at_low() -> None:
    """Between the watermarks nothing is evicted, unless an eviction is under way."""
    assert goal([], usage(used=900), LIMITS) == Goal(0, 0)
    assert goal([], usage(used=901), LIMITS) == Goal(101, 0)
    assert goal([], usage(used=850), LIMITS, started=True) == Goal(50, 0)
    assert not goal([], usage(used=800), LIMITS, started=True)
    assert goal([300], usage(used=850), LIMITS) == Goal(150, 0)
    assert goal([50_000], usage(used=500), LIMITS).size_bytes == LIMITS.capacity_bytes


def test_charges_are_whole_pages() -> None:
    """A file takes whole pages, an empty one none."""
    assert [charge(size) for size in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


@pytest.fixture
def dir_fd(tmp_path: Path) -> Iterator[int]:
    """Return an open directory."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def ledgers(dir_fd: int) -> Iterator[list[Ledger]]:
    """Return four hands in one ledger, which has been counted."""
    found = [Ledger(OsDisk(), dir_fd, dir_fd, f"{'0' * 32}.{n}.1.deadbeef") for n in range(4)]
    found[0].reconcile(found[0].open(), (0, 0), ())
    yield found
    for ledger in found:
        ledger.close()


def test_the_ledger_never_grants_more_than_there_is(ledgers: list[Ledger]) -> None:
    """Sixteen threads with four hands enter and strike out at random: the sum is right, the limit holds."""
    seed = fresh_seed()
    limits = Limits(100 * 4096, 10**9, 10**9, 0, 0)
    held = [0] * 16
    over: list[int] = []

    def work(number: int) -> None:
        rng, ledger = random.Random(seed + number), ledgers[number % 4]
        for _ in range(60):
            count, seen = ledger.reserve(
                [4096] * rng.randrange(1, 8), lambda charges, now: granted(charges, now, limits)
            )
            over.extend([seen.used_bytes] if seen.used_bytes > limits.capacity_bytes else [])
            failed = rng.randrange(count + 1)
            ledger.finish((count * 4096, count), (failed * 4096, failed))
            held[number] += count - failed
            gone = rng.randrange(held[number] + 1)
            removal = Removal(gone * 4096, gone)
            ledger.begin(removal)
            ledger.end(removal, (gone * 4096, gone))
            held[number] -= gone

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    states = [ledger.flush() for ledger in ledgers]
    assert over == [], f"seed {seed}"
    assert (states[-1].used_bytes, states[-1].used_files) == (sum(held) * 4096, sum(held)), f"seed {seed}"
    assert states[-1].work == {}, f"seed {seed}"


def test_a_reconciliation_never_falls_below_the_truth(ledgers: list[Ledger]) -> None:
    """Whatever others enter, write and remove during a scan, the ledger is at least what there is."""
    first, second = ledgers[:2]
    everything = lambda charges, now: len(charges)  # noqa: E731
    first.reserve([4096] * 10, everything)
    first.finish((40960, 10), (0, 0))
    second.reserve([4096] * 4, everything)
    before = first.flush()
    # During the scan, which sees the ten and two of the four: the four are published, five more are begun, one goes.
    second.finish((4 * 4096, 4), (0, 0))
    second.reserve([4096] * 5, everything)
    ended = Removal(4096, 1)
    first.begin(ended)
    first.end(ended, (4096, 1))
    state = first.reconcile(before, (12 * 4096, 12), ())
    assert state.used_bytes >= (10 + 4 - 1 + 5) * 4096
    # With nobody at work the count is exact, also when the writer of some has died.
    before = first.flush()
    state = first.reconcile(before, (13 * 4096, 13), list(before.work))
    assert (state.used_bytes, state.used_files, state.work) == (13 * 4096, 13, {})


def test_what_is_gone_but_not_struck_out_is_struck_out_once(ledgers: list[Ledger]) -> None:
    """A scan that already misses files whose removal is not yet in the ledger does not take them off twice."""
    first, second = ledgers[:2]
    first.reserve([4096] * 10, lambda charges, now: len(charges))
    first.finish((10 * 4096, 10), (0, 0))
    before = first.flush()
    removal = Removal(4 * 4096, 4)
    second.begin(removal)
    # Three of the four files are gone when the scan comes by.
    assert first.reconcile(before, (7 * 4096, 7), ()).used_bytes == 10 * 4096
    second.end(removal, (3 * 4096, 3))
    state = second.flush()
    assert (state.used_bytes, state.used_files, state.work) == (7 * 4096, 7, {})


def test_a_failed_write_of_the_ledger_strikes_out_nothing_twice(dir_fd: int) -> None:
    """When nobody knows whether a change was written, the ledger is rather too high, and wants to be counted."""
    disk = FaultyDisk()
    ledger = Ledger(disk, dir_fd, dir_fd, f"{'0' * 32}.1.1.deadbeef")
    ledger.reconcile(ledger.open(), (10 * 4096, 10), ())
    removal = Removal(4096, 1)
    ledger.begin(removal)
    ledger.end(removal, (4096, 1))
    disk.fail("pwritev", errno.EIO, after=True)
    with pytest.raises(OSError, match="Input/output"):
        ledger.flush()
    assert ledger.flush().used_bytes == 9 * 4096
    assert ledger.wants_recount
    ledger.close()


def test_there_is_room_for_so_many_writers(dir_fd: int) -> None:
    """Beyond that, engines are refused space instead of being forgotten."""
    many = [Ledger(OsDisk(), dir_fd, dir_fd, f"{'0' * 32}.{n}.1.deadbeef") for n in range(64)]
    many[0].reconcile(many[0].open(), (0, 0), ())
    for ledger in many[:63]:
        ledger.reserve([4096], lambda charges, now: len(charges))
    with pytest.raises(OSError, match="63 engines"):
        many[63].reserve([4096], lambda charges, now: len(charges))
    many[5].close()
    assert many[63].reserve([4096], lambda charges, now: len(charges))[0] == 1
    for ledger in many:
        ledger.close()


@pytest.mark.parametrize(
    ("sizes", "count"), [([], 0), ([5], 0), ([5, 5, 5], 2), ([9, 1], 1), ([1, 9], 2), ([1] * 9, 7), ([10], 1)]
)
def test_the_oldest_leave_the_quarantine(sizes: list[int], count: int) -> None:
    """One more block of 2 in a quarantine of 3 blocks and 10 bytes: the first so many go."""
    assert surplus(sizes, 2, 3, 10) == count


def test_two_who_find_a_new_root_empty_count_it_once(dir_fd: int) -> None:
    """What one engine has stored since another one found the root empty is not forgotten."""
    first, second = (Ledger(OsDisk(), dir_fd, dir_fd, f"{'0' * 32}.{n}.1.deadbeef") for n in range(2))
    before = second.open()
    assert not before.is_counted
    first.reconcile(first.open(), (0, 0), ())
    first.reserve([4096] * 8, lambda charges, now: len(charges))
    first.finish((8 * 4096, 8), (0, 0))
    first.flush()
    assert second.reconcile(before, (0, 0), ()).used_bytes == 8 * 4096
    first.close()
    second.close()


@pytest.mark.parametrize("place", [0, 9, 17, 50, 127, 128, 300, LEDGER_BYTES - 1])
def test_a_damaged_ledger_says_nothing(ledgers: list[Ledger], tmp_path: Path, place: int) -> None:
    """Damage makes it uncounted, and nothing is granted until it is counted again."""
    first = ledgers[0]
    first.reserve([4096] * 3, lambda charges, now: len(charges))
    content = bytearray((tmp_path / "ledger").read_bytes())
    content[place] ^= 0xFF
    (tmp_path / "ledger").write_bytes(content)
    assert not first.flush().is_counted
    assert first.reserve([4096], lambda charges, now: len(charges))[0] == 0
    first.reconcile(first.flush(), (5 * 4096, 5), ())
    assert first.used_bytes == 5 * 4096
    assert first.reserve([4096], lambda charges, now: len(charges))[0] == 1


def test_a_removed_ledger_is_made_again(ledgers: list[Ledger], tmp_path: Path) -> None:
    """All hands use the file that has the name, also after somebody removed it."""
    (tmp_path / "ledger").unlink()
    assert not ledgers[0].flush().is_counted
    ledgers[1].reconcile(ledgers[1].flush(), (4096, 1), ())
    assert ledgers[0].flush().used_bytes == 4096


def test_a_stopped_holder_does_not_stop_others_for_long(
    ledgers: list[Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped while it held the ledger costs the others a time limit, not for ever."""
    monkeypatch.setattr("kvstore.backends.file.ledger._LOCK_TIMEOUT_S", 0.05)
    with (tmp_path / "ledger").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            ledgers[0].flush()
    ledgers[0].flush()


def test_the_index_counts_bytes_and_keeps_the_order() -> None:
    """Sizes add up through all changes, victims come coldest first and are leaving until they have left."""
    now = [100.0]
    index = Index(make_policy("lru"), clock=lambda: now[0])
    for number, key in enumerate(keys(range(10))):
        index.add(key, 100 + number)
    index.touch(keys([0]))
    index.add(keys([1])[0], 500)
    assert index.size_bytes == sum(range(100, 110)) + 399
    with index.pinned(keys([1])):
        victims = index.take_victims(Goal(250, 0), 256)
    assert [key for key, _ in victims] == keys([2, 3, 4])
    assert index.leaving == set(keys([2, 3, 4]))
    assert not index.is_news(keys([2])[0])
    index.left(keys([2, 3, 4]))
    assert index.is_news(keys([2])[0])
    assert [key for key, _, _ in index.items()] == keys([1, 5, 6, 7, 8, 9, 0])
    assert len(index.take_victims(Goal(0, 3), 256)) == 3
    assert len(index.take_victims(Goal(10**9, 0), 2)) == 2
    assert index.size_bytes == sum(size for _, size, _ in index.items())


def test_the_index_tells_what_a_scan_missed() -> None:
    """Blocks not seen since a scan began are unseen; what left meanwhile is no news when the scan brings it."""
    index = Index(make_policy("s3fifo"))
    index.restore([(key, 10, 1.0) for key in keys(range(4))])
    index.begin_scan()
    index.add(keys([0])[0], 10)
    index.add(keys([9])[0], 10)
    index.remove(keys([1])[0])
    assert set(index.unseen()) == set(keys([2, 3]))
    assert not index.is_news(keys([1])[0])
    index.end_scan()
    assert index.is_news(keys([1])[0])


def test_a_lock_has_one_holder_or_many_sharers(dir_fd: int, tmp_path: Path) -> None:
    """Exclusive excludes, shared admits; a removed file is not locked by two."""
    locks = [FileLock(OsDisk(), dir_fd, "lock") for _ in range(3)]
    assert locks[0].try_acquire(exclusive=True)
    assert not locks[1].try_acquire(exclusive=True)
    assert not locks[1].try_acquire(exclusive=False)
    locks[0].describe("me, with a long text " * 100)
    assert locks[1].owner().startswith("me, with")
    locks[0].release(remove=True)
    assert not (tmp_path / "lock").exists()
    assert locks[0].try_acquire(exclusive=False)
    assert locks[1].try_acquire(exclusive=False)
    assert not locks[2].try_acquire(exclusive=True)
    (tmp_path / "lock").unlink()
    assert locks[2].try_acquire(exclusive=True)
    for lock in locks:
        lock.release()
        lock.release()
        assert not lock.is_held


def test_the_living_and_the_dead(dir_fd: int) -> None:
    """Who holds its lock lives, wherever it runs; who does not, only while its process does."""
    elsewhere = f"{'f' * 32}.1.1.00000001"
    assert not is_alive(OsDisk(), dir_fd, elsewhere)
    lock = FileLock(OsDisk(), dir_fd, layout.writer_name(elsewhere))
    assert lock.try_acquire(exclusive=True)
    assert holds_lock(OsDisk(), dir_fd, elsewhere)
    assert is_alive(OsDisk(), dir_fd, elsewhere)
    lock.release()
    assert not is_alive(OsDisk(), dir_fd, elsewhere)
    ours = new_writer()
    assert is_alive(OsDisk(), dir_fd, ours)
    retire_writer(ours)
    assert not is_alive(OsDisk(), dir_fd, ours)
