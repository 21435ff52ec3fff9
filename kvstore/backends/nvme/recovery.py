"""Recovery: the headers of all slots are read, and the index is made to say what they say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.backends.nvme.free_slots import SLAB_SHIFT, SlotId
from kvstore.backends.nvme.index import Index, is_own
from kvstore.backends.nvme.layout import PAGE, Descriptor, decode_descriptor
from kvstore.backends.nvme.pages import aligned_buffer
from kvstore.backends.nvme.slab import Slab
from kvstore.diskio import Priority
from kvstore.diskio.transfers import Transfer, TransferEngine
from kvstore.types import BlockKey

__all__ = ["Recovery", "RecoveryCounts"]

_log = logging.getLogger("kvstore.backends.nvme")

_BATCH_SLOTS: Final = 256
"""Headers read at once: keeps a drive's queue full, and costs the loop about a millisecond."""


@dataclass(slots=True)
class RecoveryCounts:
    """What a scan has found so far.

    Attributes:
        scanned: Slots looked at.
        confirmed: Blocks that were where the snapshot said.
        found: Blocks that the snapshot did not know.
        lost: Blocks that were not where the snapshot said.
        unreadable: Slots whose header could not be read; they are left alone.
    """

    scanned: int = 0
    confirmed: int = 0
    found: int = 0
    lost: int = 0
    unreadable: int = 0


class Recovery:
    """Scans slabs that were not closed cleanly.

    Until a slot has been looked at nothing is stored in it, unless the snapshot named a block in it that has been
    evicted or removed since: of such a slot the scan believes nothing.

    Args:
        engine: Does the reading.
        index: What is corrected.
        slabs: All slabs.
        on_lost: Told of blocks that turn out not to be there.
    """

    def __init__(
        self,
        engine: TransferEngine,
        index: Index,
        slabs: Sequence[Slab],
        on_lost: Callable[[Sequence[BlockKey]], None],
    ) -> None:
        self.counts = RecoveryCounts()
        self._engine = engine
        self._index = index
        self._slabs = slabs
        self._on_lost = on_lost

    async def run(self, dirty: Sequence[int]) -> None:
        """Scan the slabs of these numbers; the index has noted what was touched since it was opened."""
        buffer = aligned_buffer(_BATCH_SLOTS * PAGE)
        pages = [buffer[i : i + PAGE] for i in range(0, buffer.nbytes, PAGE)]
        try:
            # The drives are scanned side by side in steps, which is enough: a step keeps one drive's queue full.
            for number in dirty:
                slots = self._slabs[number].superblock.slots
                for start in range(0, slots, _BATCH_SLOTS):
                    await self._scan(number, range(start, min(slots, start + _BATCH_SLOTS)), pages)
        finally:
            self._index.touched_while_scanning = None
        _log.info("recovery has ended: %s", self.counts)

    async def _scan(self, number: int, slots: range, pages: Sequence[memoryview]) -> None:
        slab = self._slabs[number]
        reads = [
            Transfer(slab.fd, slab.offset_of(slot), [page], PAGE) for slot, page in zip(slots, pages, strict=False)
        ]
        await self._engine.read(reads, Priority.STORE)
        lost: list[bytes] = []
        touched = self._index.touched_while_scanning or ()
        for slot, read in zip(slots, reads, strict=True):
            slot_id = (number << SLAB_SHIFT) + slot
            self.counts.scanned += 1
            if slot_id in touched:
                continue
            if read.done_bytes != PAGE:
                self.counts.unreadable += 1
                self._drop(slot_id, lost)
                continue
            self._judge(slot_id, decode_descriptor(read.buffers[0], slab.superblock.slab_id, slot), lost)
        self.counts.lost += len(lost)
        # A block that has been found elsewhere by now is not lost.
        still = [name for name in lost if is_own(name) and name not in self._index]
        if still:
            self._on_lost(still)
        # The loop belongs to others too.
        await asyncio.sleep(0)

    def _judge(self, slot: SlotId, descriptor: Descriptor | None, lost: list[bytes]) -> None:
        index = self._index
        thought = index.name_in(slot)
        if descriptor is None or descriptor.record_bytes > self._record_bytes_max(slot):
            self._drop(slot, lost)
            index.retire(slot)
            return
        name, namespace = index.name_of(descriptor.namespace_digest, descriptor.key)
        if thought == name:
            self.counts.confirmed += 1
            return
        self._drop(slot, lost)
        elsewhere = index.find(name)
        if elsewhere is not None:
            # The copy whose slot has not been proved yet may be stale; this one is not.
            if elsewhere < slot or elsewhere in (index.touched_while_scanning or ()):
                index.retire(slot)
                return
            index.remove(name)
            (index.touched_while_scanning or set()).discard(elsewhere)
        index.add(name, slot, descriptor.record_bytes, namespace)
        self.counts.found += 1

    def _drop(self, slot: SlotId, lost: list[bytes]) -> None:
        """Forget what the snapshot says of a slot."""
        thought = self._index.name_in(slot)
        if thought is not None and self._index.find(thought) == slot:
            self._index.remove(thought)
            lost.append(thought)

    def _record_bytes_max(self, slot: SlotId) -> int:
        return self._slabs[slot >> SLAB_SHIFT].superblock.slot_bytes
