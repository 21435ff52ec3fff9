"""The engine of a walk, in the process of the walk: start, weight changes, sleep, shutdown."""

from __future__ import annotations

import gc
import os
import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import LLM
from vllm.config import KVTransferConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

from tests.vllm.walk.plan import Prompt

COMMON: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "block_size": 32,
}


def engine_ids() -> str:
    """Return the common prefix of the ids of this process's engines, and so of their files in /dev/shm."""
    return f"kvstore-walk-{os.getpid()}-"


@contextmanager
def started(model: str, offloading: dict[str, Any] | None, **llm: Any) -> Iterator[Any]:
    """Start an engine; at the end shut it down so that this process can start another one."""
    extra: dict[str, Any] = {}
    if offloading is not None:
        extra["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVStoreConnector",
            kv_role="kv_both",
            engine_id=f"{engine_ids()}{uuid.uuid4().hex}",
            kv_connector_extra_config=offloading,
        )
    engine = LLM(model, **{**COMMON, **extra, **llm})
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()
        gc.freeze()


def inputs_of(prompt: Prompt) -> dict[str, Any]:
    """Return a prompt in vLLM's form."""
    return {"prompt_token_ids": prompt.tokens, **({"cache_salt": prompt.salt} if prompt.salt else {})}


def adapter_path(model: str, number: int) -> Path:
    """Return the directory of one of a model's adapters."""
    return Path(f"{model}-adapter{number}")


def adapter_of(model: str, prompt: Prompt) -> LoRARequest | None:
    """Return a prompt's adapter in vLLM's form."""
    number = prompt.adapter
    return LoRARequest(f"adapter{number}", number, str(adapter_path(model, number))) if number else None


def lora_options(llm: dict[str, Any]) -> dict[str, Any]:
    """Return those of an engine's options that concern adapters."""
    return {name: value for name, value in llm.items() if "lora" in name}


def core_of(llm: Any) -> Any:
    """Return vLLM's ``EngineCore``."""
    return llm.llm_engine.engine_core.engine_core


class Weights:
    """The versions of a model's weights: 0 is that of its files, and each other one a fixed change of it."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._original: dict[str, torch.Tensor] = {}

    def change(self, version: int) -> None:
        """Change the weights in place, as a trainer does."""
        self._llm.apply_model(lambda model: self._apply(model, version))

    def _apply(self, model: Any, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                # Matrices may be packed elsewhere (oneDNN), so only changes of vectors take effect.
                if "layers" in name:
                    original = self._original.setdefault(name, parameter.detach().clone())
                    noise = torch.rand(original.shape, generator=generator) * bool(version)
                    parameter.copy_(original * (1 + noise))


def scribble(llm: Any, rng: random.Random) -> None:
    """Overwrite the whole KV cache, as sleep does on a GPU, where the memory is freed."""
    runner = core_of(llm).model_executor.driver_worker.worker.model_runner
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    seen = set()
    for cache in runner.kv_caches:
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensor.copy_(torch.randn(tensor.shape, generator=generator))


def mend_vllm(speculates: bool) -> None:
    """Work around three limits of vLLM's CPU platform that its GPU platform does not have."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    # Mamba 2 exports states from the middle of a prefill, and its CPU kernel does not return them.
    mamba_mixer2.MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
    # 0.31 packs convolution weights on every CPU with AVX-512 BF16, and the kernel for them has no float32.
    # Later versions pack only bfloat16, which no model of a walk uses.
    if hasattr(_custom_ops, "causal_conv1d_weight_pack"):
        del _custom_ops.causal_conv1d_weight_pack
    if speculates:
        # 0.32 inspects the __dict__ of every object of every module, and llvmlite returns a value for any name.
        from llvmlite.binding import ffi

        library = type(ffi.lib)
        inner = library.__getattr__

        def getattr_(self: Any, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return inner(self, name)

        library.__getattr__ = getattr_
