"""Make a small Llama with random weights and a word-level tokenizer, so that vLLM can be tried without a download.

    python examples/tiny_llama.py /tmp/tiny --layers 8 --hidden 768

The weights are drawn from a fixed seed, so the same arguments give the same model on every machine. With another type
than float32 they are drawn on the GPU, if there is one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Size of the model."""

    layers: int = 2  # Decoder layers.
    hidden: int = 128  # Width of the residual stream; a multiple of ``heads``.
    heads: int = 4  # Attention heads.
    kv_heads: int = 2  # KV heads; a divisor of ``heads``.
    vocabulary: int = 512  # Words of the tokenizer, ``w0`` to ``w<n-1>``.
    positions: int = 8192  # Longest context in tokens.
    seed: int = 20261121  # Seed of the weights.
    intermediate: int = 0  # Width of the feed-forward layers; 0: about 8/3 of ``hidden``.
    dtype: str = "float32"  # Type of the weights.


def make_tiny_llama(directory: Path, shape: LlamaShape | None = None) -> Path:
    """Write model, tokenizer and configuration into a directory, in the format of transformers and vLLM.

    Args:
        directory: Target directory; created if it is missing.
        shape: Size of the model.

    Returns:
        The directory.
    """
    import torch  # Imported here, because programs that only start engines do not need torch.
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = shape or LlamaShape()
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(shape.seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate or shape.hidden * 8 // 3 // 64 * 64 or 64,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        # Wider than in a trained model, so that random logits differ clearly and greedy decoding has no near ties.
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=False,
        dtype=shape.dtype,
    )
    # A model for a GPU may be large: there its weights are drawn in seconds.
    with torch.device("cuda" if shape.dtype != "float32" and torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    model.to(getattr(torch, shape.dtype)).save_pretrained(directory)
    _write_tokenizer(directory, shape.vocabulary)
    return directory


def _write_tokenizer(directory: Path, vocabulary: int) -> None:
    """Write a tokenizer whose words are ``w0``, ``w1``, … separated by blanks; word ``wN`` is token N."""
    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    special = {"bos_token": "w0", "eos_token": "w1", "unk_token": "w0"}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    names = [field.name for field in fields(LlamaShape)]
    for name in names:
        default = getattr(LlamaShape(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
        parser.error(f"not installed: {', '.join(missing)}")
    print(make_tiny_llama(args.directory, LlamaShape(**{name: getattr(args, name) for name in names})))


if __name__ == "__main__":
    main()
