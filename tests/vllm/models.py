"""Models for tests beside the tiny Llama of the examples."""

from __future__ import annotations

import json
from pathlib import Path

from examples.tiny_llama import LlamaShape, make_tiny_llama

WINDOW_TOKENS = 80
"""Sliding window of the hybrid model: no whole number of blocks."""


def make_tiny_hybrid(directory: Path) -> Path:
    """Write a tiny random Llama of three layers, the first and the last with a sliding window."""
    make_tiny_llama(directory, LlamaShape(layers=3))
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["sliding_window"] = WINDOW_TOKENS
    config["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    path.write_text(json.dumps(config))
    return directory
