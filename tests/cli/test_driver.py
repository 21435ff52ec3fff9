"""The measuring loop: its counts, the start of each latency, and the detection of wrong bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvstore.cli.bench.driver import Driver, PhaseResult
from kvstore.cli.bench.payload import BlockRows, Payload
from kvstore.cli.bench.systems import Done, Op, System
from kvstore.cli.bench.workload import Mix, Verify, Workload
from kvstore.primary import Region
from kvstore.types import LookupResult, Outcome

BLOCK = 8192


class DictSystem(System):
    """Blocks in a dict; each job takes a fixed time, and ``damage`` may change the result of a load."""

    name = "dict"
    looks_up = True

    def __init__(self, region: Region, service_s: float = 0.0) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.service_s = service_s
        self.damage: Callable[[bytes, bytes], bytes] = lambda key, block: block
        self.outcome = Outcome.OK
        self._slots = region.view()
        self._running: list[tuple[float, Done]] = []

    def lookup(self, key: bytes, job_id: int) -> LookupResult:
        """Answer immediately."""
        return LookupResult.HIT if key in self.blocks else LookupResult.MISS

    def submit(self, op: Op, job_id: int, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Copy immediately, report later."""
        for key, slot in zip(keys, slots, strict=True):
            place = slice(slot * BLOCK, (slot + 1) * BLOCK)
            if op == "store":
                self.blocks[key] = bytes(self._slots[place])
            else:
                self._slots[place] = self.damage(key, self.blocks[key])
        self._running.append((time.perf_counter() + self.service_s, Done(job_id, [self.outcome] * len(keys))))

    def finished(self) -> Sequence[Done]:
        """Return the jobs whose time is over."""
        now = time.perf_counter()
        done = [job for at, job in self._running if at <= now]
        self._running = [(at, job) for at, job in self._running if at > now]
        return done

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def rows() -> Iterator[BlockRows]:
    """Slots for four jobs of four blocks."""
    with Region.create(16, BLOCK) as region:
        rows = Payload("random", BLOCK, 1).prepare(region)
        rows.region = region  # type: ignore[attr-defined]
        yield rows
        rows.release()


def workload(**more: object) -> Workload:
    """Return a short phase of loads."""
    base: dict[str, object] = {
        "blocks_per_job": 4, "jobs": 2, "mix": Mix(0.0), "duration_s": 30.0, "ops_max": 50, "warmup_s": 0.0,
        "working_set_bytes": 40 * BLOCK,
    }  # fmt: skip
    return Workload(BLOCK, **(base | more))  # type: ignore[arg-type]


def measured(rows: BlockRows, system: DictSystem, phase: Workload) -> PhaseResult:
    """Fill the system and run a phase."""
    driver = Driver(system, rows)
    driver.fill(phase)
    return driver.run(phase)


def system_of(rows: BlockRows, **more: float) -> DictSystem:
    """Return a system over the slots."""
    return DictSystem(rows.region, **more)  # type: ignore[attr-defined]


def test_counts_are_exact(rows: BlockRows) -> None:
    """Jobs, blocks, lookups and hits equal the requested numbers, each counted once."""
    found = measured(rows, system_of(rows), workload(verify="all"))
    assert found.load.jobs == found.lookup.jobs == found.load.latencies.count == 50
    assert found.load.blocks == found.lookup.blocks == found.hits == found.verified_blocks == 200
    assert not found.wrong and not found.load.errors and found.store.jobs == 0


def test_mix_and_hit_rate_are_as_asked(rows: BlockRows) -> None:
    """A third of the jobs are stores and a quarter of the looked-up blocks are missing, within random variation."""
    found = measured(rows, system_of(rows), workload(mix=Mix(1 / 3), hit_rate=0.75, ops_max=900))
    assert found.store.jobs + found.lookup.jobs == 900
    assert 240 <= found.store.jobs <= 360
    assert 0.70 <= found.hits / found.lookup.blocks <= 0.80


def flipped(key: bytes, block: bytes) -> bytes:
    """Change one bit."""
    return block[:5000] + bytes([block[5000] ^ 1]) + block[5001:]


def half(key: bytes, block: bytes) -> bytes:
    """Leave other bytes in the second page."""
    return block[:4096] + bytes(4096)


@pytest.mark.parametrize("damage", [flipped, half])
@pytest.mark.parametrize("verify", ["all", "sample"])
def test_wrong_bytes_are_seen(rows: BlockRows, damage: Callable[[bytes, bytes], bytes], verify: Verify) -> None:
    """A flipped bit and a page that was not loaded are found, and the block is reported by its key."""
    system = system_of(rows)
    system.damage = damage
    found = measured(rows, system, workload(verify=verify))
    assert len(found.wrong) == min(100, found.verified_blocks) == {"all": 100, "sample": 50}[verify]
    assert {bytes.fromhex(block.key) for block in found.wrong} <= set(system.blocks)


def test_another_block_is_seen(rows: BlockRows) -> None:
    """Intact bytes of another block count as wrong."""
    system = system_of(rows)
    system.damage = lambda key, block: system.blocks[min(system.blocks)]
    found = measured(rows, system, workload(verify="all", ops_max=10))
    assert len(found.wrong) >= 39  # At most one of ten jobs of four blocks has the right one.


def test_nothing_loaded_is_seen(rows: BlockRows) -> None:
    """A load that reports success without writing is found, even if the slot held that block before."""
    system = system_of(rows)
    driver = Driver(system, rows)
    phase = workload(verify="all", jobs=1, working_set_bytes=1, ops_max=6)
    driver.fill(phase)
    driver.run(phase)
    region = rows.region  # type: ignore[attr-defined]
    system.damage = lambda key, block: bytes(region.view()[:0]) or _unchanged(region, key, driver)
    assert len(driver.run(phase).wrong) == 24


def _unchanged(region: Region, key: bytes, driver: Driver) -> bytes:
    """Return the current content of the slot that the block is loaded into."""
    place = driver.stored_keys().index(key) % 4
    return bytes(region.view()[place * BLOCK : (place + 1) * BLOCK])


def test_errors_are_counted_and_no_latency(rows: BlockRows) -> None:
    """A failed job is counted by its cause, without a latency."""
    system = system_of(rows)
    driver = Driver(system, rows)
    phase = workload()
    driver.fill(phase)
    system.outcome = Outcome.IO_ERROR
    found = driver.run(phase)
    assert found.load.errors == {"io_error": 200}
    assert found.load.latencies.count == 0 and found.load.blocks == 0


def test_corrupt_records_are_wrong(rows: BlockRows) -> None:
    """A record that the tier reports as damaged is listed as a wrong block."""
    system = system_of(rows)
    driver = Driver(system, rows)
    phase = workload(ops_max=1)
    driver.fill(phase)
    system.outcome = Outcome.CORRUPT
    found = driver.run(phase)
    assert [block.why for block in found.wrong] == ["its record on the medium does not verify"] * 4


def test_open_loop_counts_from_the_scheduled_time(rows: BlockRows) -> None:
    """If a system is too slow for the rate, the waiting time counts as latency, even for jobs not begun."""
    system = system_of(rows, service_s=0.02)
    phase = workload(jobs=1, rate=200.0, duration_s=0.6, ops_max=0)
    driver = Driver(system, rows)
    driver.fill(phase)
    found = driver.run(phase)
    # 120 jobs are due and 30 can run: the last one has waited for most of the time.
    assert found.load.jobs <= 31
    assert found.load.errors["not_begun"] >= 60
    assert found.load.latencies.count >= 100
    assert found.load.latencies.percentile(50) >= 0.15
    closed = Driver(system, rows)
    closed.fill(phase)
    assert closed.run(workload(jobs=1, ops_max=10)).load.latencies.percentile(10) < 0.15


def test_phase_reports_the_rate_of_a_busy_thread_beside_it(rows: BlockRows) -> None:
    """With a busy thread beside it, the phase reports the share of its rate that the thread kept."""
    driver = Driver(system_of(rows), rows)
    phase = workload(duration_s=2.0, ops_max=0, spin=True)
    driver.fill(phase)
    found = driver.run(phase)
    assert found.spin_rate is not None and found.spin_rate > 0


def test_stopping_ends_a_phase(rows: BlockRows) -> None:
    """After a stop no job starts, running ones end, and the counts are reported."""
    stop = False
    driver = Driver(system_of(rows), rows, stopped=lambda: stop, watch=lambda found: None)
    phase = workload(ops_max=0, duration_s=60.0)
    driver.fill(phase)

    def watch(found: PhaseResult) -> None:
        nonlocal stop
        stop = stop or found.load.jobs > 10

    driver._watch = watch
    found = driver.run(phase)
    assert 10 < found.load.jobs == found.load.latencies.count


@pytest.mark.parametrize("kind", ["random", "bf16"])
def test_blocks_are_unlike_each_other(kind: str) -> None:
    """No two pages of any blocks are equal, and another seed gives other bytes."""
    with Region.create(4, BLOCK) as region:
        first, second = Payload(kind, BLOCK, 1), Payload(kind, BLOCK, 2)
        rows = first.prepare(region)
        rows.write(range(4), range(4))
        pages = {bytes(page) for page in rows.array.reshape(-1, 512)}
        assert all(rows.is_right(slot, slot) for slot in range(4))
        rows.release()
    assert len(pages) == 8
    assert first.identity != second.identity
    assert first.key(1) != second.key(1)
