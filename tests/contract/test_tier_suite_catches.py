"""The tier suite finds defects of tiers: with one broken part, the right check fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstore.codec.record import RecordCodec, RecordHeader
from kvstore.runtime.breaker import Breaker
from kvstore.runtime.buffers import SlotBuffers
from kvstore.tiers.async_tier import AsyncTier
from kvstore.tiers.block_mover import BlockMover
from kvstore.tiers.health import TierHealth
from kvstore.tiers.presence import FailedLoads, Presence
from kvstore.tiers.tier_io import TierIO
from kvstore.types import JobResult, LookupResult
from tests.contract.failures import failure_of
from tests.contract.memory import MemoryTierSuite

_get_finished = AsyncTier.get_finished
_lookup = AsyncTier.lookup
_load = BlockMover._load


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _accept_all(codec: RecordCodec, key: bytes, header: memoryview, payload: memoryview, *rest: Any) -> RecordHeader:
    size = payload.nbytes
    return RecordHeader(1, 0, header.nbytes, size, size, b"", b"", b"", 0, 0, 0, b"", b"")


def _report_twice(tier: AsyncTier) -> Sequence[JobResult]:
    return [*(results := _get_finished(tier)), *results]


def _report_all_as_loaded(tier: AsyncTier) -> Sequence[JobResult]:
    return [
        JobResult(result.job_id, True, result.successful_keys, result.size_bytes, result.seconds, result.outcomes)
        for result in _get_finished(tier)
    ]


def _forget_every_third(tier: AsyncTier) -> Sequence[JobResult]:
    return [result for result in _get_finished(tier) if result.job_id % 3]


def _ask_again_first(tier: AsyncTier, key: bytes, ctx: Any = None) -> LookupResult:
    asked = tier.__dict__.setdefault("asked", set())
    if key not in asked:
        asked.add(key)
        return LookupResult.RETRY
    return _lookup(tier, key, ctx)


def _raise_for_odd_keys(tier: AsyncTier, key: bytes, ctx: Any = None) -> LookupResult:
    return _lookup(tier, key + b"", ctx)


async def _load_next_slot(mover: BlockMover, part: Any) -> None:
    part.slots = [slot + 1 for slot in part.slots]
    await _load(mover, part)


# A broken part (its owner, its name, its replacement), and a check that must fail with it.
DEFECTS: list[tuple[str, type[Any], str, Any, str]] = [
    ("unverified", RecordCodec, "check", _accept_all, "test_a_block_damaged_on_the_medium_is_lost_once"),
    ("unverified", RecordCodec, "check", _accept_all, "test_a_block_damaged_on_its_way_is_not_loaded"),
    ("unverified", RecordCodec, "check", _accept_all, "test_no_fault_causes_wrong_bytes"),
    ("reports-twice", AsyncTier, "get_finished", _report_twice, "test_every_job_is_reported_once_and_right"),
    ("forgets-reports", AsyncTier, "get_finished", _forget_every_third, "test_close_reports_running_jobs"),
    ("all-or-nothing", AsyncTier, "get_finished", _report_all_as_loaded, "test_a_partial_load_is_exact"),
    ("asks-twice", AsyncTier, "lookup", _ask_again_first, "test_unknown_blocks_are_misses"),
    ("raises", AsyncTier, "lookup", _raise_for_odd_keys, "test_invalid_arguments_raise_nothing"),
    ("wrong-slot", BlockMover, "_load", _load_next_slot, "test_every_job_is_reported_once_and_right"),
    ("no-breaker", Breaker, "record_failure", _always(False), "test_a_failing_medium_is_avoided_until_it_recovers"),
    ("no-store-breaker", Breaker, "record_failure", _always(False), "test_failing_stores_stop_until_a_trial_succeeds"),
    ("never-closes", TierHealth, "note_probed", _always(None), "test_a_failing_medium_is_avoided_until_it_recovers"),
    ("no-shedding", AsyncTier, "_admits_store", _always(True), "test_stores_are_shed_and_loads_are_not"),
    ("sheds-all", AsyncTier, "_admits_store", _always(False), "test_stored_blocks_are_hits_and_load_back"),
    ("keeps-views", SlotBuffers, "release", _always(None), "test_close_reports_running_jobs"),
    ("no-drain", AsyncTier, "drain", _always(True), "test_drain_waits_for_all_jobs"),
    ("no-events", AsyncTier, "take_events", _always(()), "test_events_report_stored_and_evicted_blocks"),
    ("evictions-unheard", TierIO, "_on_removal", _always(None), "test_evicted_blocks_are_misses"),
    ("hits-all", Presence, "holds", _always(True), "test_unknown_blocks_are_misses"),
    ("tries-again-at-once", FailedLoads, "blocks", _always(False), "test_one_failed_block_fails_alone"),
]


@pytest.mark.parametrize(
    ("owner", "name", "instead", "check"),
    [pytest.param(*defect, id=f"{label}-{defect[-1]}") for label, *defect in DEFECTS],
)
def test_the_suite_finds_the_defect(
    owner: type[Any], name: str, instead: Any, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tier with a broken part fails the matching check, and the failure names the seed."""
    monkeypatch.setattr(owner, name, instead)
    suite = MemoryTierSuite()
    suite.timeout_s = 1.0
    error = failure_of(lambda: getattr(suite, check)(), (AssertionError, TypeError))
    assert any("KVSTORE_TEST_SEED=" in note for note in error.__notes__), "the failure does not name its seed"
