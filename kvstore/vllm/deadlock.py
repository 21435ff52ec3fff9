"""The manager for vLLM before 0.31, whose scheduler can deadlock."""

from __future__ import annotations

from collections.abc import Collection

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import (
    LookupResult,
    PrepareStoreOutput,
    ReqContext,
    ScheduleEndContext,
)

from kvstore.vllm.copies import Slots
from kvstore.vllm.manager import KVStoreOffloadingManager

__all__ = ["QUIET_STEPS", "DeadlockBreakingManager", "can_deadlock"]

QUIET_STEPS = 64
"""Steps without progress after which lookups are deferred. A deadlocked engine makes this many steps in milliseconds.
In normal decoding, there are rarely this many steps between two chunks."""


def can_deadlock() -> bool:
    """Whether the installed scheduler can deadlock. Since 0.31, it first resumes requests that hold blocks."""
    return not hasattr(Scheduler, "_holds_kv_blocks")


class DeadlockBreakingManager(KVStoreOffloadingManager):
    """A manager that resolves a deadlock of the scheduler of vLLM 0.28 to 0.30.

    That scheduler stops at the first waiting request whose blocks do not fit. Requests behind it, whose loads have
    ended, may hold the missing blocks. If no request is running, none of them is ever scheduled (vllm#45388,
    vllm#57841).

    Each waiting request without blocks causes a lookup, and after a deferred lookup the scheduler continues with the
    next request. After ``QUIET_STEPS`` steps without progress, every second step therefore defers all lookups, so that
    requests that hold blocks are scheduled. A request that needs no lookup (all its full chunks are on the device) can
    still block the queue.
    """

    _steps_without_progress = 0

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Return the base class's answer, or defer the lookup."""
        quiet = self._steps_without_progress
        if quiet > QUIET_STEPS and quiet % 2:
            return LookupResult.RETRY
        return super().lookup(key, req_context)

    def prepare_load(self, keys: Collection[bytes], req_context: ReqContext) -> Slots:
        """Pin blocks for a copy to the device. Counts as progress, because a request was admitted."""
        self._steps_without_progress = 0
        return super().prepare_load(keys, req_context)

    def prepare_store(self, keys: Collection[bytes], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Find room for blocks. Counts as progress, because a request has computed them."""
        self._steps_without_progress = 0
        return super().prepare_store(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Record the end of a request, which frees its blocks."""
        self._steps_without_progress = 0
        super().on_request_finished(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Count the step unless a request was scheduled for the first time."""
        self._steps_without_progress = 0 if context.new_req_ids else self._steps_without_progress + 1
        super().on_schedule_end(context)
