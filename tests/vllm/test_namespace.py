"""The fields that separate two engines' caches: every field that vLLM lets a tier read."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.config import OffloadingCacheConfig, OffloadingGroupConfig, OffloadingModelConfig

from kvstore.errors import ConfigError
from kvstore.vllm import KVStoreOffloadingSpec
from kvstore.vllm.connector import EngineContext, current_engine
from kvstore.vllm.namespace import engine_namespace
from tests.vllm.engine_config import HFConfig, engine
from tests.vllm.harness import offloading_config, parallel


def digest(config: Any = None, engine_config: Any = None, slot_bytes: int = 4096, *groups: Any) -> str:
    """Return the namespace of a configuration."""
    spec = SimpleNamespace(config=config or offloading_config([]))
    known = EngineContext(engine_config or engine(), SimpleNamespace(kv_cache_groups=groups) if groups else None)
    return engine_namespace(spec, slot_bytes, known).hex


GROUP = offloading_config([]).groups[0]
OFFLOADING_CHANGES: dict[str, dict[str, Any]] = {
    "model name": {"model": OffloadingModelConfig(name="org/other", dtype="float16")},
    "dtype": {"model": OffloadingModelConfig(name="org/model", dtype="float8_e4m3")},
    "tokens per hash": {"cache": OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1)},
    "blocks per chunk": {"cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2)},
    "tokens per block": {"groups": (dataclasses.replace(GROUP, tokens_per_block=32),)},
    "layer names": {"groups": (dataclasses.replace(GROUP, layer_names=("l0", "l2")),)},
    "order of layers": {"groups": (dataclasses.replace(GROUP, layer_names=("l1", "l0")),)},
    "another group": {"groups": (GROUP, OffloadingGroupConfig(tokens_per_block=16, layer_names=("x",), group_id=1))},
    "bytes per block": {"worker_kv_bytes_per_block": 4096},
    "layout": {"kv_cache_layout": "LBNHC"},
    "no layout": {"kv_cache_layout": None},
    "canonical": {"canonical_layout": True},
    "replicated": {"replicated_layout": True},
    "world size": {"parallel": parallel(world_size=2)},
    "tensor parallel": {"parallel": parallel(tp_size=2)},
    "pipeline parallel": {"parallel": parallel(pp_size=2)},
    "prefill context parallel": {"parallel": parallel(pcp_size=2)},
    "decode context parallel": {"parallel": parallel(dcp_size=2)},
}
ENGINE_CHANGES: dict[str, dict[str, Any]] = {
    "commit": {"model_config.hf_config": HFConfig(commit="decaf")},
    "width": {"model_config.hf_config": HFConfig(hidden_size=128)},
    "rope type": {"model_config.hf_config": HFConfig(rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0})},
    "rope theta": {"model_config.hf_config": HFConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5})},
    "a new field": {"model_config.hf_config": HFConfig(something_new=1)},
    "quantization": {"model_config.quantization": "fp8"},
    "KV dtype": {"cache_config.cache_dtype": "fp8"},
    "hash": {"cache_config.prefix_caching_hash_algo": "sha256_cbor"},
    "KV scales": {"cache_config.calculate_kv_scales": True},
    "attention backend": {"attention_config.backend": "FLASHINFER"},
    "runner": {"v2": True},
    "draft method": {"speculative_config.method": "eagle"},
    "draft model": {"speculative_config.model": "org/draft"},
}


def test_each_field_counts() -> None:
    """A change of any field of vLLM's OffloadingConfig or of the engine's configuration has a namespace of its own."""
    digests = {name: digest(offloading_config([], **change)) for name, change in OFFLOADING_CHANGES.items()}
    digests |= {name: digest(engine_config=engine(**change)) for name, change in ENGINE_CHANGES.items()}
    digests |= {"unchanged": digest(), "slot": digest(slot_bytes=8192)}
    names = dict(zip(digests.values(), digests, strict=True))
    assert [name for name, one in digests.items() if names[one] != name] == []
    assert len(digests) == len(OFFLOADING_CHANGES) + len(ENGINE_CHANGES) + 2


MAMBA = MambaSpec(block_size=128, shapes=((3, 64), (2, 32, 16)), dtypes=(torch.float16, torch.float32))
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16)
GROUP_CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "state dtype": (MAMBA, {"dtypes": (torch.float16, torch.float16)}),
    "conv dtype": (MAMBA, {"dtypes": (torch.bfloat16, torch.float32)}),
    "state shape": (MAMBA, {"shapes": ((5, 64), (2, 32, 16))}),
    "order of a state's dimensions": (MAMBA, {"shapes": ((64, 3), (2, 32, 16))}),
    "padding of states": (MAMBA, {"page_size_padded": 1 << 20}),
    "cache mode": (MAMBA, {"mamba_cache_mode": "align"}),
    "speculative blocks": (MAMBA, {"num_speculative_blocks": 3}),
    "tokens per state": (MAMBA, {"block_size": 256}),
    "KV dtype": (FULL, {"dtype": torch.bfloat16}),
    "heads": (FULL, {"num_kv_heads": 4}),
    "head size": (FULL, {"head_size": 128}),
    "size of values": (FULL, {"head_size_v": 32}),
    "quantization of KV": (FULL, {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}),
    "window": (FULL, {"sliding_window": 64}),
    "chunk of attention": (FULL, {"attention_chunk_size": 64}),
    "padding of pages": (FULL, {"page_size_padded": 1 << 20}),
}


@pytest.mark.parametrize("change", GROUP_CHANGES)
def test_the_whole_specification_of_each_group_counts(change: str) -> None:
    """Rows of equal length may hold states of another type, shape or padding, or keys of another window."""
    spec, fields = GROUP_CHANGES[change]
    first, second = (KVCacheGroupSpec(["l0"], each) for each in (FULL, spec))
    changed = KVCacheGroupSpec(["l0"], dataclasses.replace(spec, **fields))
    digests = [digest(None, None, 4096, first, each) for each in (second, changed, second)]
    assert digests[0] == digests[2] != digests[1]


def test_the_kind_of_a_group_counts() -> None:
    """Two kinds of attention with equal fields differ."""
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float16, "sliding_window": 64}
    kinds = [KVCacheGroupSpec(["l0"], kind(**fields)) for kind in (FullAttentionSpec, SlidingWindowSpec)]
    assert len({digest(None, None, 4096, each) for each in kinds}) == 2


def test_the_layout_of_convolution_states_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """States with their dimensions in another order have other bytes."""
    found = set()
    for layout in ("SD", "DS"):
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
        found.add(digest())
    assert len(found) == 2


def test_the_instruction_set_of_a_cpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM packs the keys of attention for it, so a shared medium serves no other kind of machine."""
    found = [digest()]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    found.append(digest())
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: "unknown", raising=False)
    found.append(digest())
    monkeypatch.setattr("platform.machine", lambda: "another")
    assert len({*found, digest()}) == 4


def test_declared_numerics_outlive_an_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions of vLLM share blocks only under the same declared name, and every other field still counts."""

    def of(version: str, name: str | None, **changes: Any) -> str:
        monkeypatch.setattr("kvstore.vllm.namespace.VLLM_VERSION", version)
        return digest(offloading_config([], extra_config={} if name is None else {"numerics": name}, **changes))

    assert of("0.32.0", "a") == of("0.33.0", "a")
    assert of("0.32.0", None) != of("0.33.0", None)
    others = [of("0.33.0", "b"), of("0.32.0", None), of("0.33.0", None), of("0.33.0", "0.33.0")]
    others += [of("0.33.0", "a", **change) for change in OFFLOADING_CHANGES.values()]
    assert len({of("0.33.0", "a"), *others}) == 1 + len(others)


def test_settings_that_change_no_bytes_do_not_count() -> None:
    """Two starts of an engine share a namespace, wherever the model is stored and whatever else is configured."""
    same = offloading_config(
        [{"type": "x"}], events=True, parallel=parallel(data_parallel_index=3, data_parallel_size=4)
    )
    assert digest(same) == digest()
    moved = HFConfig(_name_or_path="/elsewhere", transformers_version="6.0")
    longer = engine(**{"model_config.hf_config": moved, "model_config.max_model_len": 8192})
    assert digest(engine_config=longer) == digest(engine_config=engine())


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_the_longest_context_counts_where_rope_depends_on_it(kind: str) -> None:
    """Some rotary embeddings change with the engine's longest context; then the namespace does, too."""
    model = {"model_config.hf_config": HFConfig(rope_parameters={"full_attention": {"rope_type": kind}})}
    assert digest(engine_config=engine(**model)) != digest(
        engine_config=engine(**model, **{"model_config.max_model_len": 8192})
    )


@pytest.mark.parametrize(
    ("layout", "namespaces"), [({"replicated_layout": True}, 1), ({"canonical_layout": True}, 1), ({}, 3)]
)
def test_portable_rows_are_shared_between_parallel_sizes(layout: dict[str, bool], namespaces: int) -> None:
    """Rows of a canonical or replicated layout are portable; those of the direct layout aren't, despite vLLM's flag."""
    found = set()
    for n in (1, 2, 4):
        size = parallel(tp_size=n, world_size=n, is_parallelism_agnostic=True)
        group = KVCacheGroupSpec(["l0"], dataclasses.replace(FULL, num_kv_heads=8 // n))
        found.add(digest(offloading_config([], parallel=size, **layout), None, 4096, group))
    assert len(found) == namespaces


def test_several_nodes_are_refused() -> None:
    """An engine over several nodes would store only the blocks of its first node."""
    with pytest.raises(ConfigError, match="2 nodes"):
        digest(engine_config=engine(**{"parallel_config.nnodes_within_dp": 2}))


def test_specs_and_tiers_have_the_configuration_of_their_own_engine() -> None:
    """An engine made within another one, as in a MultiConnector, ends with its construction."""
    one, other = EngineContext(engine()), EngineContext(engine())
    with one.entered():
        with pytest.raises(RuntimeError), other.entered():
            assert current_engine() is other
            raise RuntimeError
        assert current_engine() is one


def test_an_engine_without_a_configuration_is_refused() -> None:
    """Without the engine's configuration, engines of different models could read each other's blocks."""
    for unknown in (contextlib.nullcontext(), EngineContext(None).entered()):
        with unknown, pytest.raises(ConfigError, match='"kv_connector": "KVStoreConnector"'):
            KVStoreOffloadingSpec(offloading_config([]))


def layers(*backends: type) -> dict[str, Any]:
    """Return the changes for an engine whose process has the model's layers, each with an attention backend."""
    context = {f"l{i}": SimpleNamespace(get_attn_backend=lambda b=b: b) for i, b in enumerate(backends)}
    return {"compilation_config.static_forward_context": context}


class FlashBackend:
    """An attention backend."""


class FlexBackend:
    """Another one."""


def test_the_chosen_attention_backend_counts_not_the_requested_one() -> None:
    """A backend has the same page layout whether requested or chosen by vLLM; the backend of each layer counts."""
    asked = {"attention_config.backend": "FLASH"}
    both = digest(engine_config=engine(**layers(FlashBackend, FlexBackend)))
    assert digest(engine_config=engine(**asked, **layers(FlashBackend, FlexBackend))) == both
    others = [
        digest(engine_config=engine(**layers(FlexBackend, FlashBackend))),
        digest(engine_config=engine(**layers(FlashBackend, FlashBackend))),
        digest(engine_config=engine(**asked)),
        digest(engine_config=engine(**layers())),
    ]
    assert len({both, *others}) == 5
    staged = engine(**{"parallel_config.pipeline_parallel_size": 2}, **layers(FlashBackend))
    assert digest(engine_config=staged) == others[-1], "a stage knows its own layers only"


def test_where_the_choice_is_unknown_all_that_it_follows_from_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different layouts are never merged: engines whose choice may differ have separate caches."""
    plain = digest(engine_config=engine())
    known = digest(engine_config=engine(**layers(FlashBackend)))
    assert digest(engine_config=engine(**{"attention_config.backend_per_kind": {"full": "FLASH"}})) != plain
    monkeypatch.setattr("kvstore.vllm.namespace._version_of", lambda package: "0")
    assert digest(engine_config=engine()) != plain
    assert digest(engine_config=engine(**layers(FlashBackend))) == known
    monkeypatch.setattr("kvstore.vllm.namespace._device_kinds", lambda: ["H200"])
    assert digest(engine_config=engine()) != plain
