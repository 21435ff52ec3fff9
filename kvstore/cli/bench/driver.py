"""Drives a system through phases of jobs, in a closed or open loop, and counts the results.

One thread submits jobs, performs their lookups, collects results and compares bytes, like a scheduler. It waits for
results, or polls every 0.2 ms where it can't wait, or every millisecond if it also computes.
"""

from __future__ import annotations

import functools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from kvstore.cli.bench.histogram import Latencies
from kvstore.cli.bench.payload import BlockRows
from kvstore.cli.bench.systems import POLL_S, Op, System, cpu_seconds
from kvstore.cli.bench.workload import Workload
from kvstore.types import LookupResult, Outcome

_LOOPS: Final = 1000
_ALONE_S: Final = 0.3
"""Time for measuring the rate alone; a longer time changes only its third digit."""

_WAIT_S: Final = 0.05
"""Longest wait for results, after which the progress is shown."""

_SPIN_S: Final = 0.001
"""Time of computing between two polls; a step of an engine takes longer."""

_PROGRESS_S: Final = 0.25
_WRONG_MAX: Final = 100
"""Most wrong blocks reported."""

_ABSENT: Final = 1 << 48
"""Blocks with numbers from this one on are never stored."""


class Spinner:
    """Runs Python code without a pause, in :meth:`spin` or, as a context, in a thread of its own.

    Its rate shows how much of the GIL remains.
    """

    def __init__(self) -> None:
        self.steps = 0  # Steps done so far.
        alone, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < _ALONE_S:
            _step()
            alone += 1
        self._alone = alone / elapsed
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Spinner:
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="spinner", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def spin(self, seconds: float) -> None:
        """Run for this long, in this thread."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            _step()
            self.steps += 1

    def share_of(self, steps: int, seconds: float) -> float:
        """Return the rate of ``steps`` in ``seconds``, relative to the rate alone."""
        return steps / seconds / self._alone

    def _run(self) -> None:
        while not self._stop.is_set():
            _step()
            self.steps += 1


@functools.cache
def the_spinner() -> Spinner:
    """Return the spinner of this process; its rate alone is measured once."""
    return Spinner()


def _step() -> None:
    total = 0
    for i in range(_LOOPS):
        total += i & 3


@dataclass(frozen=True, slots=True)
class WrongBlock:
    """A block that differs from the stored one."""

    key: str  # Its key, in hex.
    number: int  # Its number in the run.
    why: str  # The difference.


@dataclass(slots=True)
class OpCounts:
    """Counts of one operation."""

    latencies: Latencies = field(default_factory=Latencies)
    jobs: int = 0
    blocks: int = 0
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class PhaseResult:
    """Counts of a phase without its warm-up."""

    block_bytes: int  # Payload of a block.
    seconds: float = 0.0  # From its start to the end of its last job.
    cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU time of this process and its children in that time, by part: ``caller`` (this thread), ``loop``, ``workers``
    (other threads) and ``kernel`` (those of io_uring)."""
    store: OpCounts = field(default_factory=OpCounts)  # Stores.
    load: OpCounts = field(default_factory=OpCounts)  # Loads.
    lookup: OpCounts = field(default_factory=OpCounts)
    """Lookups; each is for all blocks of a job, and ``blocks`` counts keys."""
    hits: int = 0  # Found keys.
    misses: int = 0  # Found blocks that were gone at their load.
    verified_blocks: int = 0  # Loaded blocks that were compared completely.
    wrong: list[WrongBlock] = field(default_factory=list)  # Blocks that differed, or did not verify.
    spin_rate: float | None = None  # Rate of the computation between polls over its rate alone.
    notes: list[str] = field(default_factory=list)  # Remarks for the reader.

    def counts(self, op: Op) -> OpCounts:
        return self.store if op == "store" else self.load


@dataclass(slots=True, eq=False)
class _Job:
    op: Op
    lane: int
    numbers: list[int]
    keys: list[bytes]
    group: int
    scheduled: float  # When its latency begins: when due or, in a closed loop, when submitted.
    begun: float  # When its lookups begin.
    counted: bool
    asked: list[int] = field(default_factory=list)
    """Positions of blocks without a final answer to their lookup."""
    found: list[int] = field(default_factory=list)
    compared: list[int] = field(default_factory=list)
    """Positions of submitted blocks to compare after the load."""


class Driver:
    """Runs phases on one system, and remembers its blocks between phases.

    Args:
        stopped: Polled; after it returns True, no more jobs begin.
        watch: Called a few times per second with the counts so far.
    """

    def __init__(
        self,
        system: System,
        rows: BlockRows,
        *,
        stopped: Callable[[], bool] = lambda: False,
        watch: Callable[[PhaseResult], None] | None = None,
    ) -> None:
        self.system = system
        self.held: dict[int, None] = {}
        self._rows = rows
        self._payload = rows.payload
        self._stopped = stopped
        self._watch = watch
        self._next_number = 0
        self._next_job = 0
        self._stored_bytes = 0

    def fill(self, workload: Workload) -> PhaseResult:
        """Store the working set."""
        missing = workload.groups - len(self.held)
        return _Phase(self, workload, store_share=1.0, jobs_max=max(0, missing)).run()

    def run(self, workload: Workload) -> PhaseResult:
        # Other systems of this process may need another one.
        sys.setswitchinterval(self.system.switch_s)
        phase = _Phase(self, workload, store_share=workload.mix.store_share, jobs_max=workload.ops_max, timed=True)
        return phase.run(the_spinner() if workload.spin else None)

    def verify(self, workload: Workload) -> PhaseResult:
        """Load the whole working set once and compare every byte."""
        return _Phase(self, workload, store_share=0.0, jobs_max=len(self.held), compare="all", once=True).run()

    def adopt(self, groups: int, blocks_per_job: int, first: int = 0) -> None:
        """Treat blocks numbered from ``first`` on as stored earlier with the same seed and sizes."""
        self._next_number = first + groups * blocks_per_job
        self.held = dict.fromkeys(range(first, self._next_number, blocks_per_job))

    def stored_keys(self) -> list[bytes]:
        """Return the keys of all blocks that were ever stored."""
        return [self._payload.key(number) for number in range(self._next_number)]


class _Phase:
    """One phase: its unfinished jobs and its counts."""

    def __init__(
        self, driver: Driver, workload: Workload, *, store_share: float, jobs_max: int, timed: bool = False,
        compare: str = "", once: bool = False,
    ) -> None:  # fmt: skip
        self._driver, self._workload, self._system = driver, workload, driver.system
        self._store_share, self._jobs_max, self._timed = store_share, jobs_max, timed
        self._compare = compare or (workload.verify if timed else "none")
        self._once = once or (timed and workload.cold and not driver.system.direct)
        self._random = random.Random(workload.seed)
        self._order: list[int] = []
        self._rounds = 0
        self._jobs: dict[int, _Job] = {}
        self._asking: list[tuple[int, _Job]] = []
        self._lanes = list(range(workload.jobs))
        self._begun = 0
        self._over = not timed and jobs_max == 0
        self._result = PhaseResult(workload.block_bytes)
        self._shown_at = 0.0

    def run(self, spinner: Spinner | None = None) -> PhaseResult:
        clock = time.perf_counter
        workload, result = self._workload, self._result
        started = clock()
        # Blocks that may be loaded only once are not used for the warm-up.
        self._count_from = started + (workload.warmup_s if self._timed and not self._once else 0.0)
        self._end = self._count_from + workload.duration_s if self._timed else float("inf")
        counting, cpu, steps = False, dict[str, float](), 0
        due = started
        while True:
            now = clock()
            if not counting and now >= self._count_from:
                counting, cpu, steps = True, cpu_seconds(), spinner.steps if spinner else 0
            self._over = self._over or now >= self._end or self._driver._stopped()
            while not self._over and self._lanes and due <= now:
                self._begin(due if workload.rate and self._timed else clock())
                due = due + 1 / workload.rate if workload.rate and self._timed else now
            busy = self._look_up() | self._collect()
            if self._over and not self._jobs and not self._asking:
                break
            self._show(clock())
            if spinner and counting:
                spinner.spin(_SPIN_S)
            elif not busy:
                # With a free lane, the next job is not due yet.
                until = min(due, self._end) if self._lanes else self._end
                self._system.wait(max(POLL_S, min(_WAIT_S, until - clock())))
        ended = clock()
        if workload.rate and self._timed:
            self._count_unbegun(due, min(ended, self._end))
        result.seconds = max(ended - self._count_from, 1e-9)
        result.cpu_s = {part: value - cpu[part] for part, value in cpu_seconds().items()} if counting else {}
        if spinner and counting:
            result.spin_rate = spinner.share_of(spinner.steps - steps, result.seconds)
        return result

    def _begin(self, scheduled: float) -> None:
        """Begin the next job, or end the phase if there is none."""
        workload, driver = self._workload, self._driver
        size = workload.blocks_per_job
        op: Op = "store" if self._random.random() < self._store_share else "load"
        group = driver._next_number if op == "store" else self._next_group()
        if group is None:
            self._over = True
            return
        if op == "store":
            if self._system.capacity_bytes and driver._stored_bytes >= self._system.capacity_bytes:
                self._result.notes.append(f"{self._system.name} evicts nothing: stores ended when it was full.")
                self._over = True
                return
            driver._next_number += size
            driver._stored_bytes += size * workload.block_bytes
        numbers = list(range(group, group + size))
        if op == "load" and self._timed and workload.hit_rate < 1:
            numbers = [n if self._random.random() < workload.hit_rate else n + _ABSENT for n in numbers]
        keys = [driver._payload.key(number) for number in numbers]
        counted = scheduled >= self._count_from
        job = _Job(op, self._lanes.pop(), numbers, keys, group, scheduled, scheduled, counted)
        driver._next_job += 1
        self._begun += counted
        if self._jobs_max and self._begun >= self._jobs_max:
            self._over = True
        if op == "store":
            slots = self._slots(job.lane)
            driver._rows.write(slots, numbers)
            if not workload.rate:
                job.scheduled = time.perf_counter()
            self._jobs[driver._next_job] = job
            self._system.submit("store", driver._next_job, keys, slots)
        else:
            job.asked = list(range(size))
            self._asking.append((driver._next_job, job))

    def _next_group(self) -> int | None:
        held = self._driver.held
        while True:
            while self._order:
                group = self._order.pop()
                if group in held:
                    return group
            if not held or (self._once and self._rounds):
                if self._rounds and not self._driver._stopped() and self._timed:
                    note = "Loads ended when every block of the working set had been loaded once (--cold)."
                    self._result.notes.append(note)
                return None
            self._rounds += 1
            self._order = list(held)
            self._random.shuffle(self._order)

    def _look_up(self) -> bool:
        """Look up the blocks of loading jobs; submit the jobs whose lookups are complete."""
        if not self._asking:
            return False
        waiting = []
        for job_id, job in self._asking:
            if not self._system.looks_up:
                job.found = [place for place in job.asked if job.numbers[place] < _ABSENT]
                job.asked = []
            else:
                self._ask(job_id, job)
            if job.asked:
                waiting.append((job_id, job))
            else:
                self._submit_load(job_id, job)
        answered = len(waiting) < len(self._asking)
        self._asking = waiting
        self._system.flush()
        return answered

    def _ask(self, job_id: int, job: _Job) -> None:
        still = []
        for place in job.asked:
            answer = self._system.lookup(job.keys[place], job_id)
            if answer is LookupResult.RETRY:
                still.append(place)
            elif answer is LookupResult.HIT:
                job.found.append(place)
        job.asked = still
        if not still and job.counted:
            counts = self._result.lookup
            counts.latencies.add(time.perf_counter() - job.begun)
            counts.jobs += 1
            counts.blocks += len(job.keys)
            self._result.hits += len(job.found)

    def _submit_load(self, job_id: int, job: _Job) -> None:
        found = sorted(job.found)
        if not found:
            self._lanes.append(job.lane)
            return
        job.numbers = [job.numbers[place] for place in found]
        job.keys = [job.keys[place] for place in found]
        slots = self._slots(job.lane)[: len(found)]
        if self._compare == "all":
            job.compared = list(range(len(found)))
        elif self._compare == "sample":
            job.compared = [self._random.randrange(len(found))]
        for place in job.compared:
            self._driver._rows.spoil(slots[place], job.numbers[place])
        if not (self._workload.rate and self._timed):
            job.scheduled = time.perf_counter()
        self._jobs[job_id] = job
        self._system.submit("load", job_id, job.keys, slots)

    def _collect(self) -> bool:
        ended = self._system.finished()
        now = time.perf_counter()
        for job_id, outcomes in ended:
            job = self._jobs.pop(job_id)
            self._count(job, outcomes, now)
            if job.op == "load":
                self._check(job, outcomes)
            self._lanes.append(job.lane)
        return bool(ended)

    def _count(self, job: _Job, outcomes: Sequence[Outcome], now: float) -> None:
        counts, driver = self._result.counts(job.op), self._driver
        ok = sum(outcome.ok for outcome in outcomes)
        if job.op == "store" and ok == len(outcomes):
            driver.held[job.group] = None
            if len(driver.held) > self._workload.groups:
                del driver.held[next(iter(driver.held))]
        if not job.counted:
            return
        counts.jobs += 1
        counts.blocks += ok
        misses = sum(outcome is Outcome.MISS for outcome in outcomes)
        self._result.misses += misses
        counts.errors.update(o.name.lower() for o in outcomes if not o.ok and o is not Outcome.MISS)
        # A job that failed immediately must not count as a fast one.
        if ok and ok + misses == len(outcomes):
            counts.latencies.add(now - job.scheduled)

    def _check(self, job: _Job, outcomes: Sequence[Outcome]) -> None:
        """Compare bytes; note wrong blocks."""
        rows, slots = self._driver._rows, self._slots(job.lane)
        for place, outcome in enumerate(outcomes):
            number = job.numbers[place]
            if outcome is Outcome.CORRUPT:
                self._note_wrong(job.keys[place], number, "its record on the medium does not verify")
            elif outcome.ok and place in job.compared:
                self._result.verified_blocks += 1
                if not rows.is_right(slots[place], number):
                    self._note_wrong(job.keys[place], number, "the loaded bytes differ from the stored ones")

    def _note_wrong(self, key: bytes, number: int, why: str) -> None:
        if len(self._result.wrong) < _WRONG_MAX:
            self._result.wrong.append(WrongBlock(key.hex(), number, why))

    def _count_unbegun(self, due: float, until: float) -> None:
        """Count due jobs that never began, with their waiting time."""
        rate = self._workload.rate or 1.0
        waiting = int(max(0.0, until - due) * rate)
        if self._driver._stopped() or self._jobs_max or not waiting:
            return
        counts = self._result.load if self._store_share < 1 else self._result.store
        counts.errors["not_begun"] += waiting
        # At most 2000 values are recorded, each for several jobs: waits decrease evenly from the first job to the last.
        step = max(1, waiting // 1000)
        for i in range(0, waiting, step):
            counts.latencies.add(until - due - i / rate, min(step, waiting - i))

    def _slots(self, lane: int) -> range:
        size = self._workload.blocks_per_job
        return range(lane * size, (lane + 1) * size)

    def _show(self, now: float) -> None:
        watch = self._driver._watch
        if watch is not None and now - self._shown_at >= _PROGRESS_S:
            self._shown_at = now
            self._result.seconds = max(now - self._count_from, 1e-9)
            watch(self._result)
