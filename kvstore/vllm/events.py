"""KV cache events: one statement per block, medium and locality, and payloads that outlive the engine.

Payloads are parent, length and tokens of a block, in the form of vLLM's event tracker. While an engine runs, vLLM has
those of the blocks that it computed or loaded. Tiers on a local disk keep them, and return them to vLLM when the next
engine reports the blocks that it found on the disk.
"""

from __future__ import annotations

import dataclasses
import struct
from collections import Counter
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, Final

import msgspec
from vllm.v1.kv_offload.base import Locality as VllmLocality
from vllm.v1.kv_offload.base import OffloadingEvent

from kvstore.tiers import AsyncTier
from kvstore.types import BlockKey, Locality, Medium
from kvstore.vllm.compat import event_payloads, payload_maker
from kvstore.vllm.connector import EngineContext

_GROUP_BYTES: Final = 4
"""Length of the group's number, at the end of a key."""


class _Kept(msgspec.Struct, array_like=True):
    """Lineage of a key, as kept by a tier. A key may stand for several of vLLM's blocks."""

    parent: bytes  # Hash of the preceding block; empty for the first block of a prompt.
    block_tokens: int  # Tokens per block.
    hashes: list[bytes]  # Hashes of the blocks except the last one, whose hash is in the key.


class _Secret(msgspec.Struct, array_like=True):
    """Further lineage that is only kept by tiers with encryption."""

    tokens: bytes  # Token ids, 4 bytes each, little-endian.
    lora_name: str | None  # Name of the adapter.


_encode: Final = msgspec.msgpack.Encoder().encode
_NO_SECRET: Final = _Secret(b"", None)
_read_kept: Final = msgspec.msgpack.Decoder(_Kept).decode
_read_secret: Final = msgspec.msgpack.Decoder(_Secret).decode


class Lineage:
    """Moves payloads between vLLM's tracker and the tiers. Does nothing unless events are self-describing.

    ``tag_bytes``: length of the tag that precedes vLLM's key in ours.
    """

    def __init__(self, tiers: Iterable[AsyncTier], engine: EngineContext, tag_bytes: int = 0) -> None:
        self._tag_bytes = tag_bytes
        self._engine = engine
        self._kept: dict[str, set[BlockKey]] = {}
        """Blocks with lineage in each tier."""
        self._passing: list[BlockKey] = []
        self._payloads: MutableMapping[BlockKey, Any] | None = None
        """vLLM's payloads; None until vLLM has made its tracker, and unless events are self-describing."""
        self._make: Callable[..., Any] | None = None
        tiers = list(tiers)
        media = Counter(tier.medium for tier in tiers)
        self._copied = {tier.name for tier in tiers if media[tier.medium] > 1}
        """Tiers that share their medium. vLLM drops a payload at the first removal from any of them."""
        for tier in tiers:
            if tier.medium is Medium.STORAGE and tier.locality is Locality.LOCAL:
                self._kept[tier.name] = set()

    def begin(self) -> None:
        """Begin a report of events.

        Drops the payloads without tokens that were restored for the last report, because vLLM would not replace them
        with complete ones.
        """
        passing, self._passing = self._passing, []
        if self._payloads is None:
            scheduler = self._engine.scheduler
            if scheduler is not None and (payloads := event_payloads(scheduler)) is not None:
                self._payloads, self._make = payloads, payload_maker(scheduler)
        payloads = self._payloads
        if payloads is None:
            return
        for key in passing:
            payload = payloads.get(key)
            if payload is not None and not payload.token_ids:
                del payloads[key]

    def note(self, tier: AsyncTier, keys: Sequence[BlockKey], *, removed: bool) -> None:
        """Store the payloads of blocks about to be reported as stored, and restore those of an earlier engine."""
        kept, payloads = self._kept.get(tier.name), self._payloads
        if payloads is None:
            return
        if tier.name in self._copied:
            self._hold(tier.name, keys, payloads, removed=removed)
        if kept is None:
            return
        if removed:
            kept.difference_update(keys)
            return
        tag_bytes = self._tag_bytes
        for key in keys:
            if key[tag_bytes:] not in payloads:
                self._restore(tier, key, payloads)
        new = [key for key in keys if key not in kept and key[tag_bytes:] in payloads]
        if new:
            kept.update(new)
            found = [payloads[key[tag_bytes:]] for key in new]
            # Comprehensions for speed: this runs on the scheduler's thread for each stored block.
            lineage = [_encode((p.parent_block_hash or b"", p.block_size, p.block_hashes[:-1])) for p in found]
            secrets = [b""] * len(new)
            if tier.may_encrypt:
                secrets = [_encode((struct.pack(f"<{len(p.token_ids)}I", *p.token_ids), p.lora_name)) for p in found]
            tier.keep_lineage(new, lineage, secrets)

    def _hold(
        self, name: str, keys: Sequence[BlockKey], payloads: MutableMapping[BlockKey, Any], *, removed: bool
    ) -> None:
        """Make vLLM keep the payloads of blocks while this tier has them."""
        for key in keys:
            payload = payloads.get(key[self._tag_bytes :])
            if payload is not None:
                holders = payload.active_residencies
                (holders.discard if removed else holders.add)((name, None))

    def _restore(self, tier: AsyncTier, key: BlockKey, payloads: MutableMapping[BlockKey, Any]) -> None:
        """Restore the payload of a block kept by an earlier engine to vLLM, if there is one."""
        found = tier.take_lineage(key)
        if found is None or self._make is None:
            return
        try:
            kept = _read_kept(found[0])
            secret = _read_secret(found[1]) if found[1] else _NO_SECRET
        except msgspec.MsgspecError:
            return
        theirs = key[self._tag_bytes :]
        hashes, parent = (*kept.hashes, theirs[:-_GROUP_BYTES]), kept.parent
        tokens: tuple[int, ...] = ()
        if len(secret.tokens) == 4 * kept.block_tokens * len(hashes):
            tokens = struct.unpack(f"<{len(secret.tokens) // 4}I", secret.tokens)
        else:
            # Reported as one block: this payload is dropped again, so vLLM will report the removal of one block.
            parent, hashes = (parent, *hashes)[-2], hashes[-1:]
            self._passing.append(theirs)
        try:
            payload = self._make(
                int.from_bytes(key[-_GROUP_BYTES:], "big"),
                block_hashes=hashes,
                parent_block_hash=parent or None,
                token_ids=tokens,
                block_size=kept.block_tokens,
                lora_name=secret.lora_name,
            )
        except IndexError:
            return  # Kept for a model with other groups of layers.
        payloads[theirs] = payload
        self._kept[tier.name].add(key)


_Nature = tuple[Any, Any, str | None]
"""vLLM's medium, locality and ownership."""


class Statements:
    """Merges the events of several tiers.

    A block that two tiers of one medium and locality hold, or that two tenants hold under one name of vLLM's, is
    reported as stored by the first and as removed by the last. Dynamo's index would forget it at the first removal.

    Args:
        natures: Medium and locality of each tier, the primary one included.
        all_shared: Whether one tier may hold several blocks of one name.
    """

    def __init__(self, natures: Iterable[tuple[Any, Any]], *, all_shared: bool = False) -> None:
        self._all_shared = all_shared
        self._shared = {nature for nature, tiers in Counter(natures).items() if tiers > 1}
        self._copies: dict[_Nature, dict[bytes, dict[str, int]]] = {}
        """Copies of each stated block by tier."""

    def merge(self, events: Iterable[tuple[str, OffloadingEvent]]) -> list[OffloadingEvent]:
        """Return the statements to publish; none for a copy of a block already stated, or not the last to leave.

        ``events``: events, each with the name of its tier, which can only remove its own copies.
        """
        if not (self._shared or self._all_shared):
            return [event for _, event in events]
        merged = []
        for tier, event in events:
            # The events of a primary tier have no locality.
            locality = event.locality or VllmLocality.LOCAL
            if self._all_shared or (event.medium, locality) in self._shared:
                copies = self._copies.setdefault((event.medium, locality, getattr(event, "ownership", None)), {})
                count = self._removed if event.removed else self._stored
                event = dataclasses.replace(event, keys=[key for key in event.keys if count(copies, key, tier)])
            if event.keys:
                merged.append(event)
        return merged

    def clear(self) -> None:
        """Note that consumers have dropped all blocks."""
        self._copies.clear()

    def _stored(self, copies: dict[bytes, dict[str, int]], key: bytes, tier: str) -> bool:
        """Count a copy; return whether it is the first. Without tenants and adapters, a tier has one at most."""
        by_tier = copies.setdefault(key, {})
        is_first = not by_tier
        by_tier[tier] = by_tier.get(tier, 0) + 1 if self._all_shared else 1
        return is_first

    @staticmethod
    def _removed(copies: dict[bytes, dict[str, int]], key: bytes, tier: str) -> bool:
        """Drop a copy; return whether it was the last."""
        by_tier = copies.get(key)
        if by_tier is None or tier not in by_tier:
            return False
        by_tier[tier] -= 1
        if not by_tier[tier]:
            del by_tier[tier]
        if by_tier:
            return False
        del copies[key]
        return True
