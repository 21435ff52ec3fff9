"""The namespace of an engine's KV blocks: everything that changes their bytes and that a tier can learn.

Six bugs of vLLM's own disk tier in one year served intact blocks of another model, layout or parallel size. So this
reads more than the ``OffloadingConfig`` that a tier is handed: the engine's configuration where it can be reached, and
a sample of the weights where they are files. What can't be read is left out, and makes a namespace of its own.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import math
import os
import platform
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from vllm.platforms import current_platform

from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.vllm.compat import VLLM_VERSION, chosen_attention

__all__ = ["engine_namespace"]

logger = logging.getLogger("kvstore.vllm.namespace")

_VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
"""Keys of a model configuration that don't describe the model."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_WEIGHT_FILES_MAX = 2048
_SAMPLES_PER_FILE = 8
_SAMPLE_BYTES = 4096
"""Eight pages a file: training changes every tensor, so a few pages tell two checkpoints apart, in milliseconds."""

_ATTENTION_LIBRARIES = ("torch", "flashinfer-python", "flash-attn", "amd-aiter", "triton")
_ATTENTION_VARIABLES = ("ATT", "FLASH", "MLA", "LAYOUT", "AITER", "ROCM", "TRITON", "CUTLASS", "KERNEL")
"""What vLLM's choice of an attention backend depends on, beside the model and the device."""

_LENGTH_DEPENDENT_ROPE = ("longrope", "su", "dynamic")
"""Kinds of rotary embedding that take the engine's longest context into account."""


def engine_namespace(spec: Any, slot_bytes: int, engine_config: Any = None) -> Namespace:
    """Return the namespace of the blocks that one engine offloads.

    Args:
        spec: vLLM's ``OffloadingSpec``.
        slot_bytes: Length of a row of the primary tier.
        engine_config: The engine's ``VllmConfig``, or None if it can't be had.

    Raises:
        ConfigError: The engine spans several nodes, and a tier would see the blocks of one of them only.
    """
    config = spec.config
    parallel = _parallel(config)
    _refuse_several_nodes(engine_config)
    fields: dict[str, Any] = {
        "engine": "vllm",
        "engine_version": VLLM_VERSION,
        "model": {
            "name": config.model.name,
            "dtype": config.model.dtype,
            "weights": _weights_identity(config.model.name),
        },
        "groups": [
            {"tokens_per_block": group.tokens_per_block, "layer_names": list(group.layer_names)}
            for group in config.groups
        ],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "slot_bytes": slot_bytes,
        # A worker's share: where that does not matter, the length of the whole row says it.
        "kv_bytes_per_block": None if parallel is None else config.worker_kv_bytes_per_block,
        "layout": {
            "name": getattr(config, "kv_cache_layout", None),
            "canonical": bool(getattr(config, "canonical_layout", False)),
            "replicated": bool(getattr(config, "replicated_layout", False)),
        },
        "parallel": parallel,
        "device": _device(),
        "attention": _attention(engine_config, getattr(spec, "attention", None)),
        "engine_config": None if engine_config is None else _engine_fields(engine_config),
    }
    return Namespace(_plain(fields))


def _parallel(config: Any) -> dict[str, int] | None:
    """Return the parallel sizes, or None where the bytes of a row don't depend on them.

    vLLM's own flag for that also covers a layout where it does not hold (the direct layout of more than one layer), so
    only canonical and replicated rows count as the same under every size.
    """
    parallel = config.parallel
    canonical = getattr(config, "canonical_layout", False) and parallel.is_parallelism_agnostic
    if canonical or getattr(config, "replicated_layout", False):
        return None
    names = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    return {name: int(getattr(parallel, name, 1)) for name in names}


def _device() -> dict[str, Any]:
    """Return what the attention backend lays its pages out for."""
    device = {"type": current_platform.device_type}
    if current_platform.is_cpu():
        # vLLM's CPU attention packs keys for the instruction set it finds.
        amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)()
        device |= {"machine": platform.machine(), "isa": torch.backends.cpu.get_cpu_capability(), "amx": amx}
    return device


def _attention(engine_config: Any, chosen: str | None) -> dict[str, Any]:
    """Return the attention backends, which lay the pages out: those chosen, or else all that the choice follows from.

    Args:
        engine_config: The engine's ``VllmConfig``, if there is one.
        chosen: What the workers have told, if they could.
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
        return []  # What matters of it is in "device".
    try:
        return [str(current_platform.get_device_name()), str(current_platform.get_device_capability())]
    # Platforms of others may raise what they like; an unknown device is one of its own kind.
    except Exception:
        return ["unknown"]


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _engine_fields(engine_config: Any) -> dict[str, Any]:
    """Return what the engine's configuration says of the bytes; all of it optional, as names come and go."""
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
        "v2_runner": getattr(engine_config, "use_v2_model_runner", None),
        "draft": {"method": getattr(speculative, "method", None), "model": getattr(speculative, "model", None)},
    }
    if str(fields["hash"]).startswith("xxhash"):
        logger.warning("Blocks are named by %s, which others can forge; use sha256 instead.", fields["hash"])
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
            f"This engine spans {nodes} nodes, and vLLM shows a tier the blocks of the first one only. "
            "Use tensor and pipeline parallelism within one node, or leave kvstore out."
        )


def _weights_identity(model: str) -> str | None:
    """Return a digest of samples of a local model's weight files; None if there are none here.

    The same path with other weights is another model. Reading the files as a whole would take minutes.
    """
    root = Path(model)
    try:
        files = [root] if root.is_file() else sorted(p for p in root.iterdir() if p.suffix in _WEIGHT_SUFFIXES)
        if not files:
            return None
        digest = hashlib.sha256()
        for path in files[:_WEIGHT_FILES_MAX]:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            _sample(path, digest)
    except OSError:
        # A name of the hub, or files that only the workers can read: known by name and revision then.
        return None
    return digest.hexdigest()


def _sample(path: Path, digest: Any) -> None:
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        for i in range(_SAMPLES_PER_FILE):
            file.seek(max(0, size_bytes - _SAMPLE_BYTES) * i // (_SAMPLES_PER_FILE - 1))
            digest.update(file.read(_SAMPLE_BYTES))


def _plain(value: Any) -> Any:
    """Return a value as JSON knows it, the same in every process (no addresses, no order of a set)."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else repr(float(value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items() if key not in _VOLATILE}
    if isinstance(value, Set):
        return sorted(str(_plain(inner)) for inner in value)
    if isinstance(value, Sequence):
        return [_plain(inner) for inner in value]
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
