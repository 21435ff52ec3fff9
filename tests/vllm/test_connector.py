"""Our connector's calls to the parts of kvstore, without an engine."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.vllm.connector import EngineContext, KVStoreConnector
from kvstore.vllm.region import region_pages, region_path
from tests.vllm.engine_config import engine
from tests.vllm.harness import BLOCK_BYTES, ROWS, offloading_config


class Connector(KVStoreConnector):
    """Our connector with a stand-in for vLLM's scheduler half."""

    def __init__(self) -> None:
        self.engine = EngineContext(SimpleNamespace())
        self.calls: list[Any] = []
        self.connector_scheduler: Any = SimpleNamespace(build_connector_meta=self._build)
        self.output: Any = SimpleNamespace(scheduled_new_reqs=[])

    def _build(self, scheduler_output: Any) -> str:
        self.calls.append("built")
        return "meta"


def test_each_all_blocks_cleared_event_is_noticed_once() -> None:
    """Each ``AllBlocksCleared`` that vLLM publishes is noticed once, and no event is lost."""
    connector, queued = Connector(), [[], None, [AllBlocksCleared()], [BlockRemoved([1], "GPU"), AllBlocksCleared()]]
    expected = [each and list(each) for each in queued]
    manager = SimpleNamespace(take_events=lambda: queued.pop(0), block_pool=None)
    connector.engine.on_cleared.append(lambda: connector.calls.append("cleared"))
    connector.bind_kv_cache_manager(manager)
    assert [manager.take_events() for _ in range(4)] == expected
    assert connector.calls == ["cleared"] * 2


def test_a_step_is_reported_after_its_metadata() -> None:
    """The step's blocks are submitted before a pause may begin."""
    connector = Connector()
    connector.engine.on_scheduled.append(connector.calls.append)
    assert connector.build_connector_meta(connector.output) == "meta"
    assert connector.calls == ["built", connector.output]


@pytest.mark.parametrize("ours", [True, False])
def test_vllms_spec_has_a_locked_region_with_a_tier_of_kvstore(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """VLLM's own spec allocates its region as kvstore's does, and without a tier of kvstore as ever."""
    tier = {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "memory"}
    config = offloading_config([tier if ours else {"type": "example"}])
    known = engine()
    known.kv_transfer_config = SimpleNamespace(
        engine_id=config.engine_id, kv_connector_extra_config=dict(config.extra_config)
    )

    def init(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.connector_scheduler = self.connector_worker = None
        self.manager = TieringOffloadingSpec(config).get_manager()

    monkeypatch.setattr(OffloadingConnector, "__init__", init)
    connector: Any = KVStoreConnector(known, None, None)
    try:
        assert os.path.exists(region_path(config.engine_id)) == ours
        assert sum(region_pages(config.engine_id).values()) == (ROWS * BLOCK_BYTES if ours else 0)
    finally:
        connector.manager.shutdown()
    assert not [name for name in os.listdir("/dev/shm") if config.engine_id in name]
