"""Models for tests beside the tiny Llama of the examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.tiny_llama import LlamaShape, make_tiny_llama

WINDOW_TOKENS = 80
"""Sliding window of the hybrid model: not a whole number of blocks."""


def make_tiny_hybrid(directory: Path) -> Path:
    """Write a tiny random Llama of three layers, the first and the last with a sliding window."""
    make_tiny_llama(directory, LlamaShape(layers=3))
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["sliding_window"] = WINDOW_TOKENS
    config["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    path.write_text(json.dumps(config))
    return directory


def make_tiny_mamba(directory: Path) -> Path:
    """Write a tiny random model of three layers, the first and the last with a Mamba state."""
    # Here, because a launcher that only starts engines does not otherwise need torch.
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    shape = LlamaShape()
    return _write_random(
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig,
        directory,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        position_embedding_type="rope",
        attention_multiplier=(shape.hidden // shape.heads) ** -0.5,
        mamba_n_heads=4,
        mamba_d_head=shape.hidden * 2 // 4,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_chunk_size=1024,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
    )


def make_adapter(path: Path, model: Path, seed: int) -> Path:
    """Write a random adapter of the attention of a model."""
    import torch  # here, because a launcher that only starts engines does not otherwise need torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    generator, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in (("q_proj", hidden), ("k_proj", keys), ("v_proj", keys)):
            part = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{part}.lora_A.weight"] = torch.randn(8, hidden, generator=generator) * 0.3
            weights[f"{part}.lora_B.weight"] = torch.randn(size, 8, generator=generator) * 0.3
    path.mkdir(exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (path / "adapter_config.json").write_text(json.dumps({**described, "bias": "none", "task_type": "CAUSAL_LM"}))
    return path


def make_tiny_mla(directory: Path) -> Path:
    """Write a tiny random model with latent attention, for which vLLM on most CPUs turns prefix caching off."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    return _write_random(
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        directory,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=99,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    )


def make_tiny_experts(directory: Path) -> Path:
    """Write a tiny random model whose layers have four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = LlamaShape()
    return _write_random(
        MixtralForCausalLM,
        MixtralConfig,
        directory,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
    )


def make_tiny_fine_windows(directory: Path) -> Path:
    """Write a tiny random model whose layers with windows have blocks of fewer tokens than those without."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    return _write_random(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        directory,
        intermediate_size=256,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_global_key_value_heads=1,
        head_dim=32,
        global_head_dim=32,
        sliding_window=WINDOW_TOKENS,
        vocab_size_per_layer_input=512,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        attention_k_eq_v=True,
        enable_moe_block=False,
    )


def make_tiny_prefix_lm(directory: Path) -> Path:
    """Write a tiny random model whose prompts attend to later tokens, too."""
    from transformers import HrmTextConfig, HrmTextForCausalLM

    return _write_random(
        HrmTextForCausalLM,
        HrmTextConfig,
        directory,
        intermediate_size=256,
        num_attention_heads=4,
        H_cycles=2,
        L_cycles=2,
        num_layers_per_stack=2,
    )


def _write_random(model: Any, config: Any, directory: Path, **fields: Any) -> Path:
    """Write a random model with the tokenizer and the sizes of the tiny Llama, and with fields of its own."""
    import torch

    shape = LlamaShape()
    make_tiny_llama(directory, shape)  # keeps only the tokenizer
    torch.manual_seed(shape.seed)
    made = config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        max_position_embeddings=shape.positions,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=False,
        dtype="float32",
        **fields,
    )
    model(made).to(torch.float32).save_pretrained(directory)
    return directory
