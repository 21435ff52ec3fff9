"""The KV cache of a model, by its ``config.json``: bytes of each layer, and vLLM's division of them into blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.errors import ConfigError

__all__ = ["Layers", "Pages", "layers_of", "pages_of", "read_model_config"]

_DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}
_KV_DTYPE_BYTES: Final = {**_DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}

_FULL: Final = frozenset({"full_attention", "attention"})
_WINDOW: Final = frozenset({"sliding_attention", "chunked_attention", "local_attention"})
_STATE: Final = frozenset({"linear_attention", "mamba"})

_KERNEL_TOKENS: Final = 16
"""Tokens that kernels process together; a block of a model with states is a multiple of it."""

_ALIKE: Final = 1.5
"""Ratio of the layers of the most frequent kind to those of the rarest. Below it each kind is one group, with padding;
otherwise groups have as many layers as the rarest kind."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of one kind.

    Attributes:
        kind: ``"full"``, ``"window"``, ``"mla"`` or ``"state"``.
        count: Number of layers.
        token_bytes: KV cache of a token in one layer; 0 for states.
        state_bytes: State of one layer, which replaces the tokens before it; 0 for attention.
    """

    kind: str
    count: int
    token_bytes: int = 0
    state_bytes: int = 0


def read_model_config(path: Path) -> dict[str, Any]:
    """Read a ``config.json``, or that of a model's directory.

    Raises:
        ConfigError: It cannot be read, or is not a model's configuration.
    """
    if path.is_dir():
        path = path / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--model {str(path)!r} can't be read: {error.strerror}. Give a model's config.json."
        ) from error
    except ValueError as error:
        raise ConfigError(f"--model {str(path)!r} is not valid JSON: {error}. Give a model's config.json.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--model {str(path)!r} is not a JSON object. Give a model's config.json.")
    text = found.get("text_config")
    return {**found, **text} if isinstance(text, dict) else found


def layers_of(config: Mapping[str, Any], *, kv_dtype: str = "auto", ranks: int = 1) -> list[Layers]:
    """Return the layers of a model that have a KV cache or a state, over all tensor parallel ranks.

    ``kv_dtype`` is a value of ``--kv-cache-dtype``. KV heads are replicated if there are fewer heads than ranks.

    Raises:
        ConfigError: A field is missing, or the kind of model is unknown.
    """
    model_bytes = _dtype_bytes(config)
    if kv_dtype != "auto" and kv_dtype not in _KV_DTYPE_BYTES:
        raise ConfigError(f"--kv-dtype is {kv_dtype!r}. Expected auto, {', '.join(_KV_DTYPE_BYTES)}.")
    kv_bytes = model_bytes if kv_dtype == "auto" else _KV_DTYPE_BYTES[kv_dtype]
    kinds = _kinds(config)
    found = []
    if config.get("kv_lora_rank"):
        # Latents are the same on all ranks, and stored once.
        latent = (_number(config, "kv_lora_rank") + _number(config, "qk_rope_head_dim")) * kv_bytes
        found.append(Layers("mla", len(kinds), latent))
        return found
    for kind, names in (("full", _FULL), ("window", _WINDOW)):
        if count := sum(name in names for name in kinds):
            found.append(Layers(kind, count, _attention_bytes(config, kv_bytes, ranks)))
    if count := sum(name in _STATE for name in kinds):
        found.append(Layers("state", count, state_bytes=_state_bytes(config, model_bytes)))
    return found


@dataclass(frozen=True, slots=True)
class Pages:
    """Blocks of a model.

    Attributes:
        block_tokens: Tokens of a block.
        block_bytes: Bytes of a block of one group, over all ranks: the unit of vLLM's pool.
        groups: Groups of layers; each has a block for the same tokens.
    """

    block_tokens: int
    block_bytes: int
    groups: int

    @property
    def token_bytes(self) -> float:
        """Bytes that a token takes where the blocks of all groups are stored."""
        return self.block_bytes * self.groups / self.block_tokens


def pages_of(layers: Sequence[Layers], block_tokens: int = 16) -> Pages:
    """Return vLLM's division of layers into blocks.

    A model with several kinds of layers has several groups with equal numbers of layers, and a block has the same
    bytes in each. The state of a layer takes one page for any number of tokens, so a block has at least as many tokens
    as fill a page of that size, and at least ``block_tokens`` (vLLM's ``--block-size``).
    """
    if not layers:
        raise ConfigError("The model has no layers with a KV cache. There is nothing to offload.")
    token_bytes = {each.token_bytes for each in layers if each.token_bytes}
    if len(token_bytes) > 1:
        raise ConfigError("The layers of this model have KV caches of different lengths. Measure: run an engine once.")
    per_token = max(token_bytes, default=0)
    state_bytes = max((each.state_bytes for each in layers), default=0)
    if per_token and state_bytes:
        block_tokens = max(block_tokens, -(-state_bytes // (per_token * _KERNEL_TOKENS)) * _KERNEL_TOKENS)
    page_bytes = max(per_token * block_tokens, state_bytes)
    counts = [each.count for each in layers]
    size = max(counts) if max(counts) < min(counts) * _ALIKE else min(counts)
    groups = sum(-(-count // size) for count in counts)
    return Pages(block_tokens, page_bytes * size, groups)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer that keeps something."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        known = {"M": "mamba", "*": "full_attention"}
        return [known[letter] for letter in pattern if letter in known]
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list):
        unknown = {str(kind) for kind in kinds} - _FULL - _WINDOW - _STATE
        if unknown:
            raise ConfigError(f"Layers of the kind {min(unknown)!r} are not known here. Measure: run an engine once.")
        return [str(kind) for kind in kinds]
    count = _number(config, "num_hidden_layers")
    if config.get("attn_layer_period"):
        period, offset = _number(config, "attn_layer_period"), int(config.get("attn_layer_offset", 0))
        return ["full_attention" if layer % period == offset else "mamba" for layer in range(count)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full_attention"] * count
    pattern_length = config.get("sliding_window_pattern")
    if isinstance(pattern_length, int) and pattern_length > 1:
        return [
            "full_attention" if (layer + 1) % pattern_length == 0 else "sliding_attention" for layer in range(count)
        ]
    return ["sliding_attention"] * count


def _attention_bytes(config: Mapping[str, Any], kv_bytes: int, ranks: int) -> int:
    heads = _number(config, "num_attention_heads")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or _number(config, "hidden_size") // heads)
    return 2 * max(kv_heads, ranks) * head_dim * kv_bytes


def _state_bytes(config: Mapping[str, Any], model_bytes: int) -> int:
    """Return the bytes of one layer's state: the end of a convolution, and the state of the recurrence."""
    kept_bytes = _DTYPE_BYTES.get(str(config.get("mamba_ssm_cache_dtype")), model_bytes)
    if config.get("linear_num_value_heads"):  # Gated delta net.
        keys = _number(config, "linear_num_key_heads") * _number(config, "linear_key_head_dim")
        values = _number(config, "linear_num_value_heads") * _number(config, "linear_value_head_dim")
        convolved = (2 * keys + values) * (_number(config, "linear_conv_kernel_dim") - 1)
        return convolved * model_bytes + values * _number(config, "linear_key_head_dim") * kept_bytes
    width = int(config.get("conv_kernel") or config.get("mamba_d_conv") or 0)
    state = int(config.get("ssm_state_size") or config.get("mamba_d_state") or 0)
    heads = int(config.get("mamba_num_heads") or config.get("mamba_n_heads") or 0)
    if not width or not state:
        raise ConfigError("The state of this model's layers is not known here. Measure: run an engine once.")
    if heads:  # Mamba 2.
        inner = heads * int(config.get("mamba_head_dim") or config.get("mamba_d_head") or 0)
        groups = int(config.get("n_groups") or config.get("mamba_n_groups") or 1)
        convolved = (inner + 2 * groups * state) * (width - 1)
    else:
        inner = int(config.get("mamba_expand") or 2) * _number(config, "hidden_size")
        convolved = inner * (width - 1)
    return convolved * model_bytes + inner * state * kept_bytes


def _dtype_bytes(config: Mapping[str, Any]) -> int:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in _DTYPE_BYTES:
        raise ConfigError(f"The model's data type is {name!r}. Known: {', '.join(_DTYPE_BYTES)}. Give --kv-dtype.")
    return _DTYPE_BYTES[name]


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"The model's configuration has {name} = {value!r}. Expected a number: give its config.json.")
    return value
