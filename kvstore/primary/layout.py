"""The canonical layout of a slot: the bytes under tensor parallel size 1, regardless of the size that wrote them.

**Slot.** ``[layer 0: block 0 .. b-1][layer 1: block 0 .. b-1]...[padding]``, with ``b`` blocks per slot. Pages have no
padding, even if they are padded on the device. A slot holds blocks of one group of layers. Its length is that of the
longest group, rounded up to a page of memory. The bytes after a group's payload are undefined.

**Turns.** If ``R > 1`` ranks hold the same bytes, they take turns: the block with number ``n = slot * blocks_per_slot +
place`` is stored by the rank with ``r % R == n % R``, and loaded by all.

Sliding-window layers have the same pages as full-attention layers, but a prefix needs fewer of their blocks
(:meth:`GroupLayout.needed`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kvstore.errors import ConfigError
from kvstore.primary.page import LayerLayout, LayerPlan
from kvstore.primary.region import PAGE_BYTES, rounded_up

LAYOUT_VERSION = 1
"""Version of the layout above; part of :meth:`KVLayout.fields`, so blocks of different versions are never mixed."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Layers whose blocks are stored and loaded together (a KV cache group of a hybrid model).

    Attributes:
        layers: The layers, in the order of their pages in a slot.
        block_tokens: Tokens per device block.
        window_tokens: Length of the attention window, including the token itself; None for full attention.
    """

    layers: tuple[LayerLayout, ...]
    block_tokens: int
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        if not self.layers or self.block_tokens < 1 or (self.window_tokens is not None and self.window_tokens < 1):
            raise ConfigError(f"{self}: layers, tokens of a block and the window (if any) must be at least 1.")

    def needed(self, prefix_tokens: int) -> range:
        """Return the device blocks that are needed to continue after a prefix.

        The token at position ``n`` attends to positions from ``n - window + 1`` on. So after ``n`` tokens, the first
        block needed is that of position ``max(0, n - (window - 1))``: ``ceil((window - 1) / block_tokens)`` blocks in
        total if ``n`` is a multiple of ``block_tokens``.
        """
        end = -(-prefix_tokens // self.block_tokens)
        if self.window_tokens is None:
            return range(end)
        first = max(0, prefix_tokens - self.window_tokens + 1)
        return range(first // self.block_tokens if first < prefix_tokens else end, end)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of the slots of a model.

    Attributes:
        groups: Groups of layers. A slot holds blocks of one group, so keys include the group.
        blocks_per_slot: Device blocks in a slot (vLLM's ``blocks_per_chunk``).
    """

    groups: tuple[GroupLayout, ...]
    blocks_per_slot: int = 1

    def __post_init__(self) -> None:
        if not self.groups or self.blocks_per_slot < 1:
            raise ConfigError(
                f"{len(self.groups)} groups, {self.blocks_per_slot} blocks a slot: both must be at least 1."
            )
        for group in self.groups:
            names = [layer.name for layer in group.layers]
            if len(set(names)) < len(names):
                raise ConfigError(f"Layers of one group have equal names: {sorted(names)}.")

    @property
    def portable(self) -> bool:
        """Whether slots hold the same bytes under every tensor parallel size. If not, sizes must not share blocks."""
        return all(layer.portable for group in self.groups for layer in group.layers)

    def payload_bytes(self, group: int, tp_size: int = 1) -> int:
        """Return the bytes that a full slot of a group holds."""
        return self.blocks_per_slot * sum(layer.canonical_bytes(tp_size) for layer in self.groups[group].layers)

    def slot_bytes(self, tp_size: int = 1) -> int:
        """Return the length of a slot: that of the longest payload, rounded up to a page of memory."""
        return rounded_up(max(self.payload_bytes(group, tp_size) for group in range(len(self.groups))), PAGE_BYTES)

    def plan(self, tp_size: int, tp_rank: int, layers: Collection[str] | None = None) -> RankPlan:
        """Return the copies of one rank.

        Args:
            tp_size: Tensor parallel size.
            tp_rank: The rank, from 0.
            layers: Names of the layers on the rank (its pipeline stage); by default all. The positions of pages in a
                slot do not depend on them, so a slot may be loaded under different pipeline stages.

        Raises:
            ConfigError: There is no such rank, or a layer's heads can be neither split nor shared evenly.
        """
        if not 0 <= tp_rank < tp_size:
            raise ConfigError(f"Rank {tp_rank} of {tp_size}: expected 0 to {tp_size - 1}.")
        groups: list[tuple[LayerPlan, ...]] = []
        for group in self.groups:
            plans, offset = [], 0
            for layer in group.layers:
                if layers is None or layer.name in layers:
                    plans.append(layer.plan(tp_size, tp_rank, offset))
                offset += self.blocks_per_slot * layer.canonical_bytes(tp_size)
            groups.append(tuple(plans))
        return RankPlan(tuple(groups), self.blocks_per_slot, self.slot_bytes(tp_size))

    def fields(self, tp_size: int = 1) -> dict[str, Any]:
        """Return the layout's fields for a ``Namespace``; ``tp_size`` is included only if it is not portable."""
        return {
            "layout_version": LAYOUT_VERSION,
            "blocks_per_slot": self.blocks_per_slot,
            "tensor_parallel_size": None if self.portable else tp_size,
            "groups": [
                {
                    "block_tokens": group.block_tokens,
                    "layers": [
                        [layer.name, layer.kind, layer.kv_heads, [[p.repeats, p.head_bytes] for p in layer.parts]]
                        for layer in group.layers
                    ],
                }
                for group in self.groups
            ],
        }


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The copies of one rank, for all groups.

    Attributes:
        groups: Plans of the layers on the rank, by group.
        blocks_per_slot: Device blocks in a slot.
        slot_bytes: Length of a slot.
    """

    groups: tuple[tuple[LayerPlan, ...], ...]
    blocks_per_slot: int
    slot_bytes: int
