"""The canonical layout as the default: when vLLM can certify it, and the behaviour with other tensors."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvstore.errors import ConfigError
from kvstore.vllm import KVStoreOffloadingSpec
from kvstore.vllm.compat import open_region, tolerate_unnaming
from kvstore.vllm.connector import EngineContext
from kvstore.vllm.layout import (
    WorkerNote,
    leave_note,
    take_note,
    with_canonical_layout,
    with_whole_rows,
    without_synchronous_loads,
)
from kvstore.vllm.region import region_path
from tests.vllm.harness import BLOCK_BYTES, Driver, key_of, make_spec, offloading_config, parallel

TOKENS = 16
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=4, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=TOKENS, num_kv_heads=4, head_size=8, dtype=torch.float32, sliding_window=40)
HALF = dataclasses.replace(FULL, num_kv_heads=2)
LATENT = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32)
STATE = MambaSpec(block_size=TOKENS, shapes=((4, 16),), dtypes=(torch.float32,))


def connect(specs: list[Any], *, tp_size: int = 1, extra: dict[str, Any] | None = None) -> OffloadingConfig:
    """Return our spec's configuration, built as by vLLM's connector."""
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    kv_cache_config = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
    )
    vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"cpu_bytes_to_use": 1 << 20, **(extra or {})}, engine_id="kvstore-test-layout"
        ),
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=tp_size,
            tensor_parallel_size=tp_size,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            distributed_executor_backend="mp",
            nnodes_within_dp=1,
        ),
        model_config=SimpleNamespace(
            model="org/model", dtype="float32", use_mla=LATENT in specs, get_total_num_kv_heads=lambda: 4,
            max_model_len=4096,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", kv_cache_layout="LBHNC", enable_prefix_caching=True, hash_block_size=None,
            block_size=TOKENS, prefix_match_unit=None, mamba_cache_mode="none",
        ),
        kv_events_config=None,
        use_v2_model_runner=True,
    )  # fmt: skip
    config = build_offloading_config(vllm_config, kv_cache_config)
    known = EngineContext(vllm_config, kv_cache_config)
    return with_canonical_layout(without_synchronous_loads(with_whole_rows(config, known), known), known)


@pytest.mark.parametrize(
    ("specs", "tp_size", "canonical"),
    [
        ([FULL], 1, True),
        ([FULL, WINDOW], 1, True),
        ([HALF], 2, True),
        ([FULL], 2, False),
        ([LATENT], 2, True),
        ([FULL, STATE], 1, False),
    ],
    ids=["full attention", "with windows", "two ranks", "heads not as expected", "latent", "with a state space"],
)
def test_layout_is_canonical_where_vllm_supports_it(specs: list[Any], tp_size: int, canonical: bool) -> None:
    """The layout follows vLLM's own rules; a model with one unmappable layer keeps the direct layout."""
    config = connect(specs, tp_size=tp_size)
    assert config.canonical_layout is canonical
    assert config.replicated_layout is (canonical and specs == [LATENT])
    if canonical:
        assert config.parallel.is_parallelism_agnostic


@pytest.mark.parametrize(("specs", "blocks"), [([FULL], 4), ([LATENT], 4), ([FULL, WINDOW], 1), ([WINDOW], 1)])
def test_rows_of_windows_have_one_block(specs: list[Any], blocks: int) -> None:
    """If vLLM stores several blocks per row incorrectly, rows have one block."""
    assert connect(specs, extra={"blocks_per_chunk": 4}).cache.blocks_per_chunk == blocks


@pytest.mark.parametrize(("specs", "budget"), [([FULL], 1024), ([FULL, WINDOW], 1024), ([FULL, STATE], 0)])
def test_states_are_not_loaded_within_a_step(specs: list[Any], budget: int) -> None:
    """VLLM copies a state before the loads of its step, so a model with states has no loads within a step."""
    extra = connect(specs, extra={"sync_load_budget_bytes": 1024}).extra_config
    assert extra["sync_load_budget_bytes"] == budget


@pytest.mark.parametrize("choice", [True, False])
def test_the_users_choice_stands(choice: bool) -> None:
    """The user's choice of the layout is not changed."""
    assert connect([FULL], extra={"canonical_layout": choice}).canonical_layout is choice


def test_an_accelerator_is_asked_for_the_canonical_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other platforms than the CPU, rows are canonical only on request, because this has not been tested there."""
    assert connect([FULL]).canonical_layout
    monkeypatch.setattr("kvstore.vllm.layout.current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert not connect([FULL]).canonical_layout
    assert connect([FULL], extra={"canonical_layout": True}).canonical_layout


def test_a_layout_that_vllm_does_not_certify_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that all ranks may share are not canonical for that reason."""
    shared = dataclasses.replace(connect([FULL]), canonical_layout=False)
    assert shared.parallel.is_parallelism_agnostic
    monkeypatch.setattr("kvstore.vllm.layout.canonical_config", lambda *_: shared)
    assert not connect([FULL]).canonical_layout


@pytest.fixture
def choosing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every spec choose the canonical layout, with further changes of its configuration as the parameter."""
    changes = getattr(request, "param", {})

    def choose(config: OffloadingConfig, known: EngineContext) -> OffloadingConfig:
        of_all = dataclasses.replace(config.parallel, is_parallelism_agnostic=True)
        return dataclasses.replace(config, canonical_layout=True, parallel=of_all, **changes)

    monkeypatch.setattr("kvstore.vllm.spec.with_canonical_layout", choose)


@pytest.mark.usefixtures("choosing")
def test_vllms_own_manager_keeps_vllms_own_layout(tmp_path: Path) -> None:
    """Rows are canonical by default under kvstore's manager; under vLLM's only without vLLM's own tiers."""
    assert make_spec(offloading_config([{"type": "memory"}])).config.canonical_layout
    theirs = offloading_config([{"type": "memory"}, {"type": "fs", "root_dir": str(tmp_path)}])
    assert make_spec(theirs).config.canonical_layout
    theirs.extra_config["manager"] = "vllm"  # type: ignore[index]
    assert not make_spec(theirs).config.canonical_layout


@pytest.fixture
def engine_id() -> Iterator[str]:
    """An engine with a region of one page."""
    name = f"kvstore-test-note-{os.getpid()}"
    with open(region_path(name), "wb") as region:
        fcntl.flock(region, fcntl.LOCK_SH)  # Otherwise the start of another engine removes it.
        region.write(bytes(4096))
        region.flush()
        yield name
    os.unlink(region_path(name))


@pytest.mark.parametrize("canonical", [True, False])
def test_a_note_is_taken_once(engine_id: str, canonical: bool) -> None:
    """The scheduler takes and removes the note of all workers; there is none before, nor without a region."""
    assert take_note(engine_id) is None
    note = WorkerNote(canonical, "FlashAttentionBackend " + "0" * 32)
    leave_note(engine_id, note, expects_canonical=True)
    leave_note(engine_id, note, expects_canonical=True)
    assert take_note(engine_id) == note
    assert take_note(engine_id) is None
    with open(region_path(engine_id), "rb") as region:
        assert not any(region.read())
    assert take_note("kvstore-test-there-is-none") is None


def test_a_note_that_can_not_be_left_ends_the_start() -> None:
    """Without a region the scheduler receives no note that rows are not canonical; canonical rows are its default."""
    leave_note("kvstore-test-there-is-none", WorkerNote(True), expects_canonical=True)
    leave_note("kvstore-test-there-is-none", WorkerNote(False), expects_canonical=False)
    with pytest.raises(ConfigError, match="'canonical_layout': false"):
        leave_note("kvstore-test-there-is-none", WorkerNote(False), expects_canonical=True)


def test_canonical_rows_of_workers_alone_fail_the_start(tmp_path: Path) -> None:
    """If only the workers have chosen canonical rows, the start fails: blocks would get a wrong name."""
    tiers = [{"type": "file", "path": str(tmp_path), "capacity": "1GiB"}]
    spec = make_spec(offloading_config(tiers))
    region = open_region(spec, rank=0)
    try:
        leave_note(spec.config.engine_id, WorkerNote(True), expects_canonical=True)
        with pytest.raises(ConfigError, match="'canonical_layout': false"):
            spec.get_manager()
    finally:
        region.cleanup()


def kv_caches(portable: bool) -> CanonicalKVCaches:
    """Return the KV cache of one layer, mapped or not."""
    page = 8192
    mapping = CanonicalPageMapping(page, page, (CopyRun(0, 0, page, 1, page, page),), 1, 0, portable)
    tensor = CanonicalKVCacheTensor(torch.zeros((4, page), dtype=torch.int8), page)
    return CanonicalKVCaches([tensor], [[CanonicalKVCacheRef(0, page, mapping)]])


@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("portable", [True, False])
def test_rows_that_are_not_canonical_are_not_shared(
    tmp_path: Path, portable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """If a worker can't map a layer, the engine starts with the direct layout, and shares only with such engines.

    In both layouts the host worker has the counters of finished copies.
    """
    tiers = [{"type": "file", "path": str(tmp_path), "capacity": "1GiB"}]
    keys = [key_of(i) for i in range(4)]
    found = []
    for tp_size in (1, 2):
        changes = {"engine_id": f"kvstore-test-{os.getpid()}-{tp_size}", "parallel": parallel(tp_size=tp_size)}
        config = offloading_config(tiers, **changes)
        worker_spec = make_spec(config)
        worker = worker_spec.get_worker(kv_caches(portable))
        driver = Driver(tiers, spec_class=KVStoreOffloadingSpec, **changes)
        assert worker_spec.config.canonical_layout is driver.spec.config.canonical_layout is portable
        found.append(driver.load(keys))
        driver.store(keys)
        driver.close()
        worker.shutdown()
    assert found == [[], keys if portable else []]
    assert "not counted" not in caplog.text


@pytest.mark.parametrize("choosing", [{"replicated_layout": True}], indirect=True)
@pytest.mark.usefixtures("choosing")
@pytest.mark.parametrize("direct_is_replicated", [False, True])
def test_replicated_rows_that_can_not_be_mapped_become_direct_ones(direct_is_replicated: bool) -> None:
    """With latent attention all ranks share one copy in a canonical row; workers and scheduler fall back together."""
    config = offloading_config(
        [{"type": "memory"}],
        parallel=parallel(world_size=2, tp_size=2),
        replicated_layout=direct_is_replicated,
    )
    page = torch.zeros((8, BLOCK_BYTES), dtype=torch.int8)
    unmapped = CanonicalKVCaches([CanonicalKVCacheTensor(page, BLOCK_BYTES)], [[CanonicalKVCacheRef(0, BLOCK_BYTES)]])
    of_worker, of_scheduler = make_spec(config), make_spec(config)
    worker = of_worker.get_worker(unmapped)
    manager = of_scheduler.get_manager()
    for spec in (of_worker, of_scheduler):
        assert not spec.config.canonical_layout
        assert spec.replicated_layout is direct_is_replicated
        assert spec.kv_bytes_per_chunk == BLOCK_BYTES * (1 if direct_is_replicated else 2)
    assert of_worker.num_chunks == of_scheduler.num_chunks
    assert manager.manager.primary.slots == of_worker.num_chunks - 1, "the last row has the counters of the workers"
    manager.shutdown()
    worker.shutdown()


@pytest.mark.parametrize("unnamed", [True, False])
def test_worker_ends_after_the_name_of_its_region_was_removed(unnamed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """On an accelerator, too, the scheduler removes the name; if it never started, the worker does at its end."""
    spec = make_spec(offloading_config([{"type": "memory"}]))
    region = open_region(spec, rank=0)
    worker = SimpleNamespace(_mmap_region=region)
    path = region.mmap_path
    tolerate_unnaming(worker)
    if unnamed:
        scheduler = make_spec(dataclasses.replace(spec.config, canonical_layout=False))
        manager = scheduler.get_manager()
        assert not os.path.exists(path), "nothing is left if the engine is killed from now on"
        manager.shutdown()
    else:
        assert os.path.exists(path)
    region.cleanup()
    del region, worker
    gc.collect()
    assert not os.path.exists(path)
    assert "unlink" not in caplog.text


def test_workers_report_their_attention_backends(tmp_path: Path) -> None:
    """The scheduler names blocks by the attention backends of the workers' layers, whatever the chosen layout."""
    tiers = [{"type": "file", "path": str(tmp_path), "capacity": "1GiB"}]
    keys = [key_of(i) for i in range(4)]

    def found(backend: type, number: int) -> list[bytes]:
        layers = {"l0": SimpleNamespace(get_attn_backend=lambda: backend), "l1": object()}
        engine = SimpleNamespace(
            model_config=None, cache_config=None, compilation_config=SimpleNamespace(static_forward_context=layers)
        )
        config = offloading_config(tiers, engine_id=f"kvstore-test-{os.getpid()}-attention-{number}")
        config = dataclasses.replace(config, extra_config={**config.extra_config, "canonical_layout": False})
        worker = make_spec(config, known=engine).get_worker(kv_caches(False))
        driver = Driver(tiers, spec_class=KVStoreOffloadingSpec, engine_id=config.engine_id,
                        extra_config=config.extra_config)  # fmt: skip
        blocks = driver.load(keys)
        driver.store(keys)
        driver.close()
        worker.shutdown()
        return blocks

    one, other = type("OneBackend", (), {}), type("OtherBackend", (), {})
    assert [found(backend, i) for i, backend in enumerate((one, other, one))] == [[], [], keys]
