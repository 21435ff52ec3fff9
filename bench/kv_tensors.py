"""KV blocks with the statistics of a trained model, for benchmarks of codecs.

No model is downloaded. A Llama of transformers with weights similar to trained ones (see below) processes text (the
words of this repository's pages and modules), and its KV cache is cut into blocks in kvstore's layout. With
``checkpoint`` a real model from a directory is used instead.

The weights imitate these properties of trained models, which determine how well exponents compress:

* The norms of embeddings differ between words (log-normal, sigma 0.3), and word frequencies are those of text.
* RMSNorm gains are around 1 (log-normal, sigma 0.35), with one channel in 64 five times as large, which all tokens
  share in the residual stream ("massive activations").
* Key and value projections have a scale per output channel: log-normal, sigma 0.5 for keys and 0.25 for values; in each
  head two pairs of key channels are eight times as large (the per-channel outliers of keys that quantisation papers
  such as KIVI, 2024, describe). RoPE with theta 500,000 then rotates keys, as in Llama 3.
* Output projections are scaled by 1 / sqrt(2 layers), as in initialised and, approximately, in trained models.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}
"""Element types with their lengths in bytes. fp8 is e4m3, scaled per layer like in vLLM's calibration."""

BLOCK_TOKENS = 16
_ROOT = Path(__file__).resolve().parent.parent
_VOCABULARY = 8192


def kv_blocks(dtype: str, *, tokens: int, layers: int, checkpoint: Path | None = None, seed: int = 7) -> np.ndarray:
    """Return the blocks of one long prompt as rows of bytes.

    A row has kvstore's canonical layout for 16 tokens: per layer keys, then values, each by KV head, then by token.

    Args:
        dtype: One of :data:`DTYPES`.
        tokens: Length of the prompt.
        layers: Layers of the model, each with 8 KV heads of 128 channels; a checkpoint has its own.
        checkpoint: Directory of a causal language model that transformers can load.
        seed: Seed of the weights.
    """
    # Imported here, because it takes seconds and --help does not need it.
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
        # Like a calibrated scale: the largest value of the layer becomes the largest of the type.
        values = (values.float() * (448 / values.float().abs().max())).to(torch.float8_e4m3fn)
    else:
        values = values.to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype])
    return values.view(torch.uint8).numpy()


def _model(layers: int) -> Any:
    """Make a Llama with weights like trained ones, in fp32, so that every element type has its full precision."""
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
                            # RoPE rotates channel i with channel i + 64, so outliers occur in such pairs.
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
    """Return this repository's text as token ids, where more frequent words have lower ids."""
    paths = sorted([*_ROOT.glob("docs/*.md"), *_ROOT.glob("*.md"), *_ROOT.glob("kvstore/**/*.py")])
    words = [word for path in paths for word in re.findall(r"\w+|[^\w\s]", path.read_text())]
    known, counts = np.unique(words, return_counts=True)
    by_frequency = {str(known[place]): rank for rank, place in enumerate(np.argsort(-counts, kind="stable"))}
    ids = [min(by_frequency[word], _VOCABULARY - 1) for word in words]
    return (ids * (tokens // len(ids) + 1))[:tokens]


def _checkpoint(directory: Path, tokens: int) -> tuple[Any, list[int]]:
    """Load a real model, and tokenize the documentation with its own tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "\n\n".join(path.read_text() for path in sorted(_ROOT.glob("docs/*.md")))
    ids = AutoTokenizer.from_pretrained(directory)(text)["input_ids"][:tokens]
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval(), ids
