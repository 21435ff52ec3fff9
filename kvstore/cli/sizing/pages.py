"""vLLM's division of a model's KV cache into blocks, and so the size of one block of tokens on a medium."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.cli.sizing.model import Layers
from kvstore.errors import ConfigError

__all__ = ["Pages", "pages_of"]

_KERNEL_TOKENS: Final = 16
"""Tokens that kernels process together; a block of a model with states is a multiple of it."""

_ALIKE: Final = 1.5
"""Ratio of the layers of the most frequent kind to those of the rarest. Below it each kind is one group, with padding;
otherwise groups have as many layers as the rarest kind."""


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
    as fill a page of that size.

    Args:
        layers: One for each kind.
        block_tokens: ``--block-size`` of vLLM.
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
