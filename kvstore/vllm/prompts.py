"""The keys of a prompt's blocks under a namespace, computed by vLLM's own code without an engine.

The fields of a namespace determine the keys: sizes of blocks, groups of layers and the hash.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from kvstore.errors import ConfigError
from kvstore.types import BlockKey
from kvstore.vllm.tags import NO_ADAPTER

_SETTINGS: Final = "engine_config.settings."
"""Start of the fields that have the names of vLLM's arguments."""

_NAMES: Final = {
    "model.name": "--model",
    "model.dtype": "--dtype",
    "engine_config.kv_dtype": "--kv-cache-dtype",
    "groups.0.tokens_per_block": "--block-size",
    "parallel.tp_size": "--tensor-parallel-size",
    "parallel.pp_size": "--pipeline-parallel-size",
    "parallel.pcp_size": "--prefill-context-parallel-size",
    "parallel.dcp_size": "--decode-context-parallel-size",
    "engine_version": "vLLM",
    "blocks_per_chunk": "blocks_per_chunk",
    "numerics": "numerics",
    "user_namespace": "namespace of the tier",
    "keys": "tenants or adapters",
    "epoch": "reset of the caches",
}
"""Names that operators know, by the name of the field."""


def tokens_of(text: str, tokenizer: str) -> list[int]:
    """Return the token ids of a prompt of vLLM's completions API.

    Args:
        text: The prompt.
        tokenizer: Name or directory of a tokenizer on this machine.

    Raises:
        ConfigError: This machine has no such tokenizer.
    """
    # Takes seconds, and token ids need none.
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    # Any error of a third-party tokenizer.
    except Exception as error:
        raise ConfigError(
            f"The tokenizer {tokenizer!r} can't be loaded on this machine ({type(error).__name__}). Name its "
            "directory (--tokenizer), or give token ids: [1, 2, 3]."
        ) from error
    return [int(token) for token in found.encode(text)]


def keys_of(tokens: Sequence[int], fields: Mapping[str, Any], cache_salt: str | None) -> dict[BlockKey, int]:
    """Return the keys of a prompt's blocks, without the tag of a tenant, and the token at which each ends.

    Args:
        tokens: Token ids of the prompt, which has no images and no adapter.
        fields: The fields of a namespace of vLLM.
        cache_salt: The request's ``cache_salt``.

    Raises:
        ConfigError: The fields are not those of a namespace of this vLLM, or the hash is different in each process.
    """
    try:
        tokens_per_hash, chunk = int(fields["tokens_per_hash"]), int(fields["blocks_per_chunk"])
        steps = [int(group["tokens_per_block"]) * chunk // tokens_per_hash for group in fields["groups"]]
        settings = fields["engine_config"]["settings"].get("cache_config", {})
        name = str(settings.get("prefix_caching_hash_algo", "sha256"))
        hash_function = get_hash_fn_by_name(name)
        if tokens_per_hash < 1 or min(steps) < 1:
            raise ValueError("a block without tokens")
    # ImportError: a hash needs a package.
    except (ArithmeticError, AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"Its fields don't describe blocks of this vLLM ({type(error).__name__}: {error}), so its keys are unknown."
        ) from error
    if name.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        raise ConfigError(f"Keys by {name} depend on PYTHONHASHSEED. Set it as for the engine.")
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(tokens_per_hash, hash_function)
    one = SamplingParams(max_tokens=1)
    hashes = Request("why", list(tokens), one, None, cache_salt=cache_salt, block_hasher=hasher).block_hashes
    tag = NO_ADAPTER if "adapters" in str(fields.get("keys", "")) else b""
    keys = {}
    for index, step in enumerate(steps):
        for number, block_hash in enumerate(hashes[step - 1 :: step], start=1):
            keys[tag + bytes(make_offload_key(block_hash, index))] = number * step * tokens_per_hash
    return keys


def name_of(field: str) -> str | None:
    """Return the setting that determines a field of a namespace, by the name in which it is given; None for others.

    ``field``: its name, with dots between the names of nested objects.
    """
    last = field.rpartition(".")[2]
    if field.startswith("environment."):
        return last
    is_argument = field.startswith(_SETTINGS) and last in EngineArgs.__dataclass_fields__
    return f"--{last.replace('_', '-')}" if is_argument else _NAMES.get(field)
