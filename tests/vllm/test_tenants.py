"""Tenants of a real engine, distinguished by cache salt, request parameter and adapter."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import Request

from kvstore.tenants import Tags, Tenants
from kvstore.vllm.connector import EngineContext, KVStoreConnector
from kvstore.vllm.tags import RequestTags
from tests.vllm.engines import BLOCK_TOKENS, Engine, Start, full_blocks, managed, prompt

_ROW_BYTES = 32768
"""A block of the tiny model, see test_own_manager.py."""


class Connector(KVStoreConnector):
    """Our connector, whose manager only asks for the tags of requests."""

    def __init__(self, tenants: Tenants) -> None:
        self.engine = EngineContext(SimpleNamespace())
        self.tags = RequestTags(tenants, self.engine)
        self.found: list[bytes] = []
        self._doubt = None
        self.connector_scheduler = SimpleNamespace(
            on_new_request=self._find, config=SimpleNamespace(tokens_per_hash=BLOCK_TOKENS), _req_status={}
        )

    def _find(self, request: Any) -> None:
        if request.request_id == "fails":
            raise RuntimeError("not added")
        self.found.append(self.tags.of(request.kv_transfer_params)[0])
        self.connector_scheduler._req_status[request.request_id] = SimpleNamespace(req_context=ReqContext(req_id="r"))


def request(salt: str | None = None, adapter: str | None = None, params: Any = None, *, fails: bool = False) -> Any:
    """Return vLLM's ``Request``."""
    lora: Any = None if adapter is None else SimpleNamespace(lora_name=adapter)
    sampling = SamplingParams(extra_args={"kv_transfer_params": params})
    return Request("fails" if fails else "works", [1, 2], sampling, None, lora_request=lora, cache_salt=salt)


@pytest.mark.parametrize("by", ["cache_salt", "adapter", "parameter"])
def test_a_request_belongs_to_the_tenant_that_the_rule_names(by: Any) -> None:
    """The tenant depends only on the rule's value; requests without one share a tenant."""
    tenants = Tenants(by=by)
    tags, connector = Tags(tenants), Connector(tenants)
    values = {"cache_salt": "salt", "adapter": "lora", "parameter": "named"}
    for has in (values, {}):
        connector.on_new_request(
            request(has.get("cache_salt"), has.get("adapter"), {"tenant": has["parameter"]} if has else {})
        )
    for params in (None, "text", {"tenant": 7}, {"tenant": None}):
        connector.on_new_request(request(params=params))
    with pytest.raises(RuntimeError):
        connector.on_new_request(request("salt", "lora", fails=True))
    assert connector.found == [tags.of(values[by]), *[tags.of("")] * 5]
    assert connector.tags.of({}) == (tags.of(""), None), "nothing of the last request is left"


def salted(engine: Engine, salt: str | None, *prompts: list[int], **policy: Any) -> list[dict[str, Any]]:
    """Send prompts to an engine with an empty device cache, and let it store the blocks."""
    engine.call("forget_device")
    answers: list[dict[str, Any]] = engine.call("ask", list(prompts), 6, policy or None, None, salt)
    engine.call("settle")
    return answers


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_neighbour_with_ten_times_the_traffic(start: Start, tmp_path: Path) -> None:
    """A victim with a guaranteed share keeps its hits; after a restart its blocks are found on the disk."""
    prompts = [prompt(number, 320) for number in range(3)]
    named = {"victim": {"values": ["of the victim"], "guaranteed": 0.5}, "noisy": {}}
    # Room for the victim's thirty blocks and as many others; the last row holds the workers' counters.
    shared = managed(
        tmp_path,
        cpu_bytes_to_use=61 * _ROW_BYTES,
        tiering={"tenants": {"by": "cache_salt", "named": named}, "policy": {"load": []}},
    )
    engine = start(offloading=shared, events=True)
    first = salted(engine, "of the victim", *prompts)
    assert [answer["cached"] for answer in first] == [0, 0, 0]
    for turn in range(3):
        salted(engine, "noisy", *(prompt(100 + turn * 10 + number, 320) for number in range(10)))
        again = salted(engine, "of the victim", *prompts)
        assert [answer["tokens"] for answer in again] == [answer["tokens"] for answer in first]
        assert [answer["cached"] for answer in again] == [full_blocks(320)] * 3
    tenants = engine.call("manager_stats")["tenants"]
    assert tenants["victim"]["evicted"] == 0 < tenants["noisy"]["evicted"]
    assert tenants["victim"]["loaded"] == 9 * 320 // BLOCK_TOKENS and tenants["others"]["stored"] == 0
    # Metrics are reported some time later.
    assert 0 < engine.call("metrics")["vllm:kvstore_tenant_blocks{loaded,victim}"] <= tenants["victim"]["loaded"]
    engine.kill()
    shared["tiering"] = {"tenants": {"by": "cache_salt", "named": named}}
    engine = start(offloading=shared, events=True)
    restarted = salted(engine, "of the victim", *prompts)
    assert [answer["tokens"] for answer in restarted] == [answer["tokens"] for answer in first]
    assert [answer["cached"] for answer in restarted] == [full_blocks(320)] * 3
    assert [answer["cached"] for answer in salted(engine, "somebody else", *prompts)] == [0] * 3
    engine.close()


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_tenants_by_parameter_share_nothing(start: Start, tmp_path: Path) -> None:
    """Equal prompts of two tenants have separate blocks, each found by its own tenant; events have vLLM's keys."""
    shared = managed(tmp_path, tiering={"tenants": {"by": "parameter"}, "allow": ["tenant", "store", "forget"]})
    engine = start(offloading=shared, events=True)
    text = prompt(1, 320)
    (first,) = salted(engine, None, text, tenant="a")
    (other,) = salted(engine, None, text, tenant="b")
    (again,) = salted(engine, None, text, tenant="a")
    (nobody,) = salted(engine, None, text)
    assert [answer["cached"] for answer in (first, other, again, nobody)] == [0, 0, full_blocks(320), 0]
    assert first["tokens"] == other["tokens"] == again["tokens"] == nobody["tokens"]
    engine.call("reset")
    (kept,) = salted(engine, None, text, tenant="b")
    assert kept["cached"] == full_blocks(320) and kept["tokens"] == first["tokens"]
    salted(engine, None, prompt(2, 64), tenant="b", forget="tenant")
    for _ in range(2):
        assert engine.call("manager_stats")["forgetting"] == 0
        (gone,) = salted(engine, None, text, tenant="b", store=False)
        (left,) = salted(engine, None, text, tenant="a")
        assert [gone["cached"], left["cached"]] == [0, full_blocks(320)]
        engine.call("reset")
    assert engine.call("tier_errors") == 0
    engine.close()
