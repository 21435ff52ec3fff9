"""Proof that the blocks of an engine and of a request can be right. Without it, nothing is stored or loaded.

vLLM's own errors last as long as its process. Stored, they would last for days and reach other engines. Each known
attribute of a request is part of its keys, is judged here, or does not matter. A request with an unknown attribute,
which a new version of vLLM may have, is unproven if that attribute is set.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from vllm import PoolingParams, SamplingParams, envs
from vllm.engine.arg_utils import EngineArgs

from kvstore.errors import ConfigError
from kvstore.vllm.compat import has_hashes_of_client

_REQUEST: Final = {
    "part of the keys": "prompt_token_ids prompt_embeds lora_request cache_salt block_hashes _block_hasher "
    "_prompt_embeds_per_block_hashes _all_token_ids all_token_ids _output_token_ids output_token_ids "
    "num_prompt_tokens mm_features",
    "judged here": "prompt_is_token_ids sampling_params pooling_params",
    "sessions, corrected by the connector": "resumable streaming_queue",
    "identity and order": "request_id client_index priority arrival_time trace_headers session_id",
    "parameters of connectors": "kv_transfer_params ec_transfer_params kv_hints kv_cache_report_mode",
    "choice of tokens, which are in the keys": "structured_output_request spec_token_ids max_tokens",
    "honored by vLLM's connector": "skip_reading_prefix_cache",
    "state of the scheduler": "status events stop_reason num_output_placeholders num_stale_output_tokens "
    "drop_stale_output num_in_flight_tokens next_decode_eligible_step last_sched_seq num_computed_tokens "
    "is_prefill_chunk shared_prefix_boundary replay_start num_nans_in_logits num_preemptions prefill_stats "
    "spec_decode_metrics abort_immediately",
}
"""Attributes of vLLM's ``Request``, by the reason why they leave its blocks right."""

_SAMPLING: Final = {
    "choice of tokens, which are in the keys": "n presence_penalty frequency_penalty repetition_penalty temperature "
    "watermarking top_p top_k min_p seed ignore_eos max_tokens min_tokens structured_outputs logit_bias "
    "allowed_token_ids bad_words _bad_words_token_ids thinking_token_budget trace_decode_token_ids "
    "_watermarking_skipped",
    "end of the answer": "stop stop_token_ids _eos_token_id _all_stop_token_ids repetition_detection",
    "form of the answer": "logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start logprob_token_ids "
    "flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind "
    "stream_interval skip_clone output_text_buffer_length routed_experts_prompt_start",
    "honored by vLLM's connector": "skip_reading_prefix_cache",
    "parameters of connectors": "extra_args",
}
"""Fields of vLLM's ``SamplingParams``, likewise."""

_POOLING: Final = {
    "work on hidden states, after the blocks are computed": "use_activation dimensions step_tag_id returned_token_ids "
    "task requires_token_ids late_interaction_params late_chunking_params extra_kwargs output_kind",
    "honored by vLLM's connector": "skip_reading_prefix_cache",
}
"""Fields of vLLM's ``PoolingParams``, likewise."""

_CONTENT: Final = re.compile(r"(.*:)?(?:[0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)
"""Identifier of a medium that vLLM has made from its content, behind the name of a LoRA adapter."""


CAUSES: Final = ("prefix_caching", "attention", "media", "embeddings", "failed_load", "unknown")
"""The causes of doubts."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """The reason why blocks may be wrong.

    Attributes:
        cause: One of :data:`CAUSES`.
        text: A sentence without its end.
    """

    cause: str
    text: str


FAILED_LOAD: Final = Doubt("failed_load", "a load failed in the step that used its blocks, and others follow from them")


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


def doubt_of_engine(engine_config: Any, kv_cache_config: Any) -> Doubt | None:
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
        return Doubt("attention", "the model's attention is not causal, so its blocks depend on later tokens")
    if len(groups) > 1 and getattr(engine_config.speculative_config, "method", None) == "draft_model":
        return Doubt("attention", "with a draft model beside windows or states, vLLM's answers depend on cached blocks")
    if engine_config.cache_config.enable_prefix_caching:
        return None
    if not _is_on_by_default(engine_config.model_config):
        return _off("vLLM does not use prefix caching for this model; --enable-prefix-caching overrides that")
    if envs.VLLM_BATCH_INVARIANT:
        return _off("vLLM turns prefix caching off for some attention backends with VLLM_BATCH_INVARIANT")
    if not _stays_on(engine_config):
        return _off("vLLM turned prefix caching off for this configuration")
    return None


def doubt_of_request(request: Any) -> Doubt | None:
    """Return the reason why no block of a request may be stored or loaded; None if there is none.

    ``request``: vLLM's ``Request``.
    """
    if request.prompt_is_token_ids is not None:
        return Doubt("embeddings", "a row of prompt embeddings beside tokens has the key of token 0")
    media = [feature.identifier for feature in request.mm_features]
    if not all(map(_CONTENT.fullmatch, media)) or (media and has_hashes_of_client(request)):
        return Doubt("media", "an image, video or audio has a name of its client, which may name another one as well")
    parts = (
        (request, vars(request), _REQUEST),
        (request.sampling_params, SamplingParams.__struct_fields__, _SAMPLING),
        (request.pooling_params, PoolingParams.__struct_fields__, _POOLING),
    )
    unknown = sorted(
        name
        for part, names, known in parts
        for name in set(names).difference(_names(*known.values()))
        if _is_set(getattr(part, name, None))
    )
    if unknown:
        return Doubt("unknown", f"kvstore does not know {', '.join(unknown)}, which this version of vLLM has added")
    return None


def _is_set(value: Any) -> bool:
    return not (value is None or value is False or (isinstance(value, int | float | Sized) and not value))


@cache
def _names(*texts: str) -> frozenset[str]:
    return frozenset(name for text in texts for name in text.split())


def _off(text: str) -> Doubt:
    return Doubt("prefix_caching", text)


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
        with _settings_kept():
            trial.__post_init__()
    # As above.
    except Exception:
        return False
    return bool(trial.cache_config.enable_prefix_caching)


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    """Undo changes of vLLM's variables in this process: vLLM sets some for the configuration that it is given."""
    before = _settings()
    try:
        yield
    finally:
        for name in _settings().keys() - before:
            os.environ.pop(name, None)
        os.environ.update(before)


def _settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
