"""The namespace of an engine's KV blocks: every known fact that changes their bytes.

Within one year, six bugs in vLLM's own disk tier served intact blocks of another model, layout or parallel size.
Therefore the namespace covers more than the ``OffloadingConfig`` of a tier: every setting of the engine except those
known to be irrelevant (:mod:`kvstore.vllm.irrelevant`), every group of layers, and the model's weights and files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from pydantic.fields import FieldInfo
from vllm.envs import environment_variables
from vllm.platforms import current_platform
from vllm.version import __version__ as VLLM_VERSION

from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.vllm.compat import chosen_attention
from kvstore.vllm.connector import EngineContext
from kvstore.vllm.irrelevant import FIELDS, VARIABLES
from kvstore.vllm.weights import weights_identity

logger = logging.getLogger("kvstore.vllm.namespace")

_VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
"""Keys of a model configuration that do not describe the model."""

_SECRET = re.compile("secret|password|passwd|credential|api_?key|access_?key|auth_?token|hf_token", re.IGNORECASE)
"""Names of settings that never count, because the fields of a namespace are stored in the clear."""
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]*@")

_DEPTH_MAX = 16
"""Deepest nesting of settings; vLLM's have about six levels."""

_WORKERS_SHARE = frozenset(
    {"num_kv_heads", "num_head_slots", "max_tp_shards", "state_content_bytes", "page_size_padded"}
)
"""Fields of a group's specification that depend on the tensor parallel size."""

_ATTENTION_LIBRARIES = ("torch", "flashinfer-python", "flash-attn", "amd-aiter", "triton")
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
    parallel = _parallel(config, engine_config)
    _refuse_several_nodes(engine_config)
    fields: dict[str, Any] = {
        "engine": "vllm",
        **_numerics(config),
        "model": {
            "name": _resolved(config.model.name),
            "dtype": config.model.dtype,
            "weights": _weights(engine_config.model_config, _load_format(engine_config), config),
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
        "engine_config": _engine_fields(engine_config, config),
        "environment": _environment(),
    }
    return Namespace(_plain(fields))


def _weights(model: Any, load_format: str, config: Any) -> dict[str, Any]:
    name = getattr(model, "model", config.model.name)
    return weights_identity(model, name, load_format, config.extra_config.get("weights"))


def _resolved(name: str) -> str:
    """Return the same name of a model for each spelling of its path."""
    path = os.path.expanduser(name)
    return os.path.realpath(path) if os.path.exists(path) else name


def _load_format(engine_config: Any) -> str:
    return str(getattr(getattr(engine_config, "load_config", None), "load_format", "auto"))


def _numerics(config: Any) -> dict[str, str]:
    """Return what identifies kernels and layout: vLLM's version, or the name that the operator declares instead.

    kvstore cannot check this declaration. All other fields still count.
    """
    declared = config.extra_config.get("numerics")
    if declared is None:
        return {"engine_version": VLLM_VERSION}
    logger.info("Every version of vLLM that declares the numerics %r shares these blocks.", declared)
    return {"numerics": str(declared)}


def _parallel(config: Any, engine_config: Any) -> dict[str, int] | None:
    """Return the parallel sizes, or None if the bytes of a row don't depend on them.

    vLLM's own flag is not sufficient, because it is wrongly set for the direct layout of several layers, too. Only
    canonical and replicated rows are independent of the sizes, unless the weights are random numbers of each worker.
    """
    parallel = config.parallel
    canonical = getattr(config, "canonical_layout", False) and parallel.is_parallelism_agnostic
    portable = canonical or getattr(config, "replicated_layout", False)
    if portable and _load_format(engine_config) != "dummy":
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
    attention = getattr(engine_config, "attention_config", None)
    return {
        "requested": [getattr(attention, name, None) for name in ("backend", "backend_per_kind")],
        "devices": _device_kinds(),
        "libraries": {name: _version_of(name) for name in _ATTENTION_LIBRARIES},
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


def _engine_fields(engine_config: Any, config: Any) -> dict[str, Any]:
    """Return all settings of the engine except irrelevant ones and defaults."""
    model, cache = engine_config.model_config, engine_config.cache_config
    fields = {
        "settings": _plain(engine_config),
        "kv_dtype": getattr(cache, "cache_dtype", None),
        "v2_runner": getattr(engine_config, "use_v2_model_runner", None),
    }
    hash_name = str(getattr(cache, "prefix_caching_hash_algo", None))
    if hash_name.startswith("xxhash"):
        logger.warning("Block keys use %s, which is not collision-resistant; use sha256 instead.", hash_name)
    if _has_length_dependent_rope(_plain(getattr(model, "hf_config", None))):
        fields["max_model_len"] = getattr(model, "max_model_len", None)
    speculative = getattr(engine_config, "speculative_config", None)
    if (drafting := getattr(speculative, "model", None)) is not None:
        fields["draft_model"] = _resolved(drafting)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != getattr(model, "model", None):
        load_config = getattr(speculative, "draft_load_config", None)
        load_format = _load_format(engine_config) if load_config is None else str(load_config.load_format)
        fields["draft_weights"] = _weights(draft, load_format, config)
    scales = getattr(getattr(model, "multimodal_config", None), "mm_encoder_fp8_scale_path", None)
    if scales is not None:
        fields["mm_encoder_scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    return fields


def _environment() -> dict[str, str]:
    """Return vLLM's variables that are set, except irrelevant ones.

    Other names are not read by vLLM, or by vLLM alone: it passes random names to its processes in them.
    """
    names = [name for name in environment_variables if name.startswith("VLLM_") and name not in VARIABLES]
    return {name: os.environ[name] for name in names if name in os.environ}


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


def _plain(value: Any, excluded: Set[str] = frozenset(), depth: int = 0) -> Any:
    """Return a JSON value that is equal in every process: no addresses, no order of sets, no secrets.

    Irrelevant and ``excluded`` fields are left out, and fields of a dataclass that have their default. So a setting
    that a new version of vLLM adds does not separate it from other versions with the same declared numerics.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, str):
        return _USER_OF_URL.sub("", str.__str__(value))
    if isinstance(value, Set):
        return sorted(json.dumps(_plain(inner, excluded, depth + 1), sort_keys=True) for inner in value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(inner, excluded, depth + 1) for inner in value]
    if isinstance(value, type) or hasattr(value, "__code__"):
        return f"{value.__module__}.{value.__qualname__}"
    if depth > _DEPTH_MAX:
        return type(value).__qualname__
    fields = value if isinstance(value, Mapping) else _fields_of(value, depth)
    if fields is None:
        return str(value)
    # Other objects than settings may refer to each other.
    deeper = depth + (1 if isinstance(value, Mapping) or dataclasses.is_dataclass(value) else 4)
    return {
        str(name): _plain(inner, excluded, deeper)
        for name, inner in fields.items()
        if name not in excluded and name not in _VOLATILE and not _SECRET.search(str(name))
    }


def _fields_of(value: Any, depth: int) -> Mapping[str, Any] | None:
    """Return the relevant attributes of an object, and its type; None if it has no attributes."""
    if hasattr(value, "to_dict"):
        return dict(value.to_dict())
    irrelevant = {name for cls in type(value).__mro__ for name in FIELDS.get(cls.__name__, ())}
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: inner
            for field in dataclasses.fields(value)
            # First, because the irrelevant settings of compilation refer to the layers of the model.
            if field.name not in irrelevant and not _is_default(field, inner := getattr(value, field.name, None), depth)
        }
    elif hasattr(value, "__dict__"):
        fields = {name: inner for name, inner in vars(value).items() if name not in irrelevant}
    else:
        return None
    return {**fields, "type": type(value).__qualname__}


def _is_default(field: dataclasses.Field[Any], value: Any, depth: int) -> bool:
    default: Any = field.default
    if isinstance(default, FieldInfo):
        default = default.get_default(call_default_factory=True, validated_data={})
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if type(value) is not type(default):
        return False
    # Settings are equal if their relevant fields are.
    if not dataclasses.is_dataclass(value):
        return bool(value == default)
    return bool(_plain(value, depth=depth + 1) == _plain(default, depth=depth + 1))
