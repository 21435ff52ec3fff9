"""The differences between vLLM 0.31 and 0.33."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import OffloadingEvent, ReqContext

from kvstore.tiering.policy import PARAMETERS, PolicyParser
from kvstore.types import Locality, Medium
from kvstore.vllm import compat


def test_incomplete_blocks_are_reported_since_vllm_0_33() -> None:
    """Before 0.33 there is no such event, and nothing is reported."""
    event = compat.unfilled_event([b"k"])
    if "metadata_only" in {field.name for field in fields(OffloadingEvent)}:
        assert event is not None and event.keys == [b"k"] and event.removed
    else:
        assert event is None
    assert compat.unfilled_event([]) is None


def test_an_engine_still_gets_adapters_in_the_form_that_it_declares() -> None:
    """VLLM decodes the arguments of a call from another process by the annotations of the engine's method."""
    seen = []

    class EngineCore:
        model_executor = None

        def __init__(self) -> None:
            compat.on_adapter_loaded(seen.append)

        def add_lora(self, lora_request: LoRARequest) -> bool:
            return lora_request.lora_name == "name"

        add_lora.__annotations__ = EngineCoreProc.add_lora.__annotations__

    engine = EngineCore()
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(LoRARequest("name", 1, "/path")))
    assert engine.add_lora(*EngineCoreProc._convert_msgspec_args(engine.add_lora, (sent,)))
    assert [adapter.lora_path for adapter in seen] == ["/path"]


def test_keys_of_a_request() -> None:
    """The keys of a request and the ends of their blocks, if vLLM provides them."""
    ends = {b"a": 16, b"b": 32, b"c": 48}
    assert compat.request_ends(SimpleNamespace(_offload_key_positions=ends)) == ends


@pytest.mark.parametrize(
    ("medium", "locality", "source"),
    [
        (Medium.CPU, Locality.LOCAL, "host"),
        (Medium.STORAGE, Locality.LOCAL, "disk"),
        (Medium.STORAGE, Locality.REMOTE, "external_unspecified"),
    ],
)
def test_where_a_hit_came_from(medium: Medium, locality: Locality, source: str) -> None:
    """Hits are counted under vLLM's name for the kind of device."""
    assert compat.cache_hit_source(medium, locality).value == source


def test_vllm_passes_no_trace_to_a_manager() -> None:
    """The request context has no trace headers, so kvstore makes no spans until a version of vLLM adds them."""
    names = [field.name for field in fields(ReqContext)]
    assert "req_id" in names and not [name for name in names if "trace" in name], "spans can be made now"


def test_hints_override_parameters() -> None:
    """Payloads of kvstore's actions apply in order; other payloads change nothing."""

    def request(params: object, *actions: tuple[str, str, dict[str, object]]) -> SimpleNamespace:
        made = [KvHintAction("a", kind, version, payload) for kind, version, payload in actions]
        hints = KvHintsEnvelope("1", "m", made)
        return SimpleNamespace(kv_transfer_params={"kvstore": params}, kv_hints=hints)

    assert compat.request_params(SimpleNamespace(kv_transfer_params=None)) is None
    assert compat.request_params(SimpleNamespace(kv_transfer_params={"kvstore": {"ttl": 5}}, kv_hints=None)) == {
        "ttl": 5
    }
    assert compat.request_params(request(None, ("pin", "1", {"ttl": 1}))) is None
    retain, demote = ("kvstore", "1", {"retain": 5}), ("kvstore", "1", {"retain": 9, "demote": True})
    assert compat.request_params(request({"ttl": 5, "retain": 1}, retain, demote)) == {
        "ttl": 5,
        "retain": 9,
        "demote": True,
    }
    for unknown in (request(None, ("kvstore", "2", {"retain": 5})), request("mistake", retain)):
        parser = PolicyParser((), {}, PARAMETERS)
        policy = parser.parse(compat.request_params(unknown))
        assert parser.mistakes == 1 and not policy.store and policy.retain == ()


_TREES = st.recursive(st.booleans(), lambda inner: st.lists(inner, max_size=4), max_leaves=12)
"""A ``MultiConnector`` as a list; a connector as whether it is kvstore's."""


class Connector:
    """A connector of a worker that is not kvstore's."""

    def handle_preemptions(self, metadata: Any) -> None:
        """Report that it begins."""
        log, name = metadata
        log.append((isinstance(self, Ours), name))


class Ours(Connector):
    """One of kvstore's."""

    def __init__(self) -> None:
        compat.flush_first(self)
        self.engine_id = compat.own_engine_id("engine")


class Multi:
    """A ``MultiConnector``."""

    def __init__(self, tree: list[Any]) -> None:
        self._connectors: list[Any] = []
        for each in tree:
            self._connectors.append(Multi(each) if isinstance(each, list) else Ours() if each else Connector())

    def handle_preemptions(self, metadata: Any) -> None:
        """Call the connectors in their order."""
        for each, part in zip(self._connectors, metadata.metadata, strict=True):
            each.handle_preemptions(part)


@given(st.lists(_TREES, max_size=4))
def test_all_connectors_of_kvstore_flush_before_any_other_begins(tree: list[Any]) -> None:
    """However many there are, and however deep: each connector is called once, with its own metadata."""
    log: list[tuple[bool, int]] = []
    kinds: list[bool] = []

    def metadata_of(inner: list[Any]) -> Any:
        parts: list[Any] = []
        for each in inner:
            if isinstance(each, list):
                parts.append(metadata_of(each))
            else:
                parts.append((log, len(kinds)))
                kinds.append(each)
        return SimpleNamespace(metadata=parts)

    multi: Any = Multi(tree)
    multi.handle_preemptions(metadata_of(tree))
    assert log == sorted(zip(kinds, range(len(kinds)), strict=True), key=lambda part: not part[0])


@given(st.lists(_TREES, max_size=4))
def test_each_connector_of_kvstore_has_its_own_region(tree: list[Any]) -> None:
    """All have the engine's id in their names; the scheduler and its workers find the same ones."""

    def ids(multi: Multi) -> list[str]:
        found = []
        for each in multi._connectors:
            found += ids(each) if isinstance(each, Multi) else [each.engine_id] if isinstance(each, Ours) else []
        return found

    names = ids(Multi(tree))
    assert len(set(names)) == len(names) and all(name.startswith("engine-") for name in names)
    assert ids(Multi(tree)) == names
    assert compat.own_engine_id("engine") == "engine"


class Around(Multi):
    """A ``MultiConnector`` with a role, around others."""

    def __init__(self, roles: list[str], found: list[bool]) -> None:
        self._kv_transfer_config = KVTransferConfig(kv_connector="MultiConnector", kv_role=roles[0])
        self._connectors = []
        if len(roles) > 2:
            Around(roles[1:], found)
        else:
            found.append(compat.may_load(KVTransferConfig(kv_connector="KVStoreConnector", kv_role=roles[1])))


@pytest.mark.parametrize(
    ("roles", "loads"),
    [
        (["kv_both"], True),
        (["kv_producer"], False),
        (["kv_both", "kv_producer"], True),
        (["kv_producer", "kv_both"], False),
        (["kv_producer", "kv_both", "kv_both"], False),
    ],
)
def test_nothing_is_loaded_where_the_role_of_the_engine_is_that_of_a_producer(roles: list[str], loads: bool) -> None:
    """Of connectors in each other, vLLM uses the role of the outermost one."""
    found: list[bool] = []
    if len(roles) > 1:
        Around(roles, found)
    else:
        found.append(compat.may_load(KVTransferConfig(kv_connector="KVStoreConnector", kv_role=roles[0])))
    assert found == [loads]
