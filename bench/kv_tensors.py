"""KV blocks with the statistics of a trained model's, for benchmarks of codecs.

No model is downloaded. A Llama of transformers is made whose weights follow what is known of trained ones (below),
reads text (the words of this repository's own pages and modules), and its KV cache is cut into blocks as kvstore stores
them. With ``checkpoint`` a real one from a directory is used instead.

What is imitated, because it decides how well exponents compress:

* Embeddings whose norms differ from word to word (log-normal, sigma 0.3), and words as frequent as in text.
* RMSNorm gains around 1 (log-normal, sigma 0.35) with one channel in 64 five times as large, which all tokens share
  in the residual stream ("massive activations").
* Projections with a scale of their own per output channel: log-normal, sigma 0.5 for keys and 0.25 for values; in each
  head two pairs of key channels are eight times as large (the per-channel outliers of keys that quantisation papers
  such as KIVI, 2024, describe). RoPE with theta 500,000 turns keys afterwards, as in Llama 3.
* Output projections scaled by 1 / sqrt(2 layers), as trained models are initialised and about as they end.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["DTYPES", "kv_blocks"]

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
"""Element types, and the length of an element in bytes. fp8 is e4m3, scaled per layer as vLLM does by calibration."""

BLOCK_TOKENS = 16
_ROOT = Path(__file__).resolve().parent.parent
_VOCABULARY = 8192


def kv_blocks(dtype: str, *, tokens: int, layers: int, checkpoint: Path | None = None, seed: int = 7) -> np.ndarray:
    """Return the blocks of one long prompt as rows of bytes.

    A row is what kvstore's canonical layout holds of 16 tokens: per layer, keys and values, of each KV head its run of
    tokens.

    Args:
        dtype: One of :data:`DTYPES`.
        tokens: Length of the prompt.
        layers: Layers of the model, each with 8 KV heads of 128 channels; a checkpoint has its own.
        checkpoint: Directory of a causal language model that transformers can load.
        seed: Of the weights.
    """
    # Imported here: they take seconds, and --help needs none of them.
    import torch

    torch.manual_seed(seed)
    model, ids = _checkpoint(checkpoint, tokens) if checkpoint else (_model(layers), _word_ids(tokens))
    with torch.inference_mode():
        cache = model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1).past_key_values
    blocks = len(ids) // BLOCK_TOKENS
    parts = []
    for layer in cache.layers:
        for tensor in (layer.keys[0], layer.values[0]):
            heads, _, width = tensor.shape
            cut = tensor[:, : blocks * BLOCK_TOKENS].reshape(heads, blocks, BLOCK_TOKENS * width).transpose(0, 1)
            parts.append(_as_bytes(cut.reshape(blocks, -1).contiguous(), dtype))
    return np.ascontiguousarray(np.concatenate(parts, axis=1))


def _as_bytes(values: Any, dtype: str) -> np.ndarray:
    import torch

    if dtype == "fp8":
        # The largest value of the layer becomes the largest of the type, which is what a calibrated scale does.
        values = (values.float() * (448 / values.float().abs().max())).to(torch.float8_e4m3fn)
    else:
        values = values.to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype])
    return values.view(torch.uint8).numpy()


def _model(layers: int) -> Any:
    """Make a Llama whose weights look trained; in fp32, so that every type gets all the digits that it has room for."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            kind = name.split(".")[-2]
            if "norm" in kind:
                weight.copy_(_log_normal(weight.shape, 0.35))
                weight[torch.randperm(weight.numel())[: weight.numel() // 64]] *= 5
            elif kind == "embed_tokens":
                weight.normal_(0, 0.05).mul_(_log_normal((_VOCABULARY, 1), 0.3))
            else:
                weight.normal_(0, weight.shape[1] ** -0.5)
                if kind in ("k_proj", "v_proj"):
                    scales = _log_normal((8, 128), 0.5 if kind == "k_proj" else 0.25)
                    if kind == "k_proj":
                        for head in range(8):
                            # RoPE turns channel i with channel i + 64, so outliers come in such pairs.
                            pair = torch.randperm(64)[:2]
                            scales[head, pair] *= 8
                            scales[head, pair + 64] *= 8
                    weight.mul_(scales.reshape(-1, 1))
                elif kind in ("o_proj", "down_proj"):
                    weight.mul_((2 * layers) ** -0.5)
    return model


def _log_normal(shape: Any, sigma: float) -> Any:
    import torch

    return torch.exp(torch.randn(shape) * sigma)


def _word_ids(tokens: int) -> list[int]:
    """Return the words of this repository's text, most frequent word first in the vocabulary."""
    paths = sorted([*_ROOT.glob("docs/*.md"), *_ROOT.glob("*.md"), *_ROOT.glob("kvstore/**/*.py")])
    words = [word for path in paths for word in re.findall(r"\w+|[^\w\s]", path.read_text())]
    known, counts = np.unique(words, return_counts=True)
    by_frequency = {str(known[place]): rank for rank, place in enumerate(np.argsort(-counts, kind="stable"))}
    ids = [min(by_frequency[word], _VOCABULARY - 1) for word in words]
    return (ids * (tokens // len(ids) + 1))[:tokens]


def _checkpoint(directory: Path, tokens: int) -> tuple[Any, list[int]]:
    """Load a real model and let its own tokenizer cut the same text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "\n\n".join(path.read_text() for path in sorted(_ROOT.glob("docs/*.md")))
    ids = AutoTokenizer.from_pretrained(directory)(text)["input_ids"][:tokens]
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), ids
