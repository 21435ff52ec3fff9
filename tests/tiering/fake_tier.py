"""A tier in a dict, whose jobs wait until the test runs them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvstore.primary.tier import PrimaryTier
from kvstore.tiers.base import SecondaryTierManager, TierStats
from kvstore.types import (
    BlockKey,
    JobResult,
    Locality,
    LookupResult,
    Medium,
    Outcome,
    RemovalCause,
    RequestContext,
    TierEvent,
    TransferJob,
)

ROW_BYTES = 16


def payload(key: BlockKey) -> bytes:
    """Return the content of a key."""
    return (key * ROW_BYTES)[:ROW_BYTES]


class FakeTier(SecondaryTierManager):
    """Holds blocks in a dict; copies bytes when a job is run, as a medium would, not when it is submitted."""

    medium = Medium.STORAGE
    locality = Locality.LOCAL

    def __init__(self, name: str, primary: PrimaryTier, capacity: int | None = None) -> None:
        self.name = name
        self.primary = primary
        self.capacity = capacity
        self.blocks: OrderedDict[BlockKey, bytes] = OrderedDict()  # Stored blocks.
        self.open: list[tuple[bool, TransferJob]] = []  # Jobs submitted and not run, as (is_load, job).
        self.done: list[tuple[bool, TransferJob, JobResult]] = []  # Jobs run and not yet returned.
        self.unknown: set[BlockKey] = set()  # Keys whose lookup returns RETRY.
        self.raising: set[str] = set()  # Names of methods that raise.
        self.calls: list[tuple[str, Any]] = []  # Names of the methods called, in order, with their first argument.
        self.events: list[TierEvent] = []
        self.drains = True
        # Return value of ``begin_epoch``; the blocks stay in any case, as with ``reset`` "keep".
        self.begins_epochs = True
        self.forgets: bool | None = True  # Return value of ``forget``.
        self.bytes_stored = 0  # Payload bytes written so far.
        self.on_report: Callable[[FakeTier, bool, TransferJob, JobResult], None] = lambda *_: None
        self.on_submit: Callable[[FakeTier, bool, TransferJob], None] = lambda *_: None

    def run(
        self,
        count: int | None = None,
        *,
        failing: Collection[BlockKey] = (),
        outcome: Outcome | None = None,
        index: int = 0,
        truthful: bool = True,
    ) -> int:
        """Run open jobs: blocks in ``failing`` fail, loads of blocks that are gone too; return how many jobs.

        ``outcome``: that of the blocks that fail; None if the results have no outcomes.
        """
        ran = 0
        while self.open and (count is None or ran < count):
            is_load, job = self.open.pop(index if index < len(self.open) else 0)
            pairs = zip(job.keys, job.slots, strict=True)
            good = [key for key, slot in pairs if self._move(is_load, key, slot, failing)]
            success = len(good) == len(job.keys)
            outcomes = () if outcome is None else [Outcome.OK if key in good else outcome for key in job.keys]
            told = good if truthful else ()
            self.done.append(
                (is_load, job, JobResult(job.job_id, success, told, len(good) * ROW_BYTES, outcomes=outcomes))
            )
            ran += 1
        return ran

    def lookup(self, key: BlockKey, ctx: RequestContext | None = None) -> LookupResult:
        """Look up the dict."""
        self._note("lookup", key)
        if key in self.unknown:
            return LookupResult.RETRY
        return LookupResult.HIT if key in self.blocks else LookupResult.MISS

    def submit_store(self, job: TransferJob) -> None:
        """Queue the job, even if this call raises, as a real tier may do."""
        self._submit("submit_store", False, job)

    def submit_load(self, job: TransferJob) -> None:
        """Queue the job."""
        self._submit("submit_load", True, job)

    def flush(self) -> None:
        """Do nothing."""
        self._note("flush", None)

    def get_finished(self) -> Sequence[JobResult]:
        """Return the jobs that were run."""
        self._note("get_finished", None)
        done, self.done = self.done, []
        for is_load, job, result in done:
            self.on_report(self, is_load, job, result)
        return [result for _, _, result in done]

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Make the keys the most recent."""
        self._note("touch", tuple(keys))
        for key in keys:
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause = RemovalCause.REMOVED) -> None:
        """Drop blocks."""
        self._note("remove", tuple(keys))
        for key in keys:
            if self.blocks.pop(key, None) is not None:
                self.events.append(TierEvent((key,), cause))

    def forget(self, prefix: bytes) -> bool | None:
        """Drop the blocks immediately if ``forgets`` is true."""
        self._note("forget", prefix)
        if self.forgets:
            self.remove([key for key in self.blocks if key.startswith(prefix)])
        return self.forgets

    def begin_epoch(self) -> bool:
        """Record the call, and keep all blocks."""
        self._note("begin_epoch", None)
        return self.begins_epochs

    def on_request_finished(self, ctx: RequestContext) -> None:
        """Record the call."""
        self._note("on_request_finished", ctx.request_id)

    def take_events(self) -> Sequence[TierEvent]:
        """Return and clear the events."""
        self._note("take_events", None)
        events, self.events = self.events, []
        return events

    def stats(self) -> TierStats:
        """Return the number of blocks."""
        self._note("stats", None)
        used_bytes, capacity_bytes = len(self.blocks) * ROW_BYTES, (self.capacity or 0) * ROW_BYTES
        return TierStats(self.name, blocks=len(self.blocks), used_bytes=used_bytes, capacity_bytes=capacity_bytes)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Run all jobs, unless the tier is stuck."""
        self._note("drain", None)
        if self.drains:
            self.run()
        return self.drains

    def close(self, timeout_s: float | None = None) -> None:
        """Record the call."""
        self._note("close", None)

    def submitted(self, is_load: bool) -> list[BlockKey]:
        """Return the keys of the open jobs of one direction."""
        return [key for load, job in self.open if load is is_load for key in job.keys]

    def _submit(self, method: str, is_load: bool, job: TransferJob) -> None:
        self.open.append((is_load, job))
        self.on_submit(self, is_load, job)
        self._note(method, tuple(job.keys))

    def _note(self, method: str, argument: Any) -> None:
        self.calls.append((method, argument))
        if method in self.raising:
            raise RuntimeError(f"{self.name}: {method}")

    def _move(self, is_load: bool, key: BlockKey, slot: int, failing: Collection[BlockKey]) -> bool:
        row = self.primary.row(slot)
        if key in failing or (is_load and key not in self.blocks):
            if is_load:
                row[:] = b"\xee" * ROW_BYTES  # A failed read may leave such bytes.
            return False
        if is_load:
            row[:] = self.blocks[key]
            return True
        if key not in self.blocks:
            self.bytes_stored += ROW_BYTES
            self.events.append(TierEvent((key,)))
        self.blocks[key] = bytes(row)
        self.blocks.move_to_end(key)
        while self.capacity is not None and len(self.blocks) > self.capacity:
            gone, _ = self.blocks.popitem(last=False)
            self.events.append(TierEvent((gone,), RemovalCause.EVICTED))
        return True
