"""All differences between vLLM 0.31 and 0.33.

Each difference is detected from signatures, fields and names of the installed package, never from its version number,
so that other versions work too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import importlib
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache, wraps
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_offload.base import Medium as VllmMedium
from vllm.v1.kv_offload.base import OffloadingEvent, get_offload_block_hash
from vllm.v1.kv_offload.config import OffloadingConfig

from kvstore.types import Locality, Medium
from kvstore.vllm.region import LockedRegion

_EVENTS_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.events"


def request_ends(req_context: Any) -> Mapping[bytes, int]:
    """Return a request's keys with the ends of their blocks, in tokens."""
    return getattr(req_context, "_offload_key_positions", None) or {}


def request_params(req_context: Any) -> Any:
    """Return a request's parameters for kvstore, unchecked; None if it has none.

    These are the value ``"kvstore"`` of its ``kv_transfer_params``, overridden by the payloads of the ``"kvstore"``
    actions in its ``kv_hints`` (0.32 and later), in order.
    """
    params = (req_context.kv_transfer_params or {}).get("kvstore")
    for action in getattr(getattr(req_context, "kv_hints", None), "actions", ()):
        if action.action_type == "kvstore" and (params is None or isinstance(params, Mapping)):
            known = action.action_version == "1"
            shown = f"a kv_hints action of version {action.action_version!r} (known: '1')"
            params = {**(params or {}), **action.payload} if known else shown
    return params


def scheduled_tokens(scheduler_output: Any) -> list[tuple[int, int]] | None:
    """Return tokens and preceding tokens of each request with more than one token in a step; None for an empty step.

    ``scheduler_output``: vLLM's ``SchedulerOutput``.
    """
    counts: Mapping[str, int] = scheduler_output.num_scheduled_tokens
    if not counts:
        return None
    if scheduler_output.total_num_scheduled_tokens == len(counts):
        return []
    cached = scheduler_output.scheduled_cached_reqs
    before = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    before.update((new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs)
    return [(count, before.get(request_id, 0)) for request_id, count in counts.items() if count > 1]


CLIENTS_NAME = "client-"
"""Begins the identifiers of media that a client has named."""

_CLIENTS_HASHES = "kvstore_hashes_of_client"
"""Parameter of a request whose client gave hashes of media. Their identifiers stay: encoder caches share them."""


class _ContentHash(str):
    """A hash that vLLM's front end has made from a medium itself."""


def mark_media_of_clients() -> None:
    """Let vLLM's front end mark media that a client has named, and requests with media that it has not hashed itself.

    vLLM hashes a client's name together with options of the media's processor, and the processors of some models hash
    the result again. It then looks like a hash of the content. ``/inference/v1/generate`` takes hashes as they are.
    """
    named, hashed, processed = (
        ProcessorInputs.get_mm_hashes,
        MultiModalHasher.hash_kwargs,
        InputProcessor.process_inputs,
    )
    if hasattr(named, "__wrapped__"):
        return

    @wraps(named)
    def marked(inputs: ProcessorInputs, *args: Any, **options: Any) -> Any:
        found = named(inputs, *args, **options)
        for modality, names in (inputs.mm_uuid_items or {}).items():
            pairs = zip(found.get(modality, ()), names, strict=False)
            found[modality] = [hash_ if name is None else CLIENTS_NAME + hash_ for hash_, name in pairs]
        return found

    @wraps(hashed)
    def marked_again(*args: Any, **parts: Any) -> str:
        is_marked = any(isinstance(part, str) and part.startswith(CLIENTS_NAME) for part in parts.values())
        found = hashed(*args, **parts)
        return CLIENTS_NAME + found if is_marked and "model_id" not in parts else _ContentHash(found)

    @wraps(processed)
    def marked_request(*args: Any, **options: Any) -> Any:
        request = processed(*args, **options)
        for feature in request.mm_features or ():
            if isinstance(feature.mm_hash, _ContentHash):
                # Messages to the engine have no subclasses.
                feature.identifier, feature.mm_hash = str(feature.identifier), str(feature.mm_hash)
            elif (sampling := request.sampling_params) is not None:
                sampling.extra_args = {**(sampling.extra_args or {}), _CLIENTS_HASHES: True}
            else:
                pooling = request.pooling_params
                pooling.extra_kwargs = {**(pooling.extra_kwargs or {}), _CLIENTS_HASHES: True}
        return request

    ProcessorInputs.get_mm_hashes = marked
    MultiModalHasher.hash_kwargs = staticmethod(marked_again)
    InputProcessor.process_inputs = marked_request


def has_hashes_of_client(request: Any) -> bool:
    """Return whether the front end has marked a request of vLLM because its client gave hashes of media."""
    extra = request.sampling_params.extra_args if request.sampling_params else request.pooling_params.extra_kwargs
    return _CLIENTS_HASHES in (extra or {})


def replace_tables(scheduler: Any, scheduler_output: Any) -> None:
    """Forget the device's blocks of requests that a step schedules as new, and the keys of tokens that were cut.

    A session is scheduled as new in each of its turns, with all of its blocks. Up to 0.32, vLLM appends them to those
    of the turn before, and would store later turns from wrong blocks.

    ``scheduler``: an ``OffloadingConnectorScheduler``, which then handles ``scheduler_output``.
    """
    for new in scheduler_output.scheduled_new_reqs:
        status = scheduler._req_status[new.req_id]
        hashes = status.req.block_hashes
        for config, group in zip(scheduler.config.kv_group_configs, status.group_states, strict=True):
            group.block_ids.clear()
            keys, step = group.offload_keys, config.hashes_per_chunk
            while keys and get_offload_block_hash(keys[-1]) not in hashes[step * len(keys) - 1 : step * len(keys)]:
                keys.pop()
                group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, len(keys))


def cut_hashes_with_tokens(request: Any, tokens_per_hash: int) -> None:
    """Let a session lose the hashes of blocks whose last tokens its next turn replaces.

    Each turn of a session drops the last token that was sampled before. vLLM 0.31 keeps the hash of a block with it.

    Args:
        request: vLLM's ``Request``, which is being added.
        tokens_per_hash: Tokens of a hash.
    """
    hasher = request._block_hasher
    if hasher is None or not request.resumable:
        return

    def hashes(session: Any) -> Any:
        # A turn has been appended to the prompt, and is not yet counted.
        if len(session.prompt_token_ids) != session.num_prompt_tokens:
            del session.block_hashes[session.num_computed_tokens // tokens_per_hash :]
        return hasher(session)

    request._block_hasher = hashes


def note_allocated(scheduler: Any, blocks: Any) -> None:
    """Note that device blocks have a new owner, so that unfinished stores of the old one are flushed first.

    Up to 0.32, vLLM does not note blocks that another connector of a ``MultiConnector`` loads.

    Args:
        scheduler: An ``OffloadingConnectorScheduler``.
        blocks: The ``KVCacheBlocks`` of a request.
    """
    scheduler._current_batch_allocated_block_ids.update(
        block.block_id for group in blocks.blocks for block in group if block.block_id
    )


def forget_released(scheduler: Any, scheduler_output: Any) -> None:
    """Forget the device's blocks that preempted and ended requests released earlier, before anything is stored.

    A preempted request can still end, with a token of a step under way. And once a request has ended, vLLM stores the
    end of its windows, some of which it may have released, for instance beyond ``max_offload_tokens``.

    Args:
        scheduler: An ``OffloadingConnectorScheduler``, which then handles ``scheduler_output``.
        scheduler_output: vLLM's ``SchedulerOutput`` of the step.
    """
    for name in scheduler_output.preempted_req_ids or ():
        for group in scheduler._req_status[name].group_states if name in scheduler._req_status else ():
            group.block_ids.clear()
    for name in scheduler_output.finished_req_ids or ():
        status = scheduler._req_status.get(name)
        for index in scheduler._sliding_window_groups if status is not None else ():
            config, group = scheduler.config.kv_group_configs[index], status.group_states[index]
            # Of states, vLLM does not look at earlier blocks again.
            window = getattr(config.kv_cache_spec, "sliding_window", None) or status.req.num_computed_tokens
            # The last step, which computed at least one token, began with the blocks of a window.
            released = max(0, status.req.num_computed_tokens - window) // config.tokens_per_block
            _forget_offered(scheduler, group, released)


def forget_freed(scheduler: Any) -> None:
    """Forget the device's blocks that requests may have freed: those of windows that have been offered for storing.

    A reset lets vLLM offer all blocks again, also freed ones, which may hold another request's tokens.

    ``scheduler``: an ``OffloadingConnectorScheduler`` before its reset.
    """
    for status in scheduler._req_status.values():
        for index in scheduler._sliding_window_groups:
            group = status.group_states[index]
            _forget_offered(scheduler, group, len(group.block_ids))


def _forget_offered(scheduler: Any, group: Any, count: int) -> None:
    """Forget those of the first ``count`` blocks of a group of layers that have been offered for storing."""
    offered = group.block_ids[: min(count, group.next_stored_chunk_idx * scheduler.config.blocks_per_chunk)]
    group.block_ids[: len(offered)] = [0] * len(offered)


@contextlib.contextmanager
def without_new_loads(scheduler: Any, scheduler_output: Any) -> Iterator[None]:
    """Hide the loads that begin in a step from vLLM's flush of preempted requests.

    A reset may preempt a request whose blocks are loaded again in the same step. Up to 0.32, this ends the engine.

    Args:
        scheduler: An ``OffloadingConnectorScheduler``.
        scheduler_output: vLLM's ``SchedulerOutput`` of the step.
    """
    loads = scheduler._current_batch_load_jobs.keys()
    preempted = [scheduler._req_status.get(name) for name in scheduler_output.preempted_req_ids or ()]
    hidden = [(status, status.transfer_jobs & loads) for status in preempted if status is not None]
    for status, jobs in hidden:
        status.transfer_jobs -= jobs
    yield
    for status, jobs in hidden:
        status.transfer_jobs |= jobs


_MULTI_CONNECTOR = "_connectors", "handle_preemptions"
"""Attributes of vLLM's ``MultiConnector``."""


def is_one_of_several() -> bool:
    """Return whether a ``MultiConnector`` is creating the calling connector.

    It ends the engine if two of its connectors add to the answer of a request: any two up to 0.31, two with the same
    names later.
    """
    return _caller_with(*_MULTI_CONNECTOR) is not None


def flush_first(connector: Any) -> None:
    """Let the ``MultiConnector`` that is creating a worker's connector flush those of its type before others begin.

    vLLM has no rule for the order, and another connector may begin to fill a block while this one flushes. One
    ``MultiConnector`` may contain another.
    """
    outermost = next(reversed([*_callers_with(*_MULTI_CONNECTOR)]), None)
    if outermost is None:
        return

    def handle_preemptions(metadata: Any) -> None:
        for each, part in sorted(parts(outermost, metadata), key=lambda part: not isinstance(part[0], type(connector))):
            each.handle_preemptions(part)

    def parts(each: Any, metadata: Any) -> Iterator[tuple[Any, Any]]:
        if not hasattr(each, "_connectors"):
            yield each, metadata
            return
        for inner, part in zip(each._connectors, metadata.metadata, strict=True):
            yield from parts(inner, part)

    outermost.handle_preemptions = handle_preemptions


def may_load(transfer: Any) -> bool:
    """Return whether loads are safe in an engine with the ``KVTransferConfig`` of the connector under construction.

    If its role, or that of the ``MultiConnector`` around it, is ``kv_producer``, vLLM gives a device block to another
    request while a step of the first one may still write to it.
    """
    outermost = next(reversed([*_callers_with(*_MULTI_CONNECTOR)]), None)
    return bool((transfer if outermost is None else outermost._kv_transfer_config).is_kv_consumer)


def own_engine_id(engine_id: str) -> str:
    """Return an id of the engine for the connector under construction alone.

    vLLM gives all connectors of a ``MultiConnector`` the engine's id, and names their shared regions by it.
    """
    places = [len(each._connectors) for each in _callers_with(*_MULTI_CONNECTOR)]
    return "-".join([engine_id, *map(str, reversed(places))])


def unfilled_event(keys: Sequence[bytes]) -> OffloadingEvent | None:
    """Build the event of blocks of the primary tier that were never complete; None before 0.33.

    vLLM does not publish it, and drops the payloads that it keeps for these blocks.
    """
    if not keys or "metadata_only" not in _field_names(OffloadingEvent):
        return None
    return OffloadingEvent(keys=list(keys), medium=VllmMedium.CPU, removed=True, metadata_only=True)


def make_event(keys: Sequence[bytes], medium: Any, *, removed: bool, locality: Any = None) -> OffloadingEvent:
    """Build an ``OffloadingEvent``.

    It has no ownership: Dynamo's router drops events with another one than those that it knows.

    Args:
        medium: vLLM's ``Medium``.
        removed: Whether the blocks were removed (otherwise stored).
        locality: vLLM's ``Locality``; None for the primary tier.
    """
    # Each of our BlockStored events is eventually followed by a BlockRemoved.
    expected = not removed
    return OffloadingEvent(
        keys=list(keys), medium=medium, removed=removed, locality=locality, removal_expected=expected
    )


def poll_briefly() -> None:
    """Make vLLM's worker process that calls this sleep a millisecond after its last message, not a second.

    On the CPU platform, a worker that polls takes a core from another that computes.
    """
    process = _caller_with("rpc_broadcast_mq", "worker_busy_loop")
    condition: Any = getattr(getattr(process, "rpc_broadcast_mq", None), "_spin_condition", None)
    if getattr(condition, "busy_loop_s", None):
        condition.busy_loop_s = 0.001


def leave_zeros_out() -> None:
    """Leave zeros out of the line in which vLLM logs the metrics of its connector. Exported metrics keep them."""
    reduce = OffloadingConnectorStats.reduce
    if hasattr(reduce, "__wrapped__"):
        return

    @wraps(reduce)
    def nonzero(stats: OffloadingConnectorStats) -> dict[str, int | float]:
        return {name: value for name, value in reduce(stats).items() if value}

    OffloadingConnectorStats.reduce = nonzero


def _caller_with(*names: str) -> Any:
    """Return the nearest calling object with these attributes; None if there is none.

    vLLM gives a connector neither its engine nor its worker process. Callers must handle their absence.
    """
    return next(_callers_with(*names), None)


def _callers_with(*names: str) -> Iterator[Any]:
    """Yield the calling objects with these attributes, the nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if all(hasattr(caller, name) for name in names):
            yield caller
        frame = frame.f_back


def on_adapter_loaded(callback: Callable[[Any], Any]) -> None:
    """Call ``callback`` with each ``LoRARequest`` that vLLM's engine, now under construction, loads before its use."""
    engine = _caller_with("add_lora", "model_executor")
    if engine is None:
        return
    load = engine.add_lora

    # vLLM decodes the argument by the annotations of the method.
    @wraps(load)
    def add_lora(request: Any) -> Any:
        callback(request)
        return load(request)

    engine.add_lora = add_lora


def adapter_directory(path: str, *, download: bool) -> str:
    """Return the directory of a LoRA adapter, which vLLM may ``download`` or, otherwise, has downloaded from a hub."""
    from vllm import envs
    from vllm.lora.utils import get_adapter_absolute_path

    if download or path.startswith("~") or os.path.isabs(path) or os.path.exists(path):
        return str(get_adapter_absolute_path(path))
    hub = "modelscope" if envs.VLLM_USE_MODELSCOPE else "huggingface_hub"
    return str(importlib.import_module(hub).snapshot_download(path, local_files_only=True))


def hashes_adapter_paths() -> bool:
    """Return whether vLLM's block hashes distinguish adapters of one name by their paths (0.32 and later)."""
    adapter = SimpleNamespace(lora_name="name", lora_path="path")
    return "path" in str(_gen_lora_extra_hash_keys(SimpleNamespace(lora_request=adapter)))


def has_adapters(engine_config: Any) -> bool:
    """Return whether an engine's requests may have LoRA adapters. ``engine_config``: a ``VllmConfig``."""
    return getattr(engine_config, "lora_config", None) is not None


def engine_queue() -> Any:
    """Return the queue of requests of the ``EngineCoreProc`` under construction; None in a program's own process."""
    return getattr(_caller_with("input_queue"), "input_queue", None)


def event_payloads(scheduler: Any) -> MutableMapping[bytes, Any] | None:
    """Return the event payloads by key from vLLM's tracker; None unless events are self-describing.

    ``scheduler``: an ``OffloadingConnectorScheduler``.
    """
    tracker = getattr(scheduler, "_events_tracker", None)
    if not getattr(tracker, "self_describing_enabled", False):
        return None
    return getattr(tracker, "_pending_event_metadata", None)


def payload_maker(scheduler: Any) -> Callable[..., Any] | None:
    """Return a function that builds a payload for :func:`event_payloads`; None if this version has other fields.

    The function takes the number of a group of layers, and the fields ``block_hashes``, ``parent_block_hash``,
    ``token_ids``, ``block_size`` and ``lora_name``. It raises IndexError if there is no such group.

    ``scheduler``: an ``OffloadingConnectorScheduler``.
    """
    cls = getattr(sys.modules.get(_EVENTS_MODULE), "_OffloadEventMetadata", None)
    groups = getattr(getattr(scheduler, "config", None), "kv_group_configs", None)
    if cls is None or groups is None:
        return None
    specs = [getattr(group, "kv_event_group_spec", None) for group in groups]
    fields = [{"lora_id": None, "extra_keys": None, "group_idx": i, "kv_cache_spec": s} for i, s in enumerate(specs)]
    names = _field_names(cls)
    given = names - {"lora_id", "extra_keys", "group_idx", "kv_cache_spec"}
    if given != {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_name", "active_residencies"}:
        return None
    constant = [{name: value for name, value in each.items() if name in names} for each in fields]

    def make(group_idx: int, **values: Any) -> Any:
        return cls(**constant[group_idx], active_residencies=set(), **values)

    return make


def emits_events(spec: Any) -> bool:
    """Return whether the engine publishes KV cache events."""
    return bool(getattr(getattr(spec, "kv_events_config", None), "enable_kv_cache_events", False))


def primary_info(spec: Any) -> Mapping[str, Any]:
    """Return the labels of the primary tier in vLLM's information metric; empty before 0.33."""
    info = getattr(spec, "cpu_info", None)
    return {} if info is None else info.as_config_info()


def tier_info(tier: Any) -> dict[str, str]:
    """Return the labels of a tier in vLLM's information metric; empty before 0.33."""
    return tier.config_info() if hasattr(tier, "config_info") else {}


def cache_hit_source(medium: Medium, locality: Locality) -> Any:
    """Return vLLM's name for the source of a hit; None before 0.32."""
    module = sys.modules.get("vllm.v1.metrics.cache_hit_source")
    sources = getattr(module, "CacheHitSource", None)
    if sources is None:
        return None
    if locality is Locality.REMOTE:
        unspecified = sources.EXTERNAL_UNSPECIFIED
        return getattr(sources, "P2P", unspecified) if medium is Medium.CPU else unspecified
    return sources.HOST if medium is Medium.CPU else sources.DISK


def open_region(spec: Any, rank: int | None) -> LockedRegion:
    """Map the region shared by the workers and the scheduler of one engine.

    Args:
        spec: A ``CPUOffloadingSpec``.
        rank: Index of this worker's part of each row; None for the scheduler.
    """
    rows, row_bytes = region_shape(spec)
    return LockedRegion(
        engine_id=spec.config.engine_id,
        num_chunks=rows,
        rank=rank,
        kv_bytes_per_chunk=row_bytes,
        cpu_page_size=spec.cpu_page_size_per_worker,
    )


def tolerate_unnaming(worker: Any) -> None:
    """Keep vLLM's own worker from logging a traceback because the file of its shared region was unlinked.

    The worker that created the file unlinks it at shutdown, and logs a warning if that fails. A finalizer takes over
    this unlink. It finds the file only if the scheduler, which normally unlinks it, never started.
    """
    region = getattr(worker, "_mmap_region", None)
    if region is not None and region._creator:
        region._creator = False
        weakref.finalize(region, Path(region.mmap_path).unlink, missing_ok=True)


def steps_under_way_max(engine_config: Any) -> int:
    """Return an engine's maximum number of concurrent steps: one per pipeline stage, and one scheduled ahead.

    ``engine_config``: a ``VllmConfig``; None if unknown.
    """
    stages = getattr(getattr(engine_config, "parallel_config", None), "pipeline_parallel_size", 64)
    is_ahead = getattr(getattr(engine_config, "scheduler_config", None), "async_scheduling", True)
    return int(stages) + bool(is_ahead)


def chosen_attention(engine_config: Any) -> str | None:
    """Return an identifier of the attention backends chosen in this process for all layers; None if not chosen here.

    The choice is made in the process with the model: a worker, or the scheduler if it shares the worker's process. The
    choice determines the layout of a page, and depends on device, libraries and environment.
    """
    layers = getattr(getattr(engine_config, "compilation_config", None), "static_forward_context", None)
    parallel = getattr(engine_config, "parallel_config", None)
    if not isinstance(layers, Mapping) or getattr(parallel, "pipeline_parallel_size", 1) != 1:
        return None  # With pipeline stages, each process has only its own layers.
    chosen: dict[str, str] = {}
    for name, layer in layers.items():
        ask = getattr(layer, "get_attn_backend", None)
        if ask is not None:
            backend = ask()
            chosen[str(name)] = f"{backend.__module__}.{backend.__qualname__}"
    if not chosen:
        return None
    digest = hashlib.sha256(json.dumps(sorted(chosen.items())).encode()).hexdigest()[:32]
    names = {backend.rpartition(".")[2] for backend in chosen.values()}
    return f"{'+'.join(sorted(names))[:200]} {digest}"


def region_shape(spec: Any) -> tuple[int, int]:
    """Return the number of rows of the shared region, and their length in bytes."""
    return int(spec.num_chunks), int(spec.kv_bytes_per_chunk)


def canonical_config(engine_config: Any, kv_cache_config: Any) -> OffloadingConfig | None:
    """Return vLLM's ``OffloadingConfig`` for ``"canonical_layout": true``; None if vLLM rejects that option.

    Args:
        engine_config: ``VllmConfig``; not changed.
        kv_cache_config: ``KVCacheConfig``.
    """
    asking = copy.copy(engine_config)
    asking.kv_transfer_config = copy.copy(engine_config.kv_transfer_config)
    extra = engine_config.kv_transfer_config.kv_connector_extra_config
    asking.kv_transfer_config.kv_connector_extra_config = {**extra, "canonical_layout": True}
    try:
        return build_offloading_config(asking, kv_cache_config)
    except (AttributeError, NotImplementedError, ValueError):
        return None  # Not an error: the engine runs without the canonical layout.


def window_groups(kv_cache_config: Any) -> frozenset[int]:
    """Return the groups of layers whose blocks vLLM frees while a request runs: sliding windows and states.

    ``kv_cache_config``: ``KVCacheConfig``; None if unknown.
    """
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    return frozenset(i for i, group in enumerate(groups) if not isinstance(group.kv_cache_spec, FullAttentionSpec))


def has_states(kv_cache_config: Any) -> bool:
    """Return whether a group of layers keeps a state (Mamba) instead of keys and values.

    ``kv_cache_config``: ``KVCacheConfig``; None if unknown.
    """
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    return any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)


@cache
def _field_names(cls: Any) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(cls))
