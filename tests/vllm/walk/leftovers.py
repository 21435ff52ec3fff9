"""State that must not be left at the end of a leg: anything held for an ended request or job."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tests.vllm.walk.engine import core_of
from tests.vllm.walk.slow_copies import SlowSpec

_OF_CONNECTOR = ("_jobs", "_req_status", "_block_id_to_pending_jobs", "_reset_fence")


def leftovers(llm: Any) -> dict[str, Any]:
    """Return the state that an idle engine still holds, by name; empty if correct."""
    scheduler = core_of(llm).scheduler
    connector = scheduler.connector.connector_scheduler
    found = {f"connector.{name}": len(getattr(connector, name, ())) for name in _OF_CONNECTOR}
    found["copies"] = sum(worker.pending for worker in SlowSpec.workers)
    pool = scheduler.kv_cache_manager.block_pool
    found["device blocks"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    manager = connector.manager
    found.update(_of_ours(manager) if hasattr(manager, "manager") else _of_vllms(manager))
    return {name: value for name, value in found.items() if value}


def _of_ours(manager: Any) -> dict[str, Any]:
    stats = asdict(manager.manager.stats())
    primary = stats["primary"]
    found = {name: stats[name] for name in ("jobs", "requests", "promoting")}
    found |= {f"primary.{name}": primary[name] for name in ("pinned", "writing", "abandoned")}
    found["primary.lost"] = primary["slots"] - primary["free"] - primary["ready"]
    for tier in stats["tiers"]:
        found |= {f"{tier['name']}.{name}": tier[name] for name in ("storing", "loading", "waiting", "errors", "dead")}
    found["caught errors"] = manager.errors.count
    return found


def _of_vllms(manager: Any) -> dict[str, Any]:
    found = {name: len(getattr(manager, name, ())) for name in ("_jobs", "_req_state", "_pending_load_submissions")}
    found["caught errors"] = sum(tier.errors.count for tier in manager.secondary_tiers)
    policy = manager.primary_tier._policy
    held = [block for block in _blocks_of(policy) if block.ref_cnt != 0]
    found["primary.pinned"] = len(held)
    return found


def _blocks_of(policy: Any) -> list[Any]:
    """Return the blocks of vLLM's primary tier, for any of its policies."""
    blocks: list[Any] = []
    for value in vars(policy).values():
        if isinstance(value, dict):
            blocks += [block for block in value.values() if hasattr(block, "ref_cnt")]
    return blocks
