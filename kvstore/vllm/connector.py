"""vLLM's ``OffloadingConnector``, with the objects and calls that kvstore needs beyond its interface."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any, Final

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import PrepareStoreOutput
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvstore.errors import ConfigError
from kvstore.vllm.compat import (
    cut_hashes_with_tokens,
    flush_first,
    forget_freed,
    forget_released,
    is_one_of_several,
    may_load,
    note_allocated,
    own_engine_id,
    replace_tables,
    without_new_loads,
)
from kvstore.vllm.metrics import UNPROVEN_REQUESTS
from kvstore.vllm.options import tier_types, uses_huge_pages
from kvstore.vllm.proof import CAUSES, FAILED_LOAD, Doubt, check_engine, doubt_of_engine, doubt_of_request
from kvstore.vllm.region import use_locked_region

logger = logging.getLogger("kvstore.vllm.connector")

_ACCOUNT: Final = "kvstore_account"
"""Name of an account in the ``kv_transfer_params`` of an answer. Not ``"kvstore"``, because routers pass an answer's
parameters on with the next request, where that name has a policy."""

_entered: ContextVar[EngineContext] = ContextVar("kvstore_engine")


class EngineContext:
    """One engine, as its connector knows it, in the scheduler's process or a worker's.

    An ``OffloadingConfig``, which vLLM passes to a spec, lacks most fields that determine the bytes of a block: the
    model's text configuration with its overrides (RoPE scaling), revision, quantization, hash algorithm. Without these
    fields, tiers have served blocks of another model with the same name.

    Args:
        engine_config: ``VllmConfig``.
        kv_cache_config: ``KVCacheConfig``; None in tests without a model.
    """

    def __init__(self, engine_config: Any, kv_cache_config: Any = None) -> None:
        self.engine_config = engine_config
        self.kv_cache_config = kv_cache_config
        self.scheduler: Any = None  # ``OffloadingConnectorScheduler``, once it is made.
        self.worker: Any = None  # ``OffloadingConnectorWorker``, once it is made.
        self.request: Any = None  # vLLM's ``Request`` that is being added.
        self.load_failures: Any = None  # :class:`kvstore.vllm.copies.LoadFailures` of a worker.
        # Unproven requests by cause, since the last report of metrics.
        self.doubts = Counter(dict.fromkeys(CAUSES, 0))
        # Called with the ``SchedulerOutput`` of each step, after its metadata was made.
        self.on_scheduled: list[Callable[[Any], object]] = []
        # Called after consumers of events were told that the engine has no blocks, on the device or in a tier.
        self.on_cleared: list[Callable[[], object]] = []

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Make this the engine of all specs and tiers created inside."""
        token = _entered.set(self)
        try:
            yield
        finally:
            _entered.reset(token)


def current_engine() -> EngineContext:
    """Return the engine whose connector is being made.

    Raises:
        ConfigError: The connector is not kvstore's, so the engine's configuration is unknown.
    """
    engine = _entered.get(None)
    if engine is None or engine.engine_config is None:
        raise ConfigError(
            "kvstore has no configuration of this engine, so it can't tell this model's blocks from others. Expected "
            '"kv_connector": "KVStoreConnector". If the variable VLLM_PLUGINS leaves kvstore out, also give '
            '"kv_connector_module_path": "kvstore.vllm".'
        )
    return engine


class KVStoreConnector(OffloadingConnector):
    """vLLM's ``OffloadingConnector`` for engines whose spec or tiers are kvstore's; the same for all others."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.engine = EngineContext(vllm_config, kv_cache_config)
        check_engine(vllm_config)
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        if transfer is not None:
            transfer.engine_id = own_engine_id(transfer.engine_id)
        _lock_region(transfer, has_workers=kv_cache_config is not None)
        with self.engine.entered():
            super().__init__(vllm_config, role, kv_cache_config)
        self.engine.scheduler, self.engine.worker = self.connector_scheduler, self.connector_worker
        self._doubt: Doubt | None = None  # Concerns all requests.
        self._logged: set[Doubt] = set()
        self._answers = not is_one_of_several()  # Whether it may add to the answers of requests.
        self._loads = True
        self._accepts_all = True  # Whether the manager accepts stores without a check, as no request was unproven.
        if self.connector_scheduler is not None:
            self._doubt, self._loads = doubt_of_engine(vllm_config, kv_cache_config), may_load(transfer)
        if self._doubt is not None:
            self._logged.add(self._doubt)
            logger.warning("kvstore stores and loads nothing for this engine: %s.", self._doubt.text)
        if not self._loads:
            logger.warning("kvstore loads nothing, as 'kv_role' is 'kv_producer'; 'kv_both' stores and loads.")
        if self.connector_worker is not None:
            flush_first(self)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Notice ``AllBlocksCleared``, which reaches consumers even if only the device's cache was reset."""
        super().bind_kv_cache_manager(kv_cache_manager)
        take_events = kv_cache_manager.take_events

        def with_notice() -> Any:
            events = take_events()
            if any(isinstance(event, AllBlocksCleared) for event in events or ()):
                for call in self.engine.on_cleared:
                    call()
            return events

        if self.engine.on_cleared:
            kv_cache_manager.take_events = with_notice

    def on_new_request(self, request: Any) -> None:
        """Show the request itself, whose salt and adapter vLLM does not pass to a manager."""
        cut_hashes_with_tokens(request, self.connector_scheduler.config.tokens_per_hash)
        self.engine.request = request
        try:
            super().on_new_request(request)
        finally:
            self.engine.request = None
        self._judge(request)

    def _judge(self, request: Any) -> None:
        """Mark a request, or a session at a new turn, if its blocks are not proven to be right."""
        context = self._context(request)
        if context.get_state(Doubt) is None and (doubt := self._doubt or doubt_of_request(request)) is not None:
            self._mark(context, doubt)

    def _mark(self, context: Any, doubt: Doubt) -> None:
        if doubt not in self._logged:
            self._logged.add(doubt)
            logger.warning(
                "kvstore stores and loads nothing of some requests: %s. Further ones are only counted (%s).",
                doubt.text,
                UNPROVEN_REQUESTS,
            )
        self.engine.doubts[doubt.cause] += 1
        if self._accepts_all:
            self._accepts_all = False
            _accept_proven_stores(self.connector_scheduler.manager)
        context.set_state(doubt)

    def update_connector_output(self, connector_output: Any) -> None:
        """Doubt the requests that a step computed with blocks whose load failed, before their stores end."""
        if failed := connector_output.invalid_block_ids:
            for status in self.connector_scheduler._req_status.values():
                is_affected = any(not failed.isdisjoint(group.block_ids) for group in status.group_states)
                if is_affected and status.req_context.get_state(Doubt) is None:
                    self._mark(status.req_context, FAILED_LOAD)
        super().update_connector_output(connector_output)

    def _context(self, request: Any) -> Any:
        return self.connector_scheduler._req_status[request.request_id].req_context

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, *args: Any, **options: Any
    ) -> tuple[int | None, bool]:
        """Return the number of tokens to load; none for an unproven request, or in an engine that only stores."""
        if request.resumable:
            self._judge(request)
        context = self._context(request)
        if context.get_state(Doubt) is not None or not self._loads:
            if (exclude := getattr(self.connector_scheduler.manager, "exclude", None)) is not None:
                config = self.connector_scheduler.config
                tokens = max(0, request.num_tokens - num_computed_tokens)
                exclude(context, tokens // (config.tokens_per_hash * config.blocks_per_chunk))
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens, *args, **options)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Answer a request that asked where its blocks came from."""
        return self._answered(request, *super().request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Answer a request that asked where its blocks came from."""
        return self._answered(request, *super().request_finished_all_groups(request, block_ids))

    def _answered(
        self, request: Any, is_delayed: bool, params: dict[str, Any] | None
    ) -> tuple[bool, dict[str, Any] | None]:
        """Add the account of a request to the parameters of its answer, if it asked for that."""
        account = getattr(self.connector_scheduler.manager, "account", None)
        if account is None or not self._answers or request.request_id not in self.connector_scheduler._req_status:
            return is_delayed, params
        found = account(self._context(request))
        return is_delayed, params if found is None else {**(params or {}), _ACCOUNT: found}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the device's blocks of a request, also of one that another connector loads."""
        if num_external_tokens == 0:  # Others are noted by vLLM.
            note_allocated(self.connector_scheduler, blocks)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Judge sessions at their new turns, before their blocks are stored, and report the step."""
        for new in scheduler_output.scheduled_new_reqs:
            request = self.connector_scheduler._req_status[new.req_id].req
            if request.resumable:
                self._judge(request)
        forget_released(self.connector_scheduler, scheduler_output)
        replace_tables(self.connector_scheduler, scheduler_output)
        with without_new_loads(self.connector_scheduler, scheduler_output):
            meta = super().build_connector_meta(scheduler_output)
        for call in self.engine.on_scheduled:
            call(scheduler_output)
        return meta

    def reset_cache(self) -> bool | None:
        """Empty the primary tier, after which nothing is stored from blocks that running requests have freed."""
        forget_freed(self.connector_scheduler)
        return super().reset_cache()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the device's blocks of loads that were not made."""
        failures = self.engine.load_failures
        return super().get_block_ids_with_load_errors() if failures is None else failures.take_blocks()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return ended loads and stores, and the requests whose loads were not made."""
        results = super().get_transfer_results(finished_req_ids)
        failures = self.engine.load_failures
        failed = set() if failures is None else failures.take_requests(results.finished_recving)
        return dataclasses.replace(results, failed_recving=results.failed_recving | failed) if failed else results


def _lock_region(transfer: Any, *, has_workers: bool) -> None:
    """Let vLLM's own spec with a kvstore tier allocate its region as kvstore's spec does."""
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    types = tier_types()
    if any(tier.get("type") in types for tier in extra.get("secondary_tiers", ())):
        use_locked_region(transfer.engine_id, huge_pages=uses_huge_pages(extra), has_workers=has_workers)


def _accept_proven_stores(manager: Any) -> None:
    """Let a manager, of kvstore or of vLLM, accept no block of an unproven request, and drop those being copied."""
    prepare_store, complete_store = manager.prepare_store, manager.complete_store

    def prepare_proven(keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        if req_context.get_state(Doubt) is not None:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        return prepare_store(keys, req_context)

    def complete_proven(keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        complete_store(keys, req_context, success and req_context.get_state(Doubt) is None)

    manager.prepare_store, manager.complete_store = prepare_proven, complete_proven
