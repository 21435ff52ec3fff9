"""Our connector's calls to the parts of kvstore, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

from kvstore.vllm.connector import EngineContext, KVStoreConnector


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
