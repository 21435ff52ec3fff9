"""The namespace of an engine's KV blocks: every known fact that changes their bytes.

Within one year, six bugs in vLLM's own disk tier served intact blocks of another model, layout or parallel size.
Therefore the namespace covers more than the ``OffloadingConfig`` of a tier: also the engine's configuration if it can
be found, and samples of local weight files. A missing field gives a different namespace.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import math
import os
import platform
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.version import __version__ as VLLM_VERSION

from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.vllm.compat import chosen_attention
from kvstore.vllm.connector import EngineContext
from kvstore.vllm.weights import weights_identity

logger = logging.getLogger("kvstore.vllm.namespace")

_VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
"""Keys of a model configuration that do not describe the model."""

_WORKERS_SHARE = frozenset(
    {"num_kv_heads", "num_head_slots", "max_tp_shards", "state_content_bytes", "page_size_padded"}
)
"""Fields of a group's specification that depend on the tensor parallel size."""

_ATTENTION_LIBRARIES = ("torch", "flashinfer-python", "flash-attn", "amd-aiter", "triton")
_ATTENTION_VARIABLES = ("ATT", "FLASH", "MLA", "LAYOUT", "AITER", "ROCM", "TRITON", "CUTLASS", "KERNEL")
"""Inputs of vLLM's choice of an attention backend besides model and device."""

_LENGTH_DEPENDENT_ROPE = ("longrope", "su", "dynamic")
"""Kinds of rotary embedding that depend on the engine's longest context."""


def engine_namespace(spec: Any, slot_bytes: int, engine: EngineContext) -> Namespace:
    """Return the namespace of the blocks that one engine offloads.

    Args:
        spec: vLLM's ``OffloadingSpec``.
        slot_bytes: Length of a row.
        engine: The engine's configuration.

    Raises:
        ConfigError: The engine spans several nodes, and a tier would see the blocks of only one.
    """
    config, engine_config = spec.config, engine.engine_config
    parallel = _parallel(config)
    _refuse_several_nodes(engine_config)
    fields: dict[str, Any] = {
        "engine": "vllm",
        **_numerics(config),
        "model": {
            "name": config.model.name,
            "dtype": config.model.dtype,
            "weights": _weights(config, engine_config),
        },
        "groups": [
            {"tokens_per_block": group.tokens_per_block, "layer_names": list(group.layer_names)}
            for group in config.groups
        ],
        "kv_cache_groups": _groups(engine.kv_cache_config, of_worker=parallel is not None),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "slot_bytes": slot_bytes,
        # A worker's share of the row.
        "kv_bytes_per_block": None if parallel is None else config.worker_kv_bytes_per_block,
        "layout": {
            "name": getattr(config, "kv_cache_layout", None),
            "canonical": bool(getattr(config, "canonical_layout", False)),
            "replicated": bool(getattr(config, "replicated_layout", False)),
        },
        "parallel": parallel,
        "device": _device(),
        "attention": _attention(engine_config, getattr(spec, "attention", None)),
        "engine_config": _engine_fields(engine_config),
    }
    return Namespace(_plain(fields))


def _weights(config: Any, engine_config: Any) -> dict[str, Any]:
    load_format = getattr(getattr(engine_config, "load_config", None), "load_format", "auto")
    declared = config.extra_config.get("weights")
    return weights_identity(engine_config.model_config, config.model.name, str(load_format), declared)


def _numerics(config: Any) -> dict[str, str]:
    """Return what identifies kernels and layout: vLLM's version, or the name that the operator declares instead.

    kvstore cannot check this declaration. All other fields still count.
    """
    declared = config.extra_config.get("numerics")
    if declared is None:
        return {"engine_version": VLLM_VERSION}
    logger.info("Every version of vLLM that declares the numerics %r shares these blocks.", declared)
    return {"numerics": str(declared)}


def _parallel(config: Any) -> dict[str, int] | None:
    """Return the parallel sizes, or None if the bytes of a row don't depend on them.

    vLLM's own flag is not sufficient, because it is wrongly set for the direct layout of several layers, too. Only
    canonical and replicated rows are independent of the sizes.
    """
    parallel = config.parallel
    canonical = getattr(config, "canonical_layout", False) and parallel.is_parallelism_agnostic
    if canonical or getattr(config, "replicated_layout", False):
        return None
    names = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    return {name: int(getattr(parallel, name, 1)) for name in names}


def _groups(kv_cache_config: Any, *, of_worker: bool) -> list[Any]:
    """Return the whole specification of each group of layers: kind, shapes, data types, padding, mode, window.

    Args:
        kv_cache_config: vLLM's ``KVCacheConfig``; None in tests without a model.
        of_worker: Whether the rows depend on the parallel sizes, and so on a worker's share of the heads.
    """
    groups = () if kv_cache_config is None else kv_cache_config.kv_cache_groups
    excluded = frozenset() if of_worker else _WORKERS_SHARE
    return [_plain(group, excluded) for group in groups]


def _device() -> dict[str, Any]:
    """Return the device properties that determine the page layout."""
    device = {"type": current_platform.device_type}
    if current_platform.is_cpu():
        # vLLM's CPU attention packs keys for the available instruction set.
        amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
        device |= {"machine": platform.machine(), "isa": torch.backends.cpu.get_cpu_capability(), "amx": amx}
    return device


def _attention(engine_config: Any, chosen: str | None) -> dict[str, Any]:
    """Return the attention backends, which determine the page layout; if unknown, all inputs of the choice.

    Args:
        engine_config: The engine's ``VllmConfig``, if available.
        chosen: The workers' choice, if known.
    """
    chosen = chosen or chosen_attention(engine_config)
    if chosen is not None:
        return {"chosen": chosen}
    requested = getattr(getattr(engine_config, "attention_config", None), "backend", None)
    return {
        "requested": None if requested is None else str(requested),
        "devices": _device_kinds(),
        "libraries": {name: _version_of(name) for name in _ATTENTION_LIBRARIES},
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("VLLM_") and any(word in name for word in _ATTENTION_VARIABLES)
        },
    }


def _device_kinds() -> list[str]:
    if current_platform.is_cpu():
        return []  # Covered by "device".
    try:
        return [str(current_platform.get_device_name()), str(current_platform.get_device_capability())]
    # Third-party platforms may raise anything.
    except Exception:
        return ["unknown"]


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _engine_fields(engine_config: Any) -> dict[str, Any]:
    """Return the fields of the engine's configuration that change the bytes. All are optional, because names change."""
    model, cache = engine_config.model_config, engine_config.cache_config
    hf_config = getattr(model, "hf_config", None)
    described = None if hf_config is None else hf_config.to_dict()
    speculative = getattr(engine_config, "speculative_config", None)
    fields = {
        "revision": getattr(model, "revision", None),
        "commit": getattr(hf_config, "_commit_hash", None),
        "quantization": getattr(model, "quantization", None),
        "hf_config": described,
        "kv_dtype": getattr(cache, "cache_dtype", None),
        "hash": getattr(cache, "prefix_caching_hash_algo", None),
        "calculate_kv_scales": getattr(cache, "calculate_kv_scales", None),
        "conv_state_layout": envs.VLLM_SSM_CONV_STATE_LAYOUT,
        "v2_runner": getattr(engine_config, "use_v2_model_runner", None),
        "draft": {"method": getattr(speculative, "method", None), "model": getattr(speculative, "model", None)},
    }
    if str(fields["hash"]).startswith("xxhash"):
        logger.warning("Block keys use %s, which is not collision-resistant; use sha256 instead.", fields["hash"])
    if _has_length_dependent_rope(described):
        fields["max_model_len"] = getattr(model, "max_model_len", None)
    return fields


def _has_length_dependent_rope(value: Any) -> bool:
    if isinstance(value, Mapping):
        kinds = (value.get("rope_type"), value.get("type"))
        return any(kind in _LENGTH_DEPENDENT_ROPE for kind in kinds if isinstance(kind, str)) or any(
            _has_length_dependent_rope(inner) for inner in value.values()
        )
    return False


def _refuse_several_nodes(engine_config: Any) -> None:
    nodes = getattr(getattr(engine_config, "parallel_config", None), "nnodes_within_dp", 1)
    if isinstance(nodes, int) and nodes > 1:
        raise ConfigError(
            f"This engine spans {nodes} nodes, and a tier of vLLM sees only the blocks of the first. Keep tensor and "
            "pipeline parallelism within one node, or remove kvstore."
        )


def _plain(value: Any, excluded: Set[str] = frozenset()) -> Any:
    """Return a JSON value that is equal in every process (no addresses, no set order), without ``excluded`` fields."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, excluded) for key, inner in value.items() if key not in _VOLATILE}
    if isinstance(value, Set):
        return sorted(str(_plain(inner)) for inner in value)
    if isinstance(value, Sequence):
        return [_plain(inner, excluded) for inner in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = {field.name for field in dataclasses.fields(value)} - excluded
        fields = {name: _plain(getattr(value, name, None), excluded) for name in names}
        return {**fields, "type": type(value).__qualname__}
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
