"""Third-party tiers for tests, loaded by vLLM's factory through ``module_path``; they keep blocks in a dict."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvstore.vllm.compat import make_event

MADE: list[DictTier] = []
"""All created tiers, in order."""


class DictTier(SecondaryTierManager):
    """Copies blocks within the submit calls."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, whole: bool = False, **more: Any
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, **more)
        self.whole = whole
        self.blocks: dict[bytes, bytes] = {}
        self.raises: set[str] = set()  # Names of methods that raise.
        self.calls: list[str] = []  # Names of the methods called.
        self.holds = False
        self.held: list[JobResult] = []
        self.gate = threading.Event()  # Event that drains wait for.
        self.gate.set()
        self.wanted: list[bytes] = []
        self.answers: dict[bytes, LookupResult] = {}
        self.lent: list[Any] = []
        self.events: list[Any] = []
        self._results: list[JobResult] = []
        self._rows = primary_kv_view.cast("B")
        self._row_bytes = primary_kv_view.strides[0]
        MADE.append(self)

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.raises:
            raise RuntimeError(f"{name} is broken")

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Request every block of a request, if configured."""
        self._called("on_new_request")
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL) if self.whole else RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        """Look up the dict."""
        self._called("lookup")
        return LookupResult.HIT if key in self.blocks else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Copy from the rows."""
        self._called("submit_store")
        for key, row in zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True):
            self.blocks[key] = bytes(self._row(row))
        self._end(JobResult(job_metadata.job_id, True))
        self.events.append(make_event(list(job_metadata.keys), "STORAGE", removed=False))

    def submit_load(self, job_metadata: Any) -> None:
        """Copy into the rows."""
        self._called("submit_load")
        for key, row in zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True):
            self._row(row)[:] = self.blocks[key]
        self._end(JobResult(job_metadata.job_id, True))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the results."""
        self._called("get_finished_jobs")
        results, self._results = self._results, []
        return results

    def serve_external_requests(self, parent: Any) -> None:
        """Look up and pin blocks, as a tier that serves other engines does."""
        self._called("serve_external_requests")
        if not self.wanted:
            return
        context = ReqContext(req_id="from-a-peer")
        if not self.answers:
            parent.on_new_request(context)
        self.answers = {key: parent.lookup(key, context) for key in self.wanted}
        if all(answer in (LookupResult.HIT, LookupResult.MISS) for answer in self.answers.values()):
            hits = [key for key, answer in self.answers.items() if answer is LookupResult.HIT]
            if hits:
                self.lent.append(parent.create_store_job(hits, context))
            parent.on_request_finished(context)
            self.wanted = []

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Record the call."""
        self._called("on_request_finished")

    def on_schedule_end(self, context: Any) -> None:
        """Record the call."""
        self._called("on_schedule_end")

    def has_pending_work(self) -> bool:
        """Return false."""
        self._called("has_pending_work")
        return False

    def take_events(self) -> Iterable[Any]:
        """Return and clear the events."""
        self._called("take_events")
        events, self.events = self.events, []
        return events

    def get_stats(self) -> Any:
        """Return no statistics."""
        self._called("get_stats")

    def drain_jobs(self) -> None:
        """Wait for the gate, then finish the held jobs."""
        self._called("drain_jobs")
        assert self.gate.wait(60)
        self._results += self.held
        self.held = []

    def shutdown(self) -> None:
        """Release the memory."""
        self._called("shutdown")
        self._rows.release()

    def end(self, job: Any) -> None:
        """Report the end of a loan's job."""
        self._end(JobResult(job.job_id, True))

    def row_of(self, job: Any, key: bytes) -> bytes:
        """Return the row of a lent block."""
        return bytes(self._row(job.chunk_ids[list(job.keys).index(key)]))

    def _end(self, result: JobResult) -> None:
        (self.held if self.holds else self._results).append(result)

    def _row(self, row: int) -> Any:
        return self._rows[row * self._row_bytes : (row + 1) * self._row_bytes]
