"""Our metrics under vLLM: what is filled is declared, and numbers are those of the tier."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)

from kvstore.tiers import JobSample, TierStats
from kvstore.vllm.metrics import TierMetrics, metric_definitions
from tests.vllm.harness import Driver, key_of

FULL = TierStats(
    name="file",
    recovering=True,
    blocks=3,
    used_bytes=300,
    capacity_bytes=1000,
    lookups={"hit": 4, "miss": 2, "retry": 1},
    outcomes={"store.ok": 3, "store.exists": 1, "load.ok": 4, "load.corrupt": 1},
    faults={"checksum": 1},
    removals={"evicted": 2},
    bytes_stored=300,
    bytes_loaded=400,
    jobs_in_flight=1,
    bytes_in_flight=100,
    shed_blocks=5,
    load_breaker="open",
    store_breaker="half_open",
    backend_counters={"direct_io_fallbacks": 1},
    backend_gauges={"free_bytes": 7.0},
)
SAMPLES = [JobSample("load", 4, 400, 0.01), JobSample("store", 3, 300, 0.02)]


def series(stats: Any) -> dict[tuple[str, ...], Any]:
    """Return all values by name and labels."""
    return {(name, *labels): value for name, by in stats.data["data"].items() for labels, value in by.items()}


def test_everything_filled_is_declared_and_the_other_way_round() -> None:
    """Each metric has a declaration of its kind and number of labels, and each declaration is filled."""
    kinds = {
        "counter": OffloadingCounterMetadata,
        "gauge": OffloadingGaugeMetadata,
        "histogram": OffloadingHistogramMetadata,
    }
    definitions = metric_definitions()
    filled = TierMetrics("file").report(FULL, SAMPLES, internal_errors=1)
    assert set(filled.data["data"]) == set(definitions)
    for name, by_labels in filled.data["data"].items():
        assert type(definitions[name]) is kinds[filled.data["types"][name]]
        for labels in by_labels:
            assert len(labels) == len(definitions[name].labelnames)
            assert labels[0] == "file"


def test_counters_are_told_once() -> None:
    """A report holds what came on top since the last one."""
    metrics = TierMetrics("file")
    first = series(metrics.report(FULL, SAMPLES, 0))
    assert first["vllm:kvstore_load_blocks", "file", "corrupt"] == 1
    assert first["vllm:kvstore_load_breaker_state", "file"] == 2
    assert first["vllm:kvstore_store_seconds", "file"] == [0.02]
    again = series(metrics.report(FULL, [], 0))
    assert not [name for name in again if name[0].endswith(("_blocks", "_bytes", "lookups")) and name in first
                and name[0] not in {"vllm:kvstore_blocks", "vllm:kvstore_used_bytes", "vllm:kvstore_capacity_bytes",
                                    "vllm:kvstore_bytes_in_flight"}]  # fmt: skip


def test_a_tier_reports_itself() -> None:
    """After a store and a load the manager's statistics hold ours, under the label of the tier."""
    driver = Driver([{"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "memory", "label": "mine"}])
    keys = [key_of(i) for i in range(4)]
    total: dict[tuple[str, ...], float] = {}

    def add() -> None:
        stats = driver.manager.get_stats()
        for name, value in series(stats).items() if stats is not None else ():
            if isinstance(value, int | float):
                total[name] = total.get(name, 0) + value

    try:
        driver.store(keys)
        add()
        driver.forget_primary()
        driver.load([*keys, key_of(9)])
        driver.settle()
        add()
    finally:
        driver.close()
    assert total["vllm:kvstore_store_blocks", "mine", "ok"] == 4
    assert total["vllm:kvstore_load_blocks", "mine", "ok"] == 4
    assert total["vllm:kvstore_lookups", "mine", "hit"] == 4
    assert total["vllm:kvstore_lookups", "mine", "miss"] >= 1
    assert total["vllm:kvstore_loaded_bytes", "mine"] == total["vllm:kvstore_stored_bytes", "mine"] > 0
