"""Our metrics under vLLM: every reported metric is declared, and the numbers are those of the tier."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.primary.tier import PrimaryStats
from kvstore.tiering import LookupCounts, TierFlow, TieringStats
from kvstore.tiering.gate import GateCounts
from kvstore.tiering.hedges import HedgeCounts
from kvstore.tiering.tally import Tally, TierTally
from kvstore.tiering.tenants import TenantStats
from kvstore.tiers import JobSample, TierStats
from kvstore.types import MissCause
from kvstore.vllm import KVStoreOffloadingSpec
from kvstore.vllm.compat import primary_info
from kvstore.vllm.metrics import (
    ManagerMetrics,
    StandardMetrics,
    TierMetrics,
    manager_metric_definitions,
    metric_definitions,
)
from tests.vllm.harness import BLOCK_BYTES, Driver, key_of

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
    codec={
        "encoded_blocks": 3,
        "raw_blocks": 1,
        "encode_in_bytes": 400,
        "encode_out_bytes": 280,
        "encode_seconds": 0.5,
        "decoded_blocks": 2,
        "decode_in_bytes": 140,
        "decode_out_bytes": 200,
        "decode_seconds": 0.25,
        "ratio": 0.7,
        "auto_encodes": 1.0,
    },
)
SAMPLES = [JobSample("load", 4, 400, 0.01), JobSample("store", 3, 300, 0.02)]

FLOW = TierFlow("file", 1, 2, 3, 4, 5, 6, waiting=9, dropped=7, errors=8, dead=True)
MANAGER = TieringStats(
    primary=PrimaryStats(slots=10, free=1, writing=2, ready=7, pinned=3, dirty=1, retained=4, abandoned=1, evicted=9),
    tiers=(FLOW,),
    lookups=LookupCounts(hits=1, pending=2, retries=3, misses=4),
    requests=2,
    jobs=1,
    promoting=3,
    throttled=4,
    refused_stores=5,
    lost=7,
    expired=8,
    policy_mistakes=9,
    policy_refused=1,
    gate=GateCounts(loaded=1, recomputed=2, abandoned=3, explored=4, saved_s=0.5, lost_s=0.25),
    missed={"all": {MissCause.POLICY: 5}, "file": {MissCause.EVICTED: 6}},
    repeated=7,
    hedges=HedgeCounts(hedged=3, won=2, extra_bytes=4096),
    tenants={
        "acme": TenantStats(blocks=6, stored=5, loaded=4, evicted=3, unsaved=2, declined=1),
        "others": TenantStats(),
    },
)


def series(stats: Any) -> dict[tuple[str, ...], Any]:
    """Return all values by name and labels."""
    return {(name, *labels): value for name, by in stats.data["data"].items() for labels, value in by.items()}


def check_declared(filled: Any, definitions: dict[str, Any]) -> None:
    """Check that each metric has a declaration of its kind and labels, and that each declared metric is reported."""
    kinds = {
        "counter": OffloadingCounterMetadata,
        "gauge": OffloadingGaugeMetadata,
        "histogram": OffloadingHistogramMetadata,
    }
    assert set(filled.data["data"]) == set(definitions)
    for name, by_labels in filled.data["data"].items():
        assert type(definitions[name]) is kinds[filled.data["types"][name]]
        for labels in by_labels:
            assert len(labels) == len(definitions[name].labelnames)


def test_everything_filled_is_declared_and_the_other_way_round() -> None:
    """Every metric of a tier is declared and reported, and has the tier as its first label."""
    filled = TierMetrics("file").report(FULL, SAMPLES, internal_errors=1)
    check_declared(filled, metric_definitions())
    assert {name[1] for name in series(filled)} == {"file"}


def test_the_managers_metrics_are_declared_and_filled() -> None:
    """Every metric of kvstore's manager is declared and reported, and counters are reported once."""
    internal = "vllm:kvstore_internal_errors"
    metrics = ManagerMetrics(4096, [4096, 1024])
    first = metrics.report(MANAGER, internal_errors=1, callback_errors={"file": 1})
    declared = metric_definitions()
    check_declared(first, {**manager_metric_definitions(), internal: declared[internal]})
    values = series(first)
    assert values["vllm:kvstore_manager_lookups", "retry"] == 3
    assert values["vllm:kvstore_primary_slots", "pinned"] == 3
    assert [values["vllm:kvstore_primary_row_bytes", group] for group in ("all", "0", "1")] == [4096, 4096, 1024]
    assert values["vllm:kvstore_dropped_blocks", "file"] == 7
    assert values["vllm:kvstore_lost_blocks",] == 7
    assert values["vllm:kvstore_gate_blocks", "recomputed"] == 2
    assert values["vllm:kvstore_gate_seconds", "lost"] == 0.25
    assert values["vllm:kvstore_missed_blocks", "file", "evicted"] == 6
    assert [values["vllm:kvstore_missed_blocks", "all", cause] for cause in ("policy", "unproven")] == [5, 0]
    assert values["vllm:kvstore_repeated_requests",] == 7
    assert values["vllm:kvstore_hedged_blocks",] == 3
    assert values["vllm:kvstore_hedges_won_blocks",] == 2
    assert values["vllm:kvstore_hedge_bytes",] == 4096
    counters = {name for name, kind in first.data["types"].items() if kind == "counter"}
    assert not counters & set(metrics.report(MANAGER, internal_errors=1, callback_errors={"file": 1}).data["data"])


def test_spec_declares_the_metrics_of_its_manager() -> None:
    """With our spec the front end has the manager's metrics, even without secondary tiers."""
    extra = {"cpu_bytes_to_use": 1, "secondary_tiers": []}
    wanted = {*manager_metric_definitions(), *metric_definitions()}
    assert wanted <= set(KVStoreOffloadingSpec.build_metric_definitions(extra))
    theirs = KVStoreOffloadingSpec.build_metric_definitions({**extra, "manager": "vllm"})
    assert not wanted & set(theirs)


def test_counters_report_their_increase() -> None:
    """A report contains the increase since the last one."""
    metrics = TierMetrics("file")
    first = series(metrics.report(FULL, SAMPLES, 0))
    assert first["vllm:kvstore_load_blocks", "file", "corrupt"] == 1
    assert first["vllm:kvstore_load_breaker_state", "file"] == 2
    assert first["vllm:kvstore_codec_bytes", "file", "encode_out"] == 280
    assert first["vllm:kvstore_codec_gauge", "file", "ratio"] == 0.7
    assert first["vllm:kvstore_store_seconds", "file"] == [0.02]
    again = series(metrics.report(FULL, [], 0))
    assert not [name for name in again if name[0].endswith(("_blocks", "_bytes", "lookups")) and name in first
                and name[0] not in {"vllm:kvstore_blocks", "vllm:kvstore_used_bytes", "vllm:kvstore_capacity_bytes",
                                    "vllm:kvstore_bytes_in_flight"}]  # fmt: skip


def test_counts_continue_in_a_new_epoch() -> None:
    """A backend opened again for a new epoch counts from zero: its new counts are added."""
    metrics = TierMetrics("file")
    told = []
    for count in (5, 2, 2, 3):
        values = series(metrics.report(TierStats("file", backend_counters={"evicted_blocks": count}), [], 0))
        told.append(values.get(("vllm:kvstore_backend_events", "file", "evicted_blocks"), 0))
    assert told == [5, 2, 0, 1]


@pytest.mark.parametrize("spec_class", [TieringOffloadingSpec, KVStoreOffloadingSpec])
def test_a_tier_reports_itself(spec_class: Any) -> None:
    """After a store and a load the manager's statistics contain ours, under the label of the tier."""
    where = {"type": "KVStoreTier", "module_path": "kvstore.vllm"}
    tier = {**where, "backend": "memory", "label": "mine", "reset": "keep"}
    driver = Driver([tier], spec_class=spec_class)
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
    if spec_class is KVStoreOffloadingSpec:
        assert total["vllm:kvstore_manager_lookups", "miss"] >= 1
    assert total["vllm:kvstore_loaded_bytes", "mine"] == total["vllm:kvstore_stored_bytes", "mine"] > 0


def standard(spec_class: Any, tiers: list[dict[str, Any]]) -> dict[tuple[str, ...], Any]:
    """Store blocks, evict them from the primary tier, load them again, and return vLLM's own metrics."""
    driver = Driver(tiers, spec_class=spec_class)
    keys = [key_of(i) for i in range(6)]
    total: dict[tuple[str, ...], Any] = {}

    def add() -> None:
        stats = driver.manager.get_stats()
        kinds = {} if stats is None else stats.data["types"]
        for name, value in series(stats).items() if stats is not None else ():
            if name[0].startswith("vllm:kv_offload_"):
                total[name] = value if kinds[name[0]] == "gauge" else total.get(name, type(value)()) + value

    driver.manager._reported_at = float("-inf")
    try:
        driver.store(keys)
        add()
        driver.forget_primary()
        assert driver.load([*keys, key_of(99)]) == keys
        assert driver.load(keys[:2]) == keys[:2], "from the primary tier"
        driver.settle()
        driver.manager._reported_at = float("-inf")
        add()
    finally:
        driver.close()
    return total


def test_vllms_own_metrics_are_those_of_vllms_manager() -> None:
    """Our manager reports every metric of vLLM's, with the same counts; the times differ."""
    tiers = [
        {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "memory", "label": "mine", "reset": "keep"},
        {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "memory", "label": "below", "reset": "keep"},
    ]
    theirs = standard(TieringOffloadingSpec, tiers)
    ours = standard(KVStoreOffloadingSpec, tiers)
    names = {"1:KVStoreTier": "1:mine", "2:KVStoreTier": "2:below"}
    theirs = {tuple(names.get(part, part) for part in name): value for name, value in theirs.items()}
    assert set(ours) == set(theirs)
    # vLLM declares this as the sizes of stores, but also counts each block of a promotion as a store of one.
    assert theirs.pop(("vllm:kv_offload_cpu_allocation_size",))[0] == 6
    assert ours["vllm:kv_offload_cpu_allocation_size",] == [6]
    for name, value in theirs.items():
        if isinstance(value, list):
            assert len(ours[name]) == len(value), name
            assert name[0].endswith("_seconds") or ours[name] == value, name
        elif not name[0].endswith("_time"):
            assert ours[name] == value, name
    assert ours["vllm:kv_offload_tiering_chunk_queries", "1:mine"] == 7
    assert ours["vllm:kv_offload_tiering_chunk_hits", "1:mine"] == 6
    assert ours["vllm:kv_offload_tiering_chunk_hits", "0:primary"] == 2
    assert ours["vllm:kv_offload_tiering_read_bytes", "1:mine"] == 6 * BLOCK_BYTES
    assert ours["vllm:kv_offload_tiering_read_time", "1:mine"] > 0


def test_undeclared_metrics_are_not_reported() -> None:
    """A front end of vLLM fails on an undeclared metric."""
    metrics = StandardMetrics(["file"], 4096, ["vllm:kv_offload_tiering_read_bytes"])
    reported = series(metrics.report(MANAGER, Tally([TierTally()])))
    assert reported == {("vllm:kv_offload_tiering_read_bytes", "1:file"): 4 * 4096}


def test_information_of_each_tier() -> None:
    """VLLM's information metric has one series per tier; the primary tier's has vLLM's own labels (0.33)."""
    tier = {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "memory", "label": "mine"}
    driver = Driver([tier], spec_class=KVStoreOffloadingSpec)
    try:
        primary, mine = driver.manager.config_info()
        assert primary["tier"] == "0:primary" and mine == {"tier": "1:mine"}
        info = getattr(driver.spec, "cpu_info", None)
        assert primary.keys() - {"tier"} == (set() if info is None else set(info.config_info_keys()))
        driver.manager._primary_info = primary_info(SimpleNamespace(cpu_info=Info()))
        assert driver.manager.config_info()[0] == {"tier": "0:primary", "cpu_num_chunks": 7}
    finally:
        driver.close()


class Info:
    """CPUOffloadingInfo of 0.33."""

    def as_config_info(self) -> dict[str, int]:
        """Return the labels."""
        return {"cpu_num_chunks": 7}


def test_shares_of_the_primary_tier_that_io_uses() -> None:
    """Slots count as being written while any I/O may still fill them; each tier's slots are those of its own jobs."""
    primary = PrimaryStats(20, free=9, writing=1, ready=7, pinned=2, dirty=0, retained=0, abandoned=3, evicted=0)
    flow = TierFlow("a", 5, 4, *[0] * 7, dead=False)
    stats = TieringStats(primary, (flow,), LookupCounts(), *[0] * 10)
    declared = KVStoreOffloadingSpec.build_metric_definitions({"secondary_tiers": [{"type": "memory"}]})
    found = series(StandardMetrics(["a"], 64, declared).report(stats, Tally([TierTally()])))
    assert found[CPUOffloadingMetrics.CPU_CACHE_USAGE_PERC,] == 6 / 20
    assert found[CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC,] == 4 / 20
    assert found[CPUOffloadingMetrics.CPU_CACHE_READ_USAGE_PERC,] == 2 / 20
    assert found[TieringOffloadingMetrics.PRIMARY_WRITE_USAGE_PERC, "1:a"] == 4 / 20, "loads write to it"
    assert found[TieringOffloadingMetrics.PRIMARY_READ_USAGE_PERC, "1:a"] == 5 / 20


def test_metrics_are_there_from_the_start() -> None:
    """At the start every family reports 0 for all predictable label values, and only once."""
    metrics = TierMetrics("file")
    first = series(metrics.report(TierStats("file"), [], 0))
    own = {"vllm:kvstore_backend_events", "vllm:kvstore_backend_gauge", "vllm:kvstore_codec_gauge"}
    assert {name[0] for name in first} == set(metric_definitions()) - own
    assert first.pop(("vllm:kvstore_load_seconds", "file")) == first.pop(("vllm:kvstore_store_seconds", "file")) == []
    assert first["vllm:kvstore_load_blocks", "file", "corrupt"] == 0
    assert ("vllm:kvstore_load_blocks", "file", "shed") not in first
    assert first.pop(("vllm:kvstore_ready", "file")) == 1
    assert {value for value in first.values()} == {0}
    counters = {name for name in first if name[0].endswith(("_blocks", "lookups")) and len(name) == 3}
    assert counters
    assert not counters & set(series(metrics.report(TierStats("file"), [], 0)))
