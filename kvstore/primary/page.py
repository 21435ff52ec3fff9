"""The page of a layer: the bytes of one block under tensor parallel size 1, and each rank's share of them.

**Page.** A layer keeps the KV cache of one block in one page. As a C-ordered array, every page in use by engines is a
sequence of parts, and each part has the heads on one axis::

    part = [repeats][heads][head_bytes]        # length repeats * heads * head_bytes

With ``B`` tokens per block, and ``k`` and ``v`` bytes of key and value per head and token:

=======  =========================  ==================================
order    K and V together           K half, then V half
=======  =========================  ==================================
NHD      ``(B, k + v)``             ``(B, k)``, ``(B, v)``
HND      ``(1, B * (k + v))``       ``(1, B * k)``, ``(1, B * v)``
=======  =========================  ==================================

**Ranks.** Tensor parallel size ``T`` splits ``H`` KV heads into ``S = min(T, H)`` shards of ``h = H / S`` heads. Each
shard lies on ``R = T / S`` ranks: rank ``r`` has shard ``s = r // R`` (Megatron's grouped-query attention, and
``QKVParallelLinear`` of vLLM: ``shard_id = tp_rank // num_kv_head_replicas``). Latent attention (MLA) keeps one vector
per token for all heads: ``H = 1``, so every rank holds the whole page.

**Run.** A part begins at offset ``a`` in the rank's page and at ``c`` in the canonical page. Of its ``repeats``
fragments, rank ``r`` copies fragment ``i`` as follows::

    local      a + i * h * head_bytes                            length h * head_bytes
    canonical  c + i * H * head_bytes + s * h * head_bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvstore.errors import ConfigError


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
        if self.portable and shards > 1:
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
