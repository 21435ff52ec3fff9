"""The differences between vLLM 0.28 and 0.33, tested with classes of both shapes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext

from kvstore.tiering.policy import PARAMETERS, PolicyParser
from kvstore.types import Locality, Medium
from kvstore.vllm import compat


@dataclass
class OldResult:
    """JobResult of 0.28 and 0.30."""

    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None


@dataclass
class OldEvent:
    """OffloadingEvent of 0.28."""

    keys: list[bytes]
    medium: Any
    removed: bool
    locality: Any = None


@dataclass
class NewEvent:
    """OffloadingEvent of 0.33."""

    keys: list[bytes]
    medium: Any
    removed: bool
    locality: Any = None
    ownership: str | None = None
    removal_expected: bool = False
    metadata_only: bool = False


class OldRegion:
    """SharedOffloadRegion of 0.28."""

    def __init__(self, engine_id: str, num_blocks: int, rank: int, kv_bytes_per_block: int, cpu_page_size: int) -> None:
        self.shape = (num_blocks, kv_bytes_per_block, rank, cpu_page_size)


class NewRegion:
    """SharedOffloadRegion of 0.33."""

    def __init__(
        self,
        engine_id: str,
        num_chunks: int,
        rank: int,
        kv_bytes_per_chunk: int,
        cpu_page_size: int,
        barrier: Any = None,
        *,
        num_segments: int = 1,
    ) -> None:
        self.shape = (num_chunks, kv_bytes_per_chunk, rank, cpu_page_size)


def old_init(self: Any, offloading_spec: Any, primary_kv_view: Any, tier_type: str) -> None:
    """SecondaryTierManager of 0.28 and 0.30."""


def new_init(
    self: Any, offloading_spec: Any, primary_kv_view: Any, tier_type: str, backpressure_detector: Any = None
) -> None:
    """SecondaryTierManager of 0.32 and 0.33."""


def test_the_constructor_gets_what_it_takes() -> None:
    """``backpressure_detector`` is passed on only if the base class accepts it."""
    assert compat.supported_kwargs(old_init, {"backpressure_detector": 1}) == {}
    assert compat.supported_kwargs(new_init, {"backpressure_detector": 1}) == {"backpressure_detector": 1}


@pytest.mark.parametrize("ids", [np.array([3, 1, 2], dtype=np.int32), np.array([3, 1, 2], dtype=np.int64), [3, 1, 2]])
@pytest.mark.parametrize("name", ["chunk_ids", "block_ids"])
def test_rows_of_a_job(ids: Any, name: str) -> None:
    """Rows are plain integers, whatever the field's name and the number type."""
    rows = compat.chunk_ids(SimpleNamespace(**{name: ids}))
    assert rows == [3, 1, 2] and all(type(row) is int for row in rows)


def test_results_have_the_fields_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are reported if vLLM has a field for them, and otherwise omitted."""
    assert compat.make_result(1, True, transfer_time=0.5, transfer_bytes=7).transfer_bytes == 7
    monkeypatch.setattr(compat, "JobResult", OldResult)
    assert compat.make_result(1, False, transfer_time=0.5, transfer_bytes=7) == OldResult(1, False, None, 0.5)


@pytest.mark.parametrize("shape", [OldEvent, NewEvent])
def test_events_have_the_fields_of_the_version(monkeypatch: pytest.MonkeyPatch, shape: Any) -> None:
    """A removal is announced if vLLM has a field for it."""
    monkeypatch.setattr(compat, "OffloadingEvent", shape)
    event = compat.make_event((b"k",), "STORAGE", removed=False, locality="LOCAL")
    assert event.keys == [b"k"] and not event.removed and event.locality == "LOCAL"
    assert getattr(event, "removal_expected", True)


@pytest.mark.parametrize(("region", "rows"), [(OldRegion, "num_blocks"), (NewRegion, "num_chunks")])
def test_the_region_is_opened_by_either_name(monkeypatch: pytest.MonkeyPatch, region: Any, rows: str) -> None:
    """In spec and region, 0.28 calls the region's rows blocks, and later versions call them chunks."""
    monkeypatch.setattr(compat, "SharedOffloadRegion", region)
    config = SimpleNamespace(engine_id="e")
    spec = SimpleNamespace(config=config, kv_bytes_per_chunk=4096, cpu_page_size_per_worker=1024, **{rows: 5})
    assert compat.open_region(spec, rank=2).shape == (5, 4096, 2, 1024)


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
    assert compat.request_ends(SimpleNamespace()) == {}


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
