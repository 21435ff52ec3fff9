"""The canonical layout of a slot: the bytes under tensor parallel size 1, regardless of the size that wrote them.

docs/layout.md specifies it. A page is a sequence of parts ``[repeats][heads][head_bytes]``. A rank copies the runs of
its heads between its page and the canonical page. Heads are divided among ranks as by Megatron's grouped-query
attention and vLLM's ``QKVParallelLinear``; ranks that hold the same bytes take turns storing blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvstore.errors import ConfigError
from kvstore.primary.region import PAGE_BYTES, rounded_up


class PageOrder(StrEnum):
    """Order of the axes of a page: tokens before heads, or heads before tokens (names of vLLM and FlashInfer)."""

    NHD = "nhd"
    HND = "hnd"


@dataclass(frozen=True, slots=True)
class PagePart:
    """A part of a page: ``repeats`` times all heads, ``head_bytes`` of each."""

    repeats: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The page of one layer. Made by :func:`attention_layer`, :func:`latent_layer` or :func:`opaque_layer`.

    Attributes:
        name: Name of the layer, unique in its group.
        kind: Kind of page, with the order of axes.
        kv_heads: KV heads under tensor parallel size 1; 0 for an opaque page.
        parts: Parts of the page, in order.
    """

    name: str
    kind: str
    kv_heads: int
    parts: tuple[PagePart, ...]

    def __post_init__(self) -> None:
        sizes = [size for part in self.parts for size in (part.repeats, part.head_bytes)]
        if not sizes or min(sizes) < 1 or self.kv_heads < 0:
            raise ConfigError(
                f"Layer {self.name!r} has {self.kv_heads} KV heads, parts {self.parts}: none may be empty."
            )

    @property
    def portable(self) -> bool:
        """Whether its canonical page is the same under every tensor parallel size."""
        return self.kv_heads > 0

    def canonical_bytes(self, tp_size: int = 1) -> int:
        """Return the length of the canonical page; only that of an opaque layer depends on ``tp_size``."""
        return sum(part.repeats * part.head_bytes for part in self.parts) * (self.kv_heads or tp_size)

    def local_bytes(self, tp_size: int) -> int:
        """Return the length of a rank's page, without padding.

        Raises:
            ConfigError: The heads can't be split evenly, nor replicated evenly.
        """
        shards, _ = self._shards(tp_size)
        return self.canonical_bytes(tp_size) // shards

    def plan(self, tp_size: int, tp_rank: int, slot_offset: int = 0) -> LayerPlan:
        """Return the copies of one rank.

        Raises:
            ConfigError: The heads can't be split evenly, nor replicated evenly.
        """
        shards, replicas = self._shards(tp_size)
        heads = self.kv_heads or tp_size
        mine, shard = heads // shards, tp_rank // replicas
        local_bytes = self.local_bytes(tp_size)
        runs: list[CopyRun] = []
        if shards > 1:
            local = canonical = 0
            for part in self.parts:
                length, row = mine * part.head_bytes, heads * part.head_bytes
                runs.append(CopyRun(local, canonical + shard * length, length, part.repeats, length, row))
                local += part.repeats * length
                canonical += part.repeats * row
        else:
            runs.append(CopyRun(0, shard * local_bytes, local_bytes))
        return LayerPlan(
            layer=self.name,
            runs=tuple(runs),
            local_bytes=local_bytes,
            block_bytes=self.canonical_bytes(tp_size),
            slot_offset=slot_offset,
            writers=replicas,
            writer_index=tp_rank % replicas,
        )

    def _shards(self, tp_size: int) -> tuple[int, int]:
        """Return the number of shards, and of ranks that hold each."""
        heads = self.kv_heads or tp_size
        shards = min(tp_size, heads)
        if tp_size < 1 or heads % shards or tp_size % shards:
            raise ConfigError(
                f"Layer {self.name!r} has {heads} KV heads, which {tp_size} ranks can neither split nor share evenly. "
                "Expected one number to be a multiple of the other; else describe the layer with opaque_layer()."
            )
        return shards, tp_size // shards


@dataclass(frozen=True, slots=True)
class CopyRun:
    """A strided copy between a rank's page and the canonical page; offsets are in bytes from the start of each.

    Attributes:
        local_offset: Offset of the first fragment in the rank's page.
        canonical_offset: Offset of the first fragment in the canonical page.
        length: Bytes of a fragment.
        count: Number of fragments.
        local_stride: Distance between fragments in the rank's page.
        canonical_stride: The same in the canonical page.
    """

    local_offset: int
    canonical_offset: int
    length: int
    count: int = 1
    local_stride: int = 0
    canonical_stride: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all fragments."""
        return self.count * self.length

    def fragments(self) -> Iterator[tuple[int, int, int]]:
        """Yield local offset, canonical offset and length of each fragment."""
        for i in range(self.count):
            yield (
                self.local_offset + i * self.local_stride,
                self.canonical_offset + i * self.canonical_stride,
                self.length,
            )


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The copies of one rank for one layer.

    Attributes:
        layer: Name of the layer.
        runs: Copies of one block; they cover the rank's page exactly.
        local_bytes: Length of the rank's page, without padding.
        block_bytes: Length of the canonical page, and distance between blocks within a slot.
        slot_offset: Offset of the canonical page of the slot's first block.
        writers: Ranks that hold the same bytes.
        writer_index: This rank's index among them.
    """

    layer: str
    runs: tuple[CopyRun, ...]
    local_bytes: int
    block_bytes: int
    slot_offset: int
    writers: int
    writer_index: int

    @property
    def turn(self) -> tuple[int, int]:
        """Number of ranks that take turns storing the layer, and this rank's index."""
        return self.writers, self.writer_index


def attention_layer(
    name: str,
    *,
    kv_heads: int,
    key_bytes: int,
    value_bytes: int | None = None,
    block_tokens: int,
    order: PageOrder | str = PageOrder.HND,
    split: bool = False,
) -> LayerLayout:
    """Describe a layer of multi-head, grouped-query or multi-query attention, full or with a sliding window.

    Args:
        name: Name of the layer.
        kv_heads: KV heads under tensor parallel size 1.
        key_bytes: Bytes of the key of one head and token: head size times bytes of an element.
        value_bytes: The same for the value; by default equal to ``key_bytes``.
        block_tokens: Tokens per block.
        order: Order of the axes in the page.
        split: Whether all keys precede all values; otherwise key and value of a head and token are adjacent.
    """
    order = PageOrder(order)
    value_bytes = key_bytes if value_bytes is None else value_bytes
    widths = [key_bytes, value_bytes] if split else [key_bytes + value_bytes]
    parts = [PagePart(block_tokens, w) if order is PageOrder.NHD else PagePart(1, block_tokens * w) for w in widths]
    if kv_heads < 1:
        raise ConfigError(f"Layer {name!r} has {kv_heads} KV heads. Expected at least 1.")
    return LayerLayout(name, f"{order}-{'split' if split else 'packed'}", kv_heads, tuple(parts))


def latent_layer(name: str, *, token_bytes: int, block_tokens: int) -> LayerLayout:
    """Describe a layer of latent attention (MLA): one vector of ``token_bytes`` per token, the same on every rank."""
    return LayerLayout(name, "latent", 1, (PagePart(1, block_tokens * token_bytes),))


def opaque_layer(name: str, *, page_bytes: int) -> LayerLayout:
    """Describe a layer whose page has an unknown structure: each rank has its own ``page_bytes`` in the slot.

    A layout with such a layer is not :attr:`KVLayout.portable`.
    """
    return LayerLayout(name, "opaque", 0, (PagePart(1, page_bytes),))


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
