"""Proof that the blocks of an engine can be right. Without it, nothing is stored or loaded.

vLLM's own errors last as long as its process. Stored, they would last for days and reach other engines.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

from vllm import envs
from vllm.engine.arg_utils import EngineArgs

from kvstore.errors import ConfigError


def check_engine(engine_config: Any) -> None:
    """Refuse an engine that would end at the first loaded block. ``engine_config``: a ``VllmConfig``.

    Raises:
        ConfigError: vLLM has to return data from the computation of each token, and loaded tokens have none.
    """
    # Up to 0.31 an option of the model.
    parts = (getattr(engine_config, "aux_output_config", None), engine_config.model_config)
    if any(getattr(part, "enable_return_routed_experts", False) for part in parts):
        raise ConfigError(
            "--enable-return-routed-experts returns the experts of every token, and tokens from a cache have none. "
            "Leave it out, or remove kvstore."
        )


def doubt_of_engine(engine_config: Any, kv_cache_config: Any) -> str | None:
    """Return the reason why no block of an engine may be stored or loaded; None if there is none.

    vLLM turns prefix caching off where a block depends on more than its prefix, for instance on later tokens. An
    operator may turn it off as well, which says nothing about the blocks. Therefore vLLM itself is asked whether it
    would have turned it off.

    Args:
        engine_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``; None if unknown.
    """
    groups = getattr(kv_cache_config, "kv_cache_groups", ())
    if any(getattr(group.kv_cache_spec, "non_causal", False) for group in groups):
        return "the model's attention is not causal, so its blocks depend on later tokens"
    if engine_config.cache_config.enable_prefix_caching:
        return None
    if not _is_on_by_default(engine_config.model_config):
        return "vLLM does not use prefix caching for this model; --enable-prefix-caching overrides that"
    if envs.VLLM_BATCH_INVARIANT:
        return "vLLM turns prefix caching off for some attention backends with VLLM_BATCH_INVARIANT"
    if not _stays_on(engine_config):
        return "vLLM turned prefix caching off for this configuration"
    return None


def _is_on_by_default(model_config: Any) -> bool:
    """Return whether vLLM uses prefix caching for a model if its operator says nothing."""
    arguments: Any = SimpleNamespace(enable_prefix_caching=None, enable_chunked_prefill=None)
    try:
        EngineArgs._set_default_chunked_prefill_and_prefix_caching_args(arguments, model_config)
    # A method of another version, or of a third-party platform, may raise anything, which proves nothing.
    except Exception:
        return False
    return bool(arguments.enable_prefix_caching)


def _stays_on(engine_config: Any) -> bool:
    """Return whether vLLM would leave prefix caching on in a configuration."""
    try:
        layers = engine_config.compilation_config.static_forward_context
        trial = copy.deepcopy(engine_config, {id(layers): {}})  # Without the weights.
        trial.cache_config.enable_prefix_caching = True
        trial.__post_init__()
    # As above.
    except Exception:
        return False
    return bool(trial.cache_config.enable_prefix_caching)
