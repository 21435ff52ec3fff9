"""SGLang's controller, host pools and factory over kvstore: run by ``python -m tests.outside``.

As ``python -m tests.outside.check_sglang DIRECTORY`` it is the process that stores pages until it is killed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import random
import sys
import threading
import time
import types
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.image_utils  # noqa: F401  Before the stand-in below, so that transformers finds no torchvision.


class _NoTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for torchvision, which SGLang's models of pictures import, and which does not fit every build of torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        ours = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: None if name.startswith("__") else object  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_NoTorchvision())

from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from kvstore.errors import ConfigError  # noqa: E402
from kvstore.sglang import KVStoreHiCache  # noqa: E402
from tests.outside.killed import damage, stored_before_kill  # noqa: E402
from tests.redis.servers import plain, running  # noqa: E402

PAGE_TOKENS = 16
PAGES = 24
TOKENS = array("q", range(1000, 1000 + PAGES * PAGE_TOKENS))
WAIT_S = 30

get_parallel().override_permanently(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0)


def host_pool(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, layers: int = 3) -> MHATokenToKVPoolHost:
    """Return SGLang's host pool of keys and values, with room for more than twice ``PAGES`` pages."""
    tokens = PAGES * PAGE_TOKENS
    device = MHATokenToKVPool(
        size=tokens,
        page_size=PAGE_TOKENS,
        dtype=dtype,
        head_num=2,
        head_dim=32,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
    pool = MHATokenToKVPoolHost(
        device._mha_buffer_info(),
        2.5,
        0,
        PAGE_TOKENS,
        layout,
        pin_memory=False,
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=layers,
    )
    pool.device_pool = device
    pool.kv_buffer.zero_()
    return pool


def extra(directory: Path, **tier: Any) -> dict[str, Any]:
    """Return ``--hicache-storage-backend-extra-config`` with a tier in a directory."""
    return {
        "backend_name": "kvstore",
        "module_path": "kvstore.sglang",
        "class_name": "KVStoreHiCache",
        "tier": {"type": "file", "path": str(directory), "capacity": "64MiB", **tier},
    }


def config(directory: Path, **changes: Any) -> HiCacheStorageConfig:
    """Return the configuration that SGLang's controller gives its factory."""
    fields: dict[str, Any] = {
        **{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1},
        **{"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m"},
        "extra_config": extra(directory),
    }
    return HiCacheStorageConfig(**{**fields, **changes})


def backend(settings: HiCacheStorageConfig, pool: Any) -> Any:
    """Return the backend that SGLang's factory makes for a pool."""
    made = StorageBackendFactory.create_backend("dynamic", settings, pool)
    try:
        made.register_mem_pool_host(pool)
    except BaseException:
        made.close()
        raise
    return made


def controller(directory: Path, pool: Any, storage: str = "dynamic") -> HybridCacheController:
    """Return SGLang's controller with its storage threads running, over kvstore or a backend of SGLang's own."""
    entry = PoolEntry(PoolName.KV, pool, pool.device_pool, lambda layer: layer, is_primary_index_anchor=True)
    allocator = PagedTokenToKVPoolAllocator(
        PAGES * PAGE_TOKENS, PAGE_TOKENS, torch.bfloat16, "cpu", pool.device_pool, need_sort=False
    )
    return HybridCacheController(
        allocator,
        HostPoolGroup([entry]),
        PAGE_TOKENS,
        None,
        threading.Event(),
        write_policy="write_through",
        io_backend="kernel",
        storage_backend=storage,
        prefetch_threshold=PAGE_TOKENS,
        model_name="m",
        storage_backend_extra_config=extra(directory) if storage == "dynamic" else None,
    )


def fill(pool: Any, indices: torch.Tensor, seed: int) -> None:
    """Fill pages with bytes that follow from the seed and the page's position."""
    for number, index in enumerate(indices[::PAGE_TOKENS].tolist()):
        pool.set_from_flat_data_page(index, content(pool, seed, number))


def content(pool: Any, seed: int, number: int) -> torch.Tensor:
    """Return the content of a page."""
    flat = pool.get_dummy_flat_data_page()
    generator = torch.Generator().manual_seed(seed * 1000 + number)
    return torch.randn(flat.shape, generator=generator, dtype=torch.float32).to(flat.dtype)


def holds(pool: Any, index: int, expected: torch.Tensor) -> bool:
    """Return whether the pool holds a page at a token index."""
    return torch.equal(pool.get_data_page(index), expected)


def indices_of(pages: Sequence[int]) -> torch.Tensor:
    """Return the token indices of pages."""
    return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])


def write(sglang: HybridCacheController, tokens: array[int], seed: int) -> int:
    """Store the pages of a prompt as SGLang's scheduler does; return the number of tokens stored."""
    pool = sglang.storage_host_pool
    indices = pool.alloc(len(tokens))
    fill(pool, indices, seed)
    stored = store(sglang, indices, tokens)
    pool.free(indices)
    return stored


def store(sglang: HybridCacheController, indices: torch.Tensor, tokens: array[int]) -> int:
    """Store pages of the host pool; return the number of tokens stored."""
    sglang.write_storage(indices, tokens, get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS))
    return int(sglang.ack_backup_queue.get(timeout=WAIT_S).completed_tokens)


def prefetch(sglang: HybridCacheController, tokens: array[int], *, seed: int) -> int:
    """Prefetch a prompt as SGLang's scheduler does; check every loaded page, and return their number."""
    indices = load(sglang, tokens)
    if indices is None:
        return 0
    check(sglang.storage_host_pool, indices, seed)
    return len(indices) // PAGE_TOKENS


def load(sglang: HybridCacheController, tokens: array[int]) -> torch.Tensor | None:
    """Prefetch a prompt; return the indices of the loaded pages, which are free again, or None if it is unknown."""
    pool = sglang.storage_host_pool
    sglang.prefetch(CacheRequestHandle("r", 0), tokens)
    operation = sglang.prefetch_hit_queue.get(timeout=WAIT_S)
    if not operation.storage_hit_count:
        return None
    operation.host_indices = sglang.alloc_prefetch_host_buffers(operation, operation.storage_hit_count)
    sglang.prefetch_buffer.put(operation)
    loaded = 0
    while not (ack := sglang.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
        loaded = ack.completed_tokens if ack.completed_tokens is not None else loaded
    pool.free(operation.host_indices)
    return operation.host_indices[:loaded]


def check(pool: Any, indices: torch.Tensor, seed: int) -> None:
    """Compare every byte of pages with those of :func:`fill`."""
    for number, index in enumerate(indices[::PAGE_TOKENS].tolist()):
        assert holds(pool, index, content(pool, seed, number)), f"page {number}"


def until(is_true: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def open_backends() -> Iterator[list[Any]]:
    """Backends to close at the end."""
    made: list[Any] = []
    yield made
    for each in made:
        each.close()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore")]
    assert not names


def test_the_controller_uses_the_zero_copy_interface(tmp_path: Path) -> None:
    """SGLang's factory accepts the class, its controller calls the v1 interface, and a detach leaves no thread."""
    sglang = controller(tmp_path / "kv", host_pool())
    try:
        assert isinstance(sglang.storage_backend, HiCacheStorage)
        assert sglang.page_set_func == sglang._page_set_zero_copy
        assert write(sglang, TOKENS, seed=1) == len(TOKENS)
        assert prefetch(sglang, TOKENS, seed=1) == PAGES
    finally:
        sglang.detach_storage_backend()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvstore")]


def test_pages_survive_kill_9(tmp_path: Path) -> None:
    """Pages stored before ``kill -9`` are loaded by the next process; those of the cut store are right or missing."""
    directory = tmp_path / "kv"
    assert stored_before_kill("tests.outside.check_sglang", directory) == len(TOKENS)

    sglang = controller(directory, host_pool())
    try:
        assert prefetch(sglang, TOKENS, seed=1) == PAGES
        for seed in range(2, 50):
            prefetch(sglang, array("q", [seed, *TOKENS[1:]]), seed=seed)  # Checks the pages that are there.
    finally:
        sglang.detach_storage_backend()


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first", "page_head"])
def test_every_layout_with_one_buffer(tmp_path: Path, layout: str, open_backends: list[Any]) -> None:
    """Pages of each layout are stored, and loaded by a new backend into other places of the pool."""
    keys = [f"{number:064x}" for number in range(PAGES)]
    pool = host_pool(layout)
    first = backend(config(tmp_path / "kv"), pool)
    fill(pool, indices_of(range(PAGES)), seed=3)
    assert first.batch_set_v1(keys, indices_of(range(PAGES))) == [True] * PAGES
    first.close()

    pool = host_pool(layout)
    second = backend(config(tmp_path / "kv"), pool)
    open_backends.append(second)
    places = random.Random(5).sample(range(2 * PAGES), PAGES)
    assert second.batch_exists([*keys, "absent"]) == PAGES
    assert second.batch_get_v1(keys, indices_of(places)) == [True] * PAGES
    for number, place in enumerate(places):
        assert holds(pool, place * PAGE_TOKENS, content(pool, 3, number))


def test_damaged_pages_are_misses(tmp_path: Path) -> None:
    """After damage to every record, SGLang loads nothing, and stores and loads the pages again."""
    directory = tmp_path / "kv"
    sglang = controller(directory, host_pool())
    assert write(sglang, TOKENS, seed=1) == len(TOKENS)
    sglang.detach_storage_backend()
    damage(directory)
    sglang = controller(directory, host_pool())
    try:
        assert prefetch(sglang, TOKENS, seed=1) == 0
        assert write(sglang, TOKENS, seed=2) == len(TOKENS)
        # A block whose load failed is a miss for the tier's negative_ttl.
        until(lambda: prefetch(sglang, TOKENS, seed=2) == PAGES)
    finally:
        sglang.detach_storage_backend()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": "other"},
        {"tp_size": 2},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"layout": "page_first_direct"},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_other_configurations_share_no_page(tmp_path: Path, changes: dict[str, Any], open_backends: list[Any]) -> None:
    """A model, rank, size, layout or data type of its own has pages of its own."""
    pool_changes = {name: changes.pop(name) for name in ("layout", "dtype") if name in changes}
    pool = host_pool()
    first = backend(config(tmp_path / "kv"), pool)
    open_backends.append(first)
    assert first.batch_set_v1(["a"], indices_of([0])) == [True]
    # Opened later, because a running backend sees other backends' pages with a delay.
    other = backend(config(tmp_path / "kv", **changes), host_pool(**pool_changes))
    same = backend(config(tmp_path / "kv"), host_pool())
    open_backends += [other, same]
    assert same.batch_exists(["a"]) == 1
    assert other.batch_exists(["a"]) == 0
    assert other.batch_get_v1(["a"], indices_of([1])) == [False]


def test_a_page_without_one_of_its_rows_is_a_miss(tmp_path: Path, open_backends: list[Any]) -> None:
    """A page is found and loaded if all of its rows are."""
    made = backend(config(tmp_path / "kv"), host_pool(layout="layer_first"))
    open_backends.append(made)
    assert made.batch_set_v1(["a", "b"], indices_of([0, 1])) == [True, True]
    rows = made._pools["kv"]
    rows.tier.remove(rows.block_keys(["a"])[-1:])
    assert made.batch_exists(["a"]) == 0
    assert made.batch_get_v1(["a", "b"], indices_of([2, 3])) == [False, True]


def test_ranks_of_an_mla_model_share_pages(tmp_path: Path, open_backends: list[Any]) -> None:
    """A page that rank 0 of an MLA model stored is found by rank 1."""
    device = MLATokenToKVPool(
        size=64,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )
    pools = [
        MLATokenToKVPoolHost(
            device._mla_buffer_info(),
            2.0,
            0,
            PAGE_TOKENS,
            "page_first",
            pin_memory=False,
            device_capacity_tokens=64,
            start_layer=0,
            end_layer=2,
            target_layer_num=2,
        )
        for _ in range(2)
    ]
    ranks = [
        backend(config(tmp_path / "kv", is_mla_model=True, tp_rank=rank, tp_size=2), pool)
        for rank, pool in enumerate(pools)
    ]
    open_backends += ranks
    for pool in pools:
        pool.kv_buffer.zero_()
    page = content(pools[0], 1, 0)
    pools[0].set_from_flat_data_page(0, page)
    assert ranks[0].batch_set_v1(["a"], indices_of([0])) == [True]
    until(lambda: ranks[1].batch_exists(["a"]) == 1)
    assert ranks[1].batch_get_v1(["a"], indices_of([2])) == [True]
    assert holds(pools[1], 2 * PAGE_TOKENS, page)


def test_many_threads(tmp_path: Path, open_backends: list[Any]) -> None:
    """Eight threads store, look up and load their pages at once; each gets its own bytes."""
    pool = host_pool()
    made = backend(config(tmp_path / "kv"), pool)
    open_backends.append(made)
    wrong: list[str] = []

    def work(thread: int) -> None:
        for turn in range(30):
            key, number = f"{thread}-{turn}", thread * 100 + turn
            pool.set_from_flat_data_page(2 * thread * PAGE_TOKENS, content(pool, 7, number))
            good = made.batch_set_v1([key], indices_of([2 * thread])) == [True]
            good = good and made.batch_exists([key, f"absent {key}"]) == 1
            good = good and made.batch_get_v1([key], indices_of([2 * thread + 1])) == [True]
            if not good or not holds(pool, (2 * thread + 1) * PAGE_TOKENS, content(pool, 7, number)):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_several_pools_like_the_file_backend(tmp_path: Path) -> None:
    """With a second pool, answers are those of SGLang's own file backend, for random sets of stored pages."""
    rng = random.Random(11)
    pool, draft = host_pool(), host_pool(layers=1)
    for case in range(12):
        settings = config(tmp_path / "kv", model_name=f"m{case}")
        made, file = backend(settings, pool), HiCacheFile(settings, str(tmp_path / f"file{case}"))
        file.register_mem_pool_host(pool)
        file.register_mem_host_pool_v2(pool, PoolName.KV)
        for each in (made, file):
            each.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        keys = [f"{case}-{number}" for number in range(8)]
        for name, share in ((PoolName.KV, 0.9), (PoolName.DRAFT, 0.7)):
            chosen = [number for number in range(8) if rng.random() < share]
            transfer = PoolTransfer(name, keys=[keys[n] for n in chosen], host_indices=indices_of(chosen))
            assert made.batch_set_v2([transfer]) == file.batch_set_v2([transfer]) == {name: [True] * len(chosen)}
        for policy, window in itertools.product((PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES), (1, 3)):
            wanted = [PoolTransfer(PoolName.DRAFT, keys=keys[:window], hit_policy=policy)]
            assert made.batch_exists_v2(keys, wanted) == file.batch_exists_v2(keys, wanted)
        everything = PoolTransfer(PoolName.DRAFT, keys=keys, host_indices=indices_of(range(8)))
        assert made.batch_get_v2([everything]) == file.batch_get_v2([everything])
        made.close()


def test_clear_removes_the_pages_of_this_model_alone(tmp_path: Path, open_backends: list[Any]) -> None:
    """After SGLang clears its storage, the pages are gone for good; another model's stay."""
    pool = host_pool()
    made, other = backend(config(tmp_path / "kv"), pool), backend(config(tmp_path / "kv", model_name="other"), pool)
    open_backends += [made, other]
    for each in (made, other):
        assert each.batch_set_v1(["a", "b"], indices_of([0, 1])) == [True, True]
    assert made.clear()
    assert made.batch_exists(["a", "b"]) == 0
    assert other.batch_exists(["a", "b"]) == 2
    again = backend(config(tmp_path / "kv"), pool)
    open_backends.append(again)
    assert again.batch_exists(["a", "b"]) == 0
    assert made.batch_set_v1(["a"], indices_of([0])) == [True]
    assert made.batch_exists(["a"]) == 1


def test_a_server_that_stops(tmp_path: Path, open_backends: list[Any]) -> None:
    """While a Redis server is stopped, calls return misses within the tier's limits; afterwards the pages are found."""
    pool = host_pool()
    fill(pool, indices_of([0, 1]), seed=1)
    with running(plain("redis", tmp_path / "redis")) as (server,):
        limits = dict.fromkeys(("lookup_timeout", "load_timeout", "store_timeout", "positive_ttl", "negative_ttl"), 0.2)
        tier = {"type": "redis", "url": server.url, **limits}
        made = backend(config(tmp_path, extra_config={**extra(tmp_path), "tier": tier}), pool)
        open_backends.append(made)
        assert made.batch_set_v1(["a"], indices_of([0])) == [True]
        server.pause()
        until(lambda: made.batch_exists(["a"]) == 0)
        assert made.batch_set_v1(["b"], indices_of([1])) == [False]
        assert made.batch_get_v1(["a"], indices_of([2])) == [False]
        server.resume()
        until(lambda: made.batch_get_v1(["a"], indices_of([2])) == [True])
        assert holds(pool, 2 * PAGE_TOKENS, content(pool, 1, 0))
        until(lambda: made.batch_exists(["a"]) == 1)
        server.kill()
        assert made.batch_get_v1(["a"], indices_of([3])) == [False]


def test_calls_after_close_are_misses(tmp_path: Path) -> None:
    """A closed backend answers with misses."""
    made = backend(config(tmp_path / "kv"), host_pool())
    made.close()
    made.close()
    assert made.batch_exists(["a"]) == 0
    assert made.batch_set_v1(["a"], indices_of([0])) == [False]
    assert made.batch_get_v1(["a"], indices_of([0])) == [False]
    assert not made.clear()


def test_faults_of_the_configuration(tmp_path: Path) -> None:
    """Each fault is refused at the start, with the value, the expected value and the remedy."""
    pool = host_pool()
    no_tier = config(tmp_path, extra_config={key: value for key, value in extra(tmp_path).items() if key != "tier"})
    with pytest.raises(ConfigError, match=r'"tier" is None. Expected .* Add it to --hicache-storage-backend-extra'):
        backend(no_tier, pool)
    with pytest.raises(ConfigError, match=r"no model name. Expected one, .* Start SGLang with"):
        backend(config(tmp_path, model_name=None), pool)
    with pytest.raises(ConfigError, match=r'"io" is "process". Expected "thread".* Leave the option out'):
        backend(config(tmp_path, extra_config=extra(tmp_path / "kv", io="process")), pool)
    with pytest.raises(ConfigError, match=r"type torch.uint8.* Expected .* Set the tier's option"):
        backend(config(tmp_path, extra_config=extra(tmp_path / "kv")), host_pool(dtype=torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match="Unknown backend 'fiel'"):
        backend(config(tmp_path, extra_config=extra(tmp_path / "kv", type="fiel")), pool)
    info = MHATokenToKVPool(
        size=64, page_size=PAGE_TOKENS, dtype=torch.bfloat16, head_num=2, head_dim=32, v_head_dim=16, layer_num=2,
        device="cpu", enable_memory_saver=False, enable_alt_stream=False,
    )._mha_buffer_info()  # fmt: skip
    uneven = AsymmetricMHATokenToKVPoolHost(
        info, 2.0, 0, PAGE_TOKENS, "page_first", pin_memory=False, device_capacity_tokens=64, start_layer=0, end_layer=2
    )
    with pytest.raises(ConfigError, match=r"Expected pages of equal rows of one buffer. Use --hicache-mem-layout"):
        backend(config(tmp_path, extra_config=extra(tmp_path / "kv")), uneven)


def test_the_older_interface_is_a_miss(tmp_path: Path, open_backends: list[Any]) -> None:
    """The methods for single tensors, which SGLang does not call here, neither store nor find anything."""
    made = backend(config(tmp_path / "kv"), host_pool())
    open_backends.append(made)
    page = torch.zeros(4)
    assert not made.set("a", page) and not made.batch_set(["a"], [page])
    assert made.get("a", page) is None and made.batch_get(["a"], [page]) == [None]
    assert not made.exists("a")
    assert isinstance(made, KVStoreHiCache)


if __name__ == "__main__":
    storing = controller(Path(sys.argv[1]), host_pool())
    print("stored", write(storing, TOKENS, seed=1), flush=True)
    for other_seed in range(2, 50):
        write(storing, array("q", [other_seed, *TOKENS[1:]]), other_seed)
    threading.Event().wait()  # To be killed.
