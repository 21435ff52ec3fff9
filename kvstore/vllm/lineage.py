"""Payloads of events across restarts: parent, length and tokens of a block, as vLLM's tracker of events has them.

While an engine runs, vLLM knows the payloads of blocks that it has computed or loaded. They are kept in the tiers on a
local disk, and given back to vLLM when the next engine reports the blocks that it has found there.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from kvstore.tiers import AsyncTier
from kvstore.types import BlockKey, Locality, Medium
from kvstore.vllm.compat import current_connector_scheduler, event_payloads, payload_maker

__all__ = ["Lineage"]

_GROUP_BYTES: Final = 4
"""Length of the group's number, at the end of a key."""


class _Kept(msgspec.Struct, array_like=True):
    """What a tier keeps of a block.

    Attributes:
        parent: Hash of the block before; empty for the first one of a prompt.
        block_tokens: Tokens of each block.
        hashes: Of the blocks before the last one, whose hash is in the key; a key may stand for several blocks.
    """

    parent: bytes
    block_tokens: int
    hashes: list[bytes]


class _Secret(msgspec.Struct, array_like=True):
    """What only a tier that encrypts keeps.

    Attributes:
        tokens: Token ids, 4 bytes each, little-endian.
        lora_name: Name of the adapter.
    """

    tokens: bytes
    lora_name: str | None


_encode: Final = msgspec.msgpack.Encoder().encode
_NO_SECRET: Final = _Secret(b"", None)
_read_kept: Final = msgspec.msgpack.Decoder(_Kept).decode
_read_secret: Final = msgspec.msgpack.Decoder(_Secret).decode


class Lineage:
    """Moves payloads between vLLM's tracker and the tiers. Does nothing unless events are self-describing.

    Made under construction of vLLM's connector, in whose frames it finds the tracker's owner.

    Args:
        tiers: The tiers.
        tag_bytes: Length of what our keys have before vLLM's.
    """

    def __init__(self, tiers: Iterable[AsyncTier], tag_bytes: int = 0) -> None:
        self._tag_bytes = tag_bytes
        scheduler = current_connector_scheduler()
        self._scheduler = None if scheduler is None else weakref.ref(scheduler)
        self._kept: dict[str, set[BlockKey]] = {}
        """Blocks whose lineage each tier has."""
        self._passing: list[BlockKey] = []
        self._payloads: MutableMapping[BlockKey, Any] | None = None
        """vLLM's, which makes its tracker after the manager; None unless events are self-describing."""
        self._make: Callable[..., Any] | None = None
        for tier in tiers:
            tier.set_parents(partial(self.parent_of, tier))
            if tier.medium is Medium.STORAGE and tier.locality is Locality.LOCAL:
                self._kept[tier.name] = set()

    def begin(self) -> None:
        """Note the begin of a report.

        Payloads without tokens that the last one needed are forgotten: vLLM would not replace them by better ones.
        """
        passing, self._passing = self._passing, []
        if self._payloads is None:
            scheduler = None if self._scheduler is None else self._scheduler()
            if scheduler is not None and (payloads := event_payloads(scheduler)) is not None:
                self._payloads, self._make = payloads, payload_maker(scheduler)
        payloads = self._payloads
        if payloads is None:
            return
        for key in passing:
            payload = payloads.get(key)
            if payload is not None and not payload.token_ids:
                del payloads[key]

    def parent_of(self, tier: AsyncTier | None, key: BlockKey) -> BlockKey | None:
        """Return the block before a block; None if there is none or it is unknown."""
        payloads = self._payloads
        if payloads is None:
            return None
        tag_bytes = self._tag_bytes
        payload = payloads.get(key[tag_bytes:])
        if payload is None and tier is not None:
            payload = self._restore(tier, key, payloads)
        if payload is None or payload.parent_block_hash is None:
            return None
        parent: bytes = key[:tag_bytes] + payload.parent_block_hash + key[-_GROUP_BYTES:]
        return parent

    def note(self, tier: AsyncTier, keys: Sequence[BlockKey], *, removed: bool) -> None:
        """Keep the payloads of blocks that are reported as stored, unless the tier has them already."""
        kept, payloads = self._kept.get(tier.name), self._payloads
        if kept is None or payloads is None:
            return
        if removed:
            kept.difference_update(keys)
            return
        tag_bytes = self._tag_bytes
        new = [key for key in keys if key not in kept and key[tag_bytes:] in payloads]
        if new:
            kept.update(new)
            found = [payloads[key[tag_bytes:]] for key in new]
            # By comprehensions: this runs on the scheduler's thread, for each block that is stored.
            lineage = [_encode((p.parent_block_hash or b"", p.block_size, p.block_hashes[:-1])) for p in found]
            secrets = [b""] * len(new)
            if tier.may_encrypt:
                secrets = [_encode((_packed(p.token_ids), p.lora_name)) for p in found]
            tier.keep_lineage(new, lineage, secrets)

    def _restore(self, tier: AsyncTier, key: BlockKey, payloads: MutableMapping[BlockKey, Any]) -> Any:
        """Give vLLM the payload that an earlier engine kept of a block; None if there is none."""
        found = tier.take_lineage(key)
        if found is None or self._make is None:
            return None
        try:
            kept = _read_kept(found[0])
            secret = _read_secret(found[1]) if found[1] else _NO_SECRET
        except msgspec.MsgspecError:
            return None
        theirs = key[self._tag_bytes :]
        hashes, parent = [*kept.hashes, theirs[:-_GROUP_BYTES]], kept.parent
        tokens = _tokens(secret.tokens)
        if len(tokens) != kept.block_tokens * len(hashes):
            # Stated as one block: vLLM, which forgets this payload again, will state the removal of one.
            parent = [parent, *hashes][-2]
            tokens, hashes = (), hashes[-1:]
            self._passing.append(theirs)
        try:
            payload = self._make(
                int.from_bytes(key[-_GROUP_BYTES:], "big"),
                block_hashes=tuple(hashes),
                parent_block_hash=parent or None,
                token_ids=tokens,
                block_size=kept.block_tokens,
                lora_name=secret.lora_name,
            )
        except IndexError:
            return None  # Of a model with other groups of layers.
        payloads[theirs] = payload
        if tier.name in self._kept:
            self._kept[tier.name].add(key)
        return payload


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _tokens(packed: bytes) -> tuple[int, ...]:
    return () if len(packed) % 4 else struct.unpack(f"<{len(packed) // 4}I", packed)
