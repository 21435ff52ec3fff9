"""Our connector's calls to the parts of kvstore, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestGroupState

from kvstore.vllm.connector import EngineContext, KVStoreConnector


class Connector(KVStoreConnector):
    """Our connector with a stand-in for vLLM's scheduler half."""

    def __init__(self) -> None:
        self.engine = EngineContext(SimpleNamespace())
        self.calls: list[Any] = []
        self.connector_scheduler: Any = SimpleNamespace(
            build_connector_meta=self._build,
            reset_cache=lambda: self.calls.append("reset"),
            config=SimpleNamespace(blocks_per_chunk=1),
            _req_status={},
            _sliding_window_groups=(1,),
            _current_batch_load_jobs={},
        )
        self.output: Any = SimpleNamespace(scheduled_new_reqs=[], preempted_req_ids=None)

    def _build(self, scheduler_output: Any) -> str:
        statuses = self.connector_scheduler._req_status
        flushed = {name: set(statuses[name].transfer_jobs) for name in statuses}
        self.calls.append(flushed or "built")
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


def test_a_reset_forgets_blocks_that_windows_may_have_freed() -> None:
    """VLLM offers all blocks again, from the first; those of the window that were offered before have no block id."""
    connector = Connector()
    groups = [RequestGroupState(block_ids=[1, 2, 3, 4], next_stored_chunk_idx=3) for _ in range(2)]
    waiting = [RequestGroupState(next_stored_chunk_idx=3) for _ in range(2)]
    connector.connector_scheduler._req_status = {
        "runs": SimpleNamespace(group_states=groups),
        "waits": SimpleNamespace(group_states=waiting),
    }
    assert connector.reset_cache()
    assert [group.block_ids for group in (*groups, *waiting)] == [[1, 2, 3, 4], [0, 0, 0, 4], [], []]
    assert connector.calls == ["reset"]


def test_a_load_that_begins_in_a_step_is_not_flushed_in_it() -> None:
    """A reset preempts requests: the stores of one are flushed, the new load of another is kept."""
    connector = Connector()
    statuses = {name: SimpleNamespace(transfer_jobs={job}) for name, job in (("stores", 1), ("loads", 2))}
    connector.connector_scheduler._req_status = statuses
    connector.connector_scheduler._current_batch_load_jobs = {2: "load"}
    connector.output.preempted_req_ids = ["stores", "loads", "gone"]
    assert connector.build_connector_meta(connector.output) == "meta"
    assert connector.calls == [{"stores": {1}, "loads": set()}]
    assert statuses["loads"].transfer_jobs == {2}
