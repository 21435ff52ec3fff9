"""LMCache's storage manager, factory and load generator over kvstore: run by ``python -m tests.outside``.

As ``python -m tests.outside.check_lmcache DIRECTORY`` it is the process that stores objects until it is killed.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    L2AdaptersConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from bench.peers import adapter_config
from kvstore.errors import ConfigError
from tests.outside.killed import damage, stored_before_kill
from tests.s3.clients import options_for
from tests.s3.servers import moto, running

LAYOUT = MemoryLayoutDesc([torch.Size([2, 2, 64, 128])], [torch.bfloat16])
"""Keys and values of two layers, of a chunk of 64 tokens: 64 KiB."""
OBJECTS = 24
WAIT_S = 30


def on_disk(directory: Path, **more: Any) -> dict[str, Any]:
    """Return a tier in a directory."""
    return {"type": "file", "path": str(directory), "capacity": "64MiB", **more}


def manager(directory: Path) -> StorageManager:
    """Return LMCache's storage manager, as its server makes it, with 64 MiB of memory."""
    adapter = PluginL2AdapterConfig.from_dict(adapter_config(on_disk(directory)))
    memory = L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name="")
    return StorageManager(
        StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"), L2AdaptersConfig([adapter]))
    )


def key(number: int, *, model: str = "m", ranks: int = 1, rank: int = 0, group: int = 0, salt: str = "") -> ObjectKey:
    """Return the key of an object."""
    place = ObjectKey.ComputeKVRank(ranks, rank, ranks, rank)
    return ObjectKey(number.to_bytes(32, "big"), model, place, group, salt)


def item(value: float = 0.0, layout: MemoryLayoutDesc = LAYOUT) -> TensorMemoryObj:
    """Return an object in memory of its own, filled with one value."""
    (shape,), (dtype,) = layout.shapes, layout.dtypes
    raw = torch.full((shape.numel(),), value, dtype=torch.float32).to(dtype)
    metadata = MemoryObjMetadata(
        shape=shape, dtype=dtype, address=0, phy_size=raw.nbytes, ref_count=1, fmt=MemoryFormat.KV_2LTD
    )
    return TensorMemoryObj(raw.view(torch.uint8), metadata, parent_allocator=None)


def value_of(stored: Any) -> float:
    """Return the value of all elements; NaN if they differ."""
    tensor = stored.tensor.float()
    return float(tensor.flatten()[0]) if bool((tensor == tensor.flatten()[0]).all()) else float("nan")


class Caller:
    """Calls an adapter as LMCache's controllers do, and waits for each task's descriptor."""

    def __init__(self, tier: dict[str, Any]) -> None:
        self.adapter = create_l2_adapter(PluginL2AdapterConfig.from_dict(adapter_config(tier)))
        self.results: dict[int, Any] = {}

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> bool:
        task = self.adapter.submit_store_task(list(keys), list(objects))
        while task not in self.results:
            wait_fd(self.adapter.get_store_event_fd())
            self.results.update(self.adapter.pop_completed_store_tasks())
        return bool(self.results.pop(task).is_successful())

    def look_up(self, keys: Sequence[ObjectKey], layout: MemoryLayoutDesc = LAYOUT) -> list[bool]:
        layouts = {each.object_group_id: layout for each in keys}
        task = self.adapter.submit_lookup_and_lock_task(list(keys), layouts)
        query, descriptor = self.adapter.query_lookup_and_lock_result, self.adapter.get_lookup_and_lock_event_fd()
        found = self._bits(task, query, descriptor, len(keys))
        self.adapter.submit_unlock(list(keys))
        return found

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(list(keys), list(objects))
        return self._bits(task, self.adapter.query_load_result, self.adapter.get_load_event_fd(), len(keys))

    def _bits(self, task: int, query: Callable[[int], Any], descriptor: int, count: int) -> list[bool]:
        while (bits := query(task)) is None:
            wait_fd(descriptor)
        assert query(task) is None, "each result is returned once"
        return [bits.test(i) for i in range(count)]


def wait_fd(descriptor: int) -> None:
    """Wait for an event descriptor."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(WAIT_S * 1000)
    consume_fd(descriptor)


def until(is_true: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def open_caller(tmp_path: Path) -> Iterator[Callable[..., Caller]]:
    """Open adapters over one directory, and close them at the end."""
    made: list[Caller] = []

    def open_one(**tier: Any) -> Caller:
        made.append(Caller(on_disk(tmp_path / "kv", **tier)))
        return made[-1]

    yield open_one
    for each in made:
        each.adapter.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore")]


def put(lmcache: StorageManager, numbers: Sequence[int], value: float) -> None:
    """Write objects into LMCache's memory; its store controller gives them to the adapter."""
    keys = [key(number) for number in numbers]
    objects = lmcache.reserve_write(keys, LAYOUT)
    for number, each in zip(numbers, keys, strict=True):
        objects[each].tensor.fill_(value + number)
    lmcache.finish_write(keys)


def fetch(lmcache: StorageManager, numbers: Sequence[int]) -> list[float]:
    """Prefetch objects as LMCache's server does; return the values of the leading ones that were found."""
    keys = [key(number) for number in numbers]
    handle = lmcache.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)]))
    assert lmcache.wait_prefetch_status(handle, WAIT_S)
    result = lmcache.query_prefetch_status(handle)
    assert result is not None
    found = [each for i, each in enumerate(keys) if result.hit_cells[0].test(i)]
    with lmcache.read_prefetched_results(found) as objects:
        values = [value_of(each) for each in objects or []]
    lmcache.finish_read_prefetched(found)
    return values


def blocks(lmcache: StorageManager) -> int:
    """Return the number of blocks in the adapter's tiers."""
    (_, adapter), *_ = lmcache.l2_adapters()
    return sum(tier["blocks"] for tier in adapter.report_status()["tiers"])


def test_objects_survive_kill_9(tmp_path: Path) -> None:
    """LMCache finds objects stored before ``kill -9``; those of the cut store are right or missing."""
    directory = tmp_path / "kv"
    assert stored_before_kill("tests.outside.check_lmcache", directory) == OBJECTS

    lmcache = manager(directory)
    try:
        assert fetch(lmcache, range(OBJECTS)) == list(range(OBJECTS))
        for number in range(100, 200):
            assert fetch(lmcache, [number]) in ([], [number])
    finally:
        lmcache.close()


def test_damaged_objects_are_misses(tmp_path: Path) -> None:
    """After damage to every record, LMCache finds nothing, and stores the objects again."""
    directory = tmp_path / "kv"
    lmcache = manager(directory)
    put(lmcache, range(OBJECTS), 0)
    until(lambda: blocks(lmcache) == OBJECTS)
    lmcache.close()
    damage(directory)
    lmcache = manager(directory)
    try:
        assert fetch(lmcache, range(OBJECTS)) == []
        put(lmcache, range(OBJECTS), 0)
        until(lambda: blocks(lmcache) == OBJECTS)
    finally:
        lmcache.close()
    lmcache = manager(directory)
    try:
        assert fetch(lmcache, range(OBJECTS)) == list(range(OBJECTS))
    finally:
        lmcache.close()


def test_a_miss_leaves_the_object_alone(open_caller: Callable[..., Caller]) -> None:
    """Lookups and loads name each object that is there; the memory of the others is unchanged."""
    caller = open_caller()
    assert caller.store([key(1), key(3)], [item(1), item(3)])
    assert caller.look_up([key(n) for n in range(5)]) == [False, True, False, True, False]
    targets = [item(9) for _ in range(5)]
    assert caller.load([key(n) for n in range(5)], targets) == [False, True, False, True, False]
    assert [value_of(each) for each in targets] == [9, 1, 9, 3, 9]
    caller.adapter.delete([key(1)])
    until(lambda: caller.look_up([key(1), key(3)]) == [False, True])
    until(lambda: caller.adapter.get_usage().total_bytes_used > 0)


@pytest.mark.parametrize(
    "other",
    [key(1, model="n"), key(1, ranks=2), key(1, ranks=2, rank=1), key(1, group=1), key(1, salt="user"), key(2)],
    ids=["model", "ranks", "rank", "group", "salt", "chunk"],
)
def test_other_keys_share_no_object(open_caller: Callable[..., Caller], other: ObjectKey) -> None:
    """A model, rank, number of ranks, group, salt or chunk of its own has objects of its own, after a restart too."""
    first = open_caller()
    assert first.store([key(1)], [item(1)])
    for caller in (first, open_caller()):
        until(lambda caller=caller: caller.look_up([key(1)]) == [True])  # type: ignore[misc]
        assert caller.look_up([other]) == [False]
        assert caller.load([other], [item()]) == [False]


@pytest.mark.parametrize(
    "layout",
    [
        MemoryLayoutDesc([torch.Size([2, 2, 64, 128])], [torch.float16]),
        MemoryLayoutDesc([torch.Size([2, 4, 32, 128])], [torch.bfloat16]),
        MemoryLayoutDesc([torch.Size([2, 2, 128, 128])], [torch.bfloat16]),
    ],
    ids=["type", "shape", "length"],
)
def test_other_layouts_share_no_object(open_caller: Callable[..., Caller], layout: MemoryLayoutDesc) -> None:
    """An object of another data type, shape or length is another object, even under the same key."""
    caller = open_caller()
    assert caller.store([key(1)], [item(1)])
    assert caller.look_up([key(1)], layout) == [False]
    assert caller.load([key(1)], [item(layout=layout)]) == [False]


def test_a_lookup_without_a_layout_is_a_miss(open_caller: Callable[..., Caller]) -> None:
    """A lookup that does not state the layout of its objects finds none."""
    caller = open_caller()
    assert caller.store([key(1)], [item(1)])
    task = caller.adapter.submit_lookup_and_lock_task([key(1)], {})
    wait_fd(caller.adapter.get_lookup_and_lock_event_fd())
    assert caller.adapter.query_lookup_and_lock_result(task).popcount() == 0


@pytest.mark.parametrize(
    "impossible",
    [
        key(7, salt="\ud800"),
        key(7, group=1 << 64),
        key(7, model=""),
        key(7, model="\ud800"),
        ObjectKey(b"7" * 32, "m", -1),
        ObjectKey(b"7" * 32, "m", 1 << 64),
        ObjectKey(None, "m", 0),
    ],
    ids=["salt", "group", "no model", "model", "negative rank", "rank", "chunk"],
)
def test_an_impossible_key_costs_itself_alone(open_caller: Callable[..., Caller], impossible: ObjectKey) -> None:
    """The other objects of a task are stored, found, loaded and deleted."""
    caller = open_caller()
    keys = [key(1), impossible, key(2)]
    assert not caller.store(keys, [item(1), item(7), item(2)])
    assert caller.look_up(keys) == [True, False, True]
    targets = [item(9) for _ in keys]
    assert caller.load(keys, targets) == [True, False, True]
    assert [value_of(each) for each in targets] == [1, 9, 2]
    caller.adapter.delete(keys[:2])
    until(lambda: caller.look_up(keys) == [False, False, True])


def test_many_threads(open_caller: Callable[..., Caller]) -> None:
    """Tasks of eight threads end, each with its own bytes, also with more objects than rows of staging memory."""
    adapter = open_caller().adapter
    lock, stored, loaded = threading.Lock(), {}, {}

    def results_of(tasks: Sequence[int], done: dict[int, Any], take: Callable[[], dict[int, Any]]) -> list[Any]:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            with lock:
                done.update(take())
                if all(task in done for task in tasks):
                    return [done.pop(task) for task in tasks]
            time.sleep(0.01)
        raise AssertionError("tasks did not end")

    wrong: list[int] = []

    def work(thread: int) -> None:
        for turn in range(3):
            numbers = range(1000 * thread + 100 * turn, 1000 * thread + 100 * turn + 40)
            keys = [key(number, group=thread) for number in numbers]
            (result,) = results_of(
                [adapter.submit_store_task(keys, [item(number % 251) for number in numbers])],
                stored,
                adapter.pop_completed_store_tasks,
            )
            targets = [item() for _ in numbers]
            task = adapter.submit_load_task(keys, targets)
            (bits,) = results_of(
                [task],
                loaded,
                lambda task=task: {task: r} if (r := adapter.query_load_result(task)) is not None else {},
            )
            values = [value_of(each) for each in targets]
            if not result.is_successful() or bits.popcount() != 40 or values != [n % 251 for n in numbers]:
                wrong.append(thread)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_a_medium_that_fails_is_a_miss() -> None:
    """With a server that does not answer, tasks fail or miss, and none raises."""
    caller = Caller({"type": "redis", "url": "redis://127.0.0.1:1/0", "lookup_timeout": 0.2})
    try:
        assert caller.look_up([key(1)]) == [False]
        assert not caller.store([key(1)], [item(1)])
        assert caller.load([key(1)], [item()]) == [False]
    finally:
        caller.adapter.close()


def test_an_s3_tier(tmp_path: Path) -> None:
    """Objects in S3 are found by the next server."""
    with running(moto(tmp_path)) as server:
        tier = {"type": "s3", **options_for(server)}
        caller = Caller(tier)
        assert caller.store([key(n) for n in range(8)], [item(n) for n in range(8)])
        caller.adapter.close()
        caller = Caller(tier)
        assert caller.look_up([key(n) for n in range(9)]) == [True] * 8 + [False]
        targets = [item() for _ in range(8)]
        assert caller.load([key(n) for n in range(8)], targets) == [True] * 8
        assert [value_of(each) for each in targets] == list(range(8))
        caller.adapter.close()


def test_a_tier_that_cannot_be_opened_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its directory the tier caches nothing; it works once the directory is there."""
    monkeypatch.setattr("kvstore.lmcache._RETRY_S", 0.0)
    (tmp_path / "mount").mkdir()
    caller = Caller(on_disk(tmp_path / "mount" / "kv"))
    (tmp_path / "mount").rmdir()
    assert not caller.store([key(1)], [item(1)])
    assert caller.look_up([key(1)]) == [False]
    (tmp_path / "mount").mkdir()
    assert caller.store([key(1)], [item(1)])
    assert caller.look_up([key(1)]) == [True]
    caller.adapter.close()


def test_the_number_of_tiers_is_bounded(open_caller: Callable[..., Caller], monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of one model too many are not cached; those of the others are."""
    monkeypatch.setattr("kvstore.lmcache._LAYOUTS_MAX", 2)
    caller = open_caller()
    keys = [key(1, model=model) for model in ("a", "b", "c")]
    assert [caller.store([each], [item(1)]) for each in keys] == [True, True, False]
    assert caller.look_up(keys) == [True, True, False]


def test_objects_of_unknown_type_are_refused(open_caller: Callable[..., Caller]) -> None:
    """Bytes may be one kind of FP8 or another: they are cached only if the configuration names the kind."""
    layout = MemoryLayoutDesc([torch.Size([2, 2, 64, 128])], [torch.uint8])
    caller, named = open_caller(), open_caller(namespace="fp8_e4m3")
    assert not caller.store([key(1)], [item(1, layout)])
    assert caller.look_up([key(1)], layout) == [False]
    assert named.store([key(1)], [item(1, layout)])
    assert named.look_up([key(1)], layout) == [True]


def test_faults_of_the_configuration(tmp_path: Path) -> None:
    """Each fault is refused at the start, with the value, the expected value and the remedy."""
    good = adapter_config(on_disk(tmp_path))
    for parameters in ({}, {"tier": "file"}, {**good["adapter_params"], "stage": 1}):
        config = PluginL2AdapterConfig.from_dict({**good, "adapter_params": parameters})
        with pytest.raises(ConfigError, match=r'Expected "tier" alone, .* Correct "adapter_params" of --l2-adapter'):
            create_l2_adapter(config)
    with pytest.raises(ConfigError, match="Unknown backend 'fiel'"):
        create_l2_adapter(PluginL2AdapterConfig.from_dict(adapter_config(on_disk(tmp_path, type="fiel"))))
    faults = {"capacity": "much", "io": "process", "codec": "zap", "path": str(tmp_path / "absent" / "kv")}
    for option, value in faults.items():
        with pytest.raises(ConfigError, match=f"{value}|{tmp_path / 'absent'}"):
            create_l2_adapter(PluginL2AdapterConfig.from_dict(adapter_config(on_disk(tmp_path, **{option: value}))))


def test_every_task_is_reported_around_a_close(tmp_path: Path) -> None:
    """Tasks that a close cancels, and tasks after it, are failures and misses."""
    adapter = create_l2_adapter(PluginL2AdapterConfig.from_dict(adapter_config(on_disk(tmp_path))))
    tasks = {adapter.submit_store_task([key(n)], [item(n)]) for n in range(100)}
    adapter.close()
    tasks.add(adapter.submit_store_task([key(100)], [item(100)]))
    assert adapter.pop_completed_store_tasks().keys() == tasks
    load = adapter.submit_load_task([key(0)], [item()])
    assert not adapter.query_load_result(load).test(0)


def test_the_interface(open_caller: Callable[..., Caller]) -> None:
    """LMCache's factory makes the adapter; its three event descriptors differ."""
    adapter = open_caller().adapter
    assert isinstance(adapter, L2AdapterInterface)
    descriptors = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(descriptors) == 3
    assert not adapter.supports_global_eviction


def test_their_load_generator_verifies_every_byte(tmp_path: Path) -> None:
    """``lmcache bench l2`` stores objects, loads them, and compares all bytes."""
    spec = json.dumps(adapter_config(on_disk(tmp_path / "kv", namespace="bench")))
    options = ["--l2-adapter", spec, "--no-skip-verify", "--rounds", "3", "--in-flight", "4", "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "lmcache.cli.main", "bench", "l2", *options],
        env={**os.environ, "LMCACHE_DISABLE_BANNER": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "[Verify]" in done.stdout and "MISMATCH" not in done.stdout, done.stdout


if __name__ == "__main__":
    storing = manager(Path(sys.argv[1]))
    put(storing, range(OBJECTS), 0)
    until(lambda: blocks(storing) == OBJECTS)
    print("stored", OBJECTS, flush=True)
    for start in range(100, 200, 4):
        put(storing, range(start, start + 4), 0)
        time.sleep(0.005)
    threading.Event().wait()  # To be killed.
