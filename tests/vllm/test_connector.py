"""Our connector's calls to the parts of kvstore, without an engine."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestGroupState
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import PrepareStoreOutput, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.request import Request

from kvstore.vllm.compat import cut_hashes_with_tokens
from kvstore.vllm.connector import EngineContext, KVStoreConnector
from kvstore.vllm.proof import Doubt
from kvstore.vllm.region import region_pages, region_path
from tests.vllm.engine_config import engine
from tests.vllm.engines import prompt
from tests.vllm.harness import BLOCK_BYTES, ROWS, offloading_config

HASH_TOKENS = 16
init_none_hash(sha256)
HASHER = get_request_block_hasher(HASH_TOKENS, sha256)


class Connector(KVStoreConnector):
    """Our connector with a stand-in for vLLM's scheduler half."""

    def __init__(self) -> None:
        self.engine = EngineContext(SimpleNamespace())
        self.calls: list[Any] = []
        self._bounding_group_ids = ()
        self._doubt, self._logged, self._accepts_all, self._answers, self._loads = None, set(), True, True, True
        self.connector_scheduler: Any = SimpleNamespace(
            build_connector_meta=self._build,
            on_new_request=self._add,
            get_num_new_matched_tokens=lambda request, computed, max_num_new_tokens: (64, True),
            manager=SimpleNamespace(
                prepare_store=lambda keys, context: PrepareStoreOutput(list(keys), None, []),
                complete_store=lambda keys, context, success: self.calls.append((context.req_id, success)),
            ),
            update_connector_output=self._end_copies,
            request_finished=lambda request: (False, None),
            reset_cache=lambda: self.calls.append("reset"),
            config=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=HASH_TOKENS, kv_group_configs=()),
            _req_status={},
            _sliding_window_groups=(1,),
            _current_batch_load_jobs={},
        )
        self.output: Any = SimpleNamespace(scheduled_new_reqs=[], preempted_req_ids=None, finished_req_ids=None)

    @property
    def statuses(self) -> dict[str, Any]:
        """The requests that vLLM's scheduler half knows."""
        return self.connector_scheduler._req_status  # type: ignore[no-any-return]

    def _add(self, request: Request) -> None:
        context = ReqContext(req_id=request.request_id)
        status = SimpleNamespace(req=request, req_context=context, transfer_jobs=set(), group_states=())
        self.statuses[request.request_id] = status

    def offers(self, request: Request) -> tuple[bool, bool]:
        """Return whether a request is offered a load, and whether the manager would store a block of it."""
        is_loaded = self.get_num_new_matched_tokens(request, 0) == (64, True)
        context = self.statuses[request.request_id].req_context
        return is_loaded, bool(self.connector_scheduler.manager.prepare_store([b"key"], context).keys_to_store)

    def _end_copies(self, connector_output: Any) -> None:
        for status in self.statuses.values():
            self.connector_scheduler.manager.complete_store([b"key"], status.req_context, True)

    def _build(self, scheduler_output: Any) -> str:
        statuses = self.statuses
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


def test_a_reset_forgets_blocks_that_windows_may_have_freed() -> None:
    """VLLM offers all blocks again, from the first; those of the window that were offered before have no block id."""
    connector = Connector()
    groups = [RequestGroupState(block_ids=[1, 2, 3, 4], next_stored_chunk_idx=3) for _ in range(2)]
    waiting = [RequestGroupState(next_stored_chunk_idx=3) for _ in range(2)]
    connector.statuses["runs"] = SimpleNamespace(group_states=groups)
    connector.statuses["waits"] = SimpleNamespace(group_states=waiting)
    assert connector.reset_cache()
    assert [group.block_ids for group in (*groups, *waiting)] == [[1, 2, 3, 4], [0, 0, 0, 4], [], []]
    assert connector.calls == ["reset"]


def test_a_load_that_begins_in_a_step_is_not_flushed_in_it() -> None:
    """A reset preempts requests: the stores of one are flushed, the new load of another is kept."""
    connector = Connector()
    statuses = {
        name: SimpleNamespace(transfer_jobs={job}, group_states=()) for name, job in (("stores", 1), ("loads", 2))
    }
    connector.statuses.update(statuses)
    connector.connector_scheduler._current_batch_load_jobs = {2: "load"}
    connector.output.preempted_req_ids = ["stores", "loads", "gone"]
    assert connector.build_connector_meta(connector.output) == "meta"
    assert connector.calls == [{"stores": {1}, "loads": set()}]
    assert statuses["loads"].transfer_jobs == {2}


def test_blocks_that_a_request_has_freed_before_its_end_are_forgotten() -> None:
    """All of a preempted request, which may end all the same; of an ended one, those that its window has left."""
    connector = Connector()
    spec = SimpleNamespace(sliding_window=40)
    config = SimpleNamespace(tokens_per_block=16, kv_cache_spec=spec, hashes_per_chunk=1)
    connector.connector_scheduler.config.kv_group_configs = [config] * 2

    def status(computed: int) -> Any:
        groups = [RequestGroupState(block_ids=[1, 2, 3, 4, 5], next_stored_chunk_idx=offered) for offered in (5, 4)]
        ended = SimpleNamespace(num_computed_tokens=computed)
        return SimpleNamespace(req=ended, group_states=groups, transfer_jobs=set())

    names = {"runs": 79, "preempted": 0, "ended": 79, "ended late": 300, "ended early": 30}
    statuses = {name: status(computed) for name, computed in names.items()}
    connector.statuses.update(statuses)
    connector.output.preempted_req_ids = {"preempted", "gone"}
    connector.output.finished_req_ids = {"ended", "ended late", "ended early", "gone"}
    connector.build_connector_meta(connector.output)
    whole = [1, 2, 3, 4, 5]
    assert {name: [group.block_ids for group in each.group_states] for name, each in statuses.items()} == {
        "runs": [whole, whole],
        "preempted": [[], []],
        "ended": [whole, [0, 0, 3, 4, 5]],
        "ended late": [whole, [0, 0, 0, 0, 5]],
        "ended early": [whole, whole],
    }


def test_blocks_computed_from_a_failed_load_are_dropped() -> None:
    """Also those being copied, of each request with a block of the load; nothing more is stored of it or loaded."""
    connector, first, second = Connector(), request("1", 64), request("2", 64)
    for each, block in ((first, 7), (second, 8)):
        connector.on_new_request(each)
        status = connector.statuses[each.request_id]
        status.group_states = [RequestGroupState(block_ids=[block, 9 + block])]
    for failed in (set[int](), {7, 99}, {7}):
        connector.update_connector_output(SimpleNamespace(invalid_block_ids=failed))
    assert connector.calls == [("1", True), ("2", True), *[("1", False), ("2", True)] * 2]
    assert (connector.offers(first), connector.offers(second)) == ((False, False), (True, True))
    assert connector.engine.doubts["failed_load"] == 1


def request(name: str, tokens: int, **fields: Any) -> Request:
    """Return vLLM's ``Request`` for a random prompt."""
    made = Request(name, prompt(1, tokens), SamplingParams(max_tokens=9), None, block_hasher=HASHER, **fields)
    made.update_block_hashes()
    return made


def media(identifier: str) -> list[MultiModalFeatureSpec]:
    """Return an image at the start of a prompt."""
    place = PlaceholderRange(offset=0, length=32)
    return [MultiModalFeatureSpec(data=None, modality="image", identifier=identifier, mm_position=place)]


def test_an_unproven_request_is_offered_no_load_and_no_store() -> None:
    """Also each request of a doubted engine; a proven one is offered both, before and after another's doubt."""
    connector, doubted = Connector(), Connector()
    doubted._doubt = Doubt("attention", "it is not causal")
    first, second, named = request("1", 64), request("2", 64), request("3", 64, mm_features=media("name"))
    for each in (first, named, second):
        connector.on_new_request(each)
    assert [connector.offers(each) for each in (first, named, second)] == [(True, True), (False, False), (True, True)]
    doubted.on_new_request(first)
    assert doubted.offers(first) == (False, False)
    assert (connector.engine.doubts["media"], doubted.engine.doubts["attention"]) == (1, 1)


def test_an_unproven_request_reports_the_blocks_that_it_computes() -> None:
    """The manager counts the blocks behind those of the device's cache; a manager that can't count is left alone."""
    connector, named, counted = Connector(), request("1", 100, mm_features=media("name")), []
    connector.on_new_request(named)
    assert connector.get_num_new_matched_tokens(named, 0) == (0, False)
    connector.connector_scheduler.manager.exclude = lambda context, blocks: counted.append(blocks)
    assert connector.get_num_new_matched_tokens(named, 32) == (0, False)
    assert counted == [(100 - 32) // HASH_TOKENS]


@pytest.mark.parametrize("all_groups", [False, True])
def test_an_account_is_added_to_the_answer(all_groups: bool) -> None:
    """A request that asked gets its account; no other, none beside other connectors, and none from vLLM's manager."""
    connector, plain = Connector(), request("1", 64)
    connector.on_new_request(plain)

    def answer(one: Request) -> Any:
        return connector.request_finished_all_groups(one, ([],)) if all_groups else connector.request_finished(one, [])

    assert answer(plain) == (False, None)
    accounts: list[Any] = [{"computed": 0}, None]
    connector.connector_scheduler.manager.account = lambda context: accounts.pop(0)
    assert answer(plain) == (False, {"kvstore_account": {"computed": 0}})
    assert answer(plain) == (False, None)
    assert answer(request("untracked", 64)) == (False, None)
    connector._answers = False
    assert answer(plain) == (False, None)


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_session_is_judged_at_each_turn(is_scheduled: bool) -> None:
    """A later turn may bring media that its client has named: nothing is stored or loaded from then on."""
    connector, session = Connector(), request("session", 64, resumable=True)
    connector.on_new_request(session)
    assert connector.offers(session) == (True, True)
    session.mm_features.extend(media("name"))
    if is_scheduled:  # Otherwise it begins anew, after a preemption.
        connector.output.scheduled_new_reqs = [SimpleNamespace(req_id="session")]
        connector.build_connector_meta(connector.output)
        context = connector.statuses["session"].req_context
        assert not connector.connector_scheduler.manager.prepare_store([b"key"], context).keys_to_store
    assert connector.offers(session) == (False, False)
    assert connector.engine.doubts["media"] == 1


@given(turns=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 40)), min_size=2, max_size=4))
def test_hashes_of_a_session_are_those_of_its_tokens(turns: list[tuple[int, int]]) -> None:
    """Each turn replaces the last token of an answer, whose block may have a hash."""
    session = request("session", turns[0][0], resumable=True)
    cut_hashes_with_tokens(session, HASH_TOKENS)
    for number, (_, answer) in enumerate(turns):
        session.append_output_token_ids(prompt(100 + number, answer))
        if number + 1 == len(turns):
            break
        # As in vLLM's ``Scheduler._update_request_as_session``, up to 0.31.
        session.num_computed_tokens = session.num_tokens - 1
        tokens = session._all_token_ids
        kept = tokens[session.num_prompt_tokens : session.num_computed_tokens]
        del tokens[session.num_computed_tokens :]
        session._output_token_ids.clear()
        added = prompt(200 + number, turns[number + 1][0])
        tokens.extend(added)
        session.prompt_token_ids.extend(kept + added)
        session.update_block_hashes()
        session.num_prompt_tokens = len(session.prompt_token_ids)
    alone = Request("alone", list(session.all_token_ids), SamplingParams(max_tokens=9), None, block_hasher=HASHER)
    assert session.block_hashes == alone.block_hashes


@given(
    hashes=st.integers(0, 12),
    kept=st.integers(0, 12),
    steps=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    stored=st.integers(0, 12),
)
def test_a_turn_brings_its_blocks_and_drops_the_keys_of_cut_tokens(
    hashes: int, kept: int, steps: list[int], stored: int
) -> None:
    """In every group of layers: no block of the turn before, and no key and no progress behind the remaining tokens."""
    connector = Connector()
    before = [BlockHash(b"%032d" % number) for number in range(hashes)]
    after = before[:kept] + [BlockHash(b"%032d" % (100 + number)) for number in range(3)]

    def keys_of(blocks: list[BlockHash], group: int, step: int) -> list[Any]:
        return [make_offload_key(each, group) for each in blocks[step - 1 :: step]]

    connector.connector_scheduler.config.kv_group_configs = [SimpleNamespace(hashes_per_chunk=step) for step in steps]
    groups = []
    for number, step in enumerate(steps):
        keys = keys_of(before, number, step)
        groups.append(RequestGroupState(keys, [7] * len(keys), next_stored_chunk_idx=min(stored, len(keys))))
    session = SimpleNamespace(block_hashes=after, resumable=False)
    connector.statuses["session"] = SimpleNamespace(req=session, group_states=groups, transfer_jobs=set())
    connector.output.scheduled_new_reqs = [SimpleNamespace(req_id="session")]
    connector.build_connector_meta(connector.output)
    for number, (step, group) in enumerate(zip(steps, groups, strict=True)):
        assert group.offload_keys == keys_of(before[: min(kept, hashes) // step * step], number, step)
        assert group.block_ids == []
        assert group.next_stored_chunk_idx == min(stored, len(group.offload_keys))
