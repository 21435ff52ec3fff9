"""A pytest plugin for vLLM's own tests: kvstore's connector, manager and disk tier in place of vLLM's.

It runs where ``tests`` is vLLM's package, so it imports nothing of ours but ``kvstore``. ``not_applicable.toml`` lists
the tests that do not apply, with reasons. Each of them must fail, so that the list stays true.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.v1.kv_offload.base import LookupResult as VllmLookupResult
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
from vllm.v1.kv_offload.cpu import manager as cpu
from vllm.v1.kv_offload.tiering import manager as tiering
from vllm.v1.kv_offload.tiering.fs import manager as fs

from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier
from kvstore.primary.tier import SlotState
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.types import LookupResult, RequestContext
from kvstore.vllm import KVStoreConnector, KVStoreTier, manager, plugin
from kvstore.vllm.connector import EngineContext
from kvstore.vllm.foreign import ForeignTier
from kvstore.vllm.manager import KVStoreOffloadingManager
from kvstore.vllm.tags import RequestTags

_HERE = Path(__file__).parent
_ENGINE = run_path(str(_HERE.parent / "vllm" / "engine_config.py"))["engine"]
_SLOT_BYTES = 4096


class DiskTier(KVStoreTier):
    """kvstore's disk tier with the constructor of vLLM's ``FileSystemTierManager``."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, root_dir: str, **options: Any
    ) -> None:
        offloading_spec.attention = None
        for name in ("n_read_threads", "n_write_threads", "enable_kv_events"):
            options.pop(name, None)
        # The tests wait for jobs by a drain, which vLLM itself makes only at a reset.
        options |= {"path": root_dir, "capacity": "256MiB", "reserve": 0, "reset": "keep"}
        try:
            with EngineContext(_ENGINE()).entered():
                super().__init__(offloading_spec, primary_kv_view, "file", **options)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        self._root = root_dir
        # The tests wait until this queue has an answer. Ours answers at once, as soon as it has read its directory.
        self._lookup_manager = SimpleNamespace(_pending_results=self)
        self.file_mapper = SimpleNamespace(get_file_name=self._file_of)

    def empty(self) -> bool:
        """Whether a lookup has no answer yet."""
        return bool(self.tier.stats().recovering)

    def _file_of(self, key: bytes) -> str:
        """Return a path that exists exactly if the medium has the block: ours is no file of its own."""
        return self._root if self.tier.lookup(key, RequestContext("files")) is LookupResult.HIT else "/none"


class Tier(ForeignTier):
    """One of vLLM's tiers, with vLLM's keys, because the tests look into the tier."""

    def masked(self, key: bytes) -> bytes:
        """Return the key."""
        return key


class Manager(KVStoreOffloadingManager):
    """kvstore's manager with the constructor of vLLM's ``CPUOffloadingManager``, or around vLLM's tiers."""

    def __init__(
        self,
        num_chunks: int,
        cache_policy: str = "lru",
        enable_events: bool = False,
        *,
        memory: memoryview | None = None,
        theirs: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        rows = (memory or memoryview(bytearray(max(1, num_chunks) * _SLOT_BYTES))).cast("B")
        primary = PrimaryTier(rows, len(rows) // max(1, num_chunks), policy=cache_policy, slots=num_chunks)
        engine = EngineContext(_ENGINE())
        spec = SimpleNamespace(
            extra_config={},
            window_groups=frozenset(),
            engine=engine,
            config=SimpleNamespace(parallel=None, engine_id="outside"),
            secondary_tier_configs=[{"type": tier.tier_type} for tier in theirs],
            kv_events_config=OffloadingKVEventsConfig(enable_events, False),
        )
        names = [tier.tier_type for tier in theirs]
        tiers = [
            Tier(tier, name if name not in names[:i] else f"{name}-{i}", Namespace({}))
            for i, (name, tier) in enumerate(zip(names, theirs, strict=True))
        ]
        # The tests have five slots, of which the usual shares would leave too few.
        config = TieringConfig(events=enable_events, store_share=1.0, promotion_share=1.0)
        ours = TieringManager(primary, tiers, config)
        super().__init__(ours, tiers, None, (rows,), spec, RequestTags(None, engine))
        self._req_state = ours._requests.by_id  # The tests begin a request unless it is here.

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        """Begin the request before its first store, as vLLM's scheduler does and some tests do not."""
        if req_context.req_id not in self._req_state:
            self.on_new_request(req_context)
        return super().prepare_store(keys, req_context)


def _manager_of_tiers(primary_tier: Any, secondary_tiers: Sequence[Any]) -> Manager:
    """Return kvstore's manager for the constructor arguments of vLLM's ``TieringOffloadingManager``."""
    made = Manager(primary_tier.num_chunks, enable_events=True, memory=primary_tier.memory, theirs=secondary_tiers)
    answers = {SlotState.READY: VllmLookupResult.HIT, SlotState.WRITING: VllmLookupResult.RETRY}
    find = made.manager.primary.lookup
    primary_tier.lookup = lambda key, context: answers.get(find(key), VllmLookupResult.MISS)
    return made


def _primary_tier(num_chunks: int, mmap_region: Any, **options: Any) -> Any:
    memory = mmap_region.create_kv_memoryview()
    return SimpleNamespace(num_chunks=num_chunks, memory=memory, get_kv_memoryview=lambda: memory)


def pytest_configure(config: pytest.Config) -> None:
    """Put kvstore's classes into the modules from which vLLM's tests import them."""
    plugin.register()
    offloading_connector.OffloadingConnector = KVStoreConnector
    fs.FileSystemTierManager = DiskTier
    cpu.CPUOffloadingManager = Manager
    tiering.TieringOffloadingManager, tiering.CPUPrimaryTierOffloadingManager = _manager_of_tiers, _primary_tier
    manager._REPORT_INTERVAL_S = 0.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the failure of the tests that do not apply."""
    reasons = list(_not_applicable())
    unused = {test for test, _ in reasons}
    for item in items:
        for test, reason in reasons:
            if re.fullmatch(re.escape(test) + r"(\[.*\])?", item.nodeid.rpartition("/")[2]):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
                unused.discard(test)
    files = {item.nodeid.rpartition("/")[2].partition("::")[0] for item in items}
    unknown = sorted(test for test in unused if test.partition("::")[0] in files)
    if unknown:
        raise pytest.UsageError(f"not_applicable.toml lists tests that do not exist: {', '.join(unknown)}")


def _not_applicable() -> Iterator[tuple[str, str]]:
    for group in tomllib.loads((_HERE / "not_applicable.toml").read_text())["group"]:
        for test in group["tests"]:
            yield f"{group['file']}::{test}", group["reason"]
