"""vLLM's configuration of an engine, and a stand-in for it with the parts that identify blocks."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock


def configured(model: Path, **arguments: Any) -> Any:
    """Return the ``VllmConfig`` of an engine with these arguments, and undo vLLM's changes of variables."""
    from vllm.engine.arg_utils import EngineArgs

    with mock.patch.dict(os.environ):
        return EngineArgs(model=str(model), **arguments).create_engine_config()


class HFConfig:
    """A model configuration with the interface of transformers."""

    def __init__(self, commit: str | None = "c0ffee", **fields: Any) -> None:
        self._commit_hash = commit
        self.fields: dict[str, Any] = {
            "_name_or_path": "/somewhere",
            "transformers_version": "5.0",
            "hidden_size": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "layer_types": ("full_attention", "sliding_attention"),
            **fields,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return dict(self.fields)


def engine(**changes: Any) -> Any:
    """Return the relevant parts of a VllmConfig, with some replaced (``part.field``)."""
    values: dict[str, Any] = {
        "model_config.revision": None,
        "model_config.quantization": None,
        "model_config.max_model_len": 4096,
        "model_config.hf_config": HFConfig(),
        "cache_config.cache_dtype": "auto",
        "cache_config.prefix_caching_hash_algo": "sha256",
        "cache_config.calculate_kv_scales": False,
        "attention_config.backend": None,
        "parallel_config.nnodes_within_dp": 1,
        "speculative_config.method": None,
        "speculative_config.model": None,
        **changes,
    }
    parts: dict[str, Any] = {}
    for name, value in values.items():
        part, _, field = name.partition(".")
        parts.setdefault(part, _instance(part)).__setattr__(field, value)
    whole = _instance("vllm_config")
    whole.__dict__.update(use_v2_model_runner=changes.get("v2", False), **parts)
    return whole


def _instance(part: str) -> Any:
    """Return an empty object whose class has the name of vLLM's."""
    return type("".join(map(str.capitalize, part.split("_"))), (SimpleNamespace,), {})()
