"""Records on their way to and from slots: header pages, buffers that direct I/O can take, transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.backends.base import RecordRead, RecordWrite
from kvstore.backends.nvme.free_slots import SLAB_SHIFT, SlotId
from kvstore.backends.nvme.layout import PAGE, Descriptor, decode_descriptor, encode_descriptor
from kvstore.backends.nvme.pages import PagePool, aligned_buffer, is_direct
from kvstore.backends.nvme.slab import Slab
from kvstore.diskio import flat
from kvstore.diskio.transfers import Transfer
from kvstore.types import BlockKey

__all__ = ["ReadOp", "RecordMover", "WriteOp"]

_SLOT_MASK: Final = (1 << SLAB_SHIFT) - 1


@dataclass(slots=True, eq=False)
class WriteOp:
    """A record on its way into a slot; ``transfer`` tells what became of it."""

    key: BlockKey
    slot: SlotId
    size_bytes: int
    page: memoryview
    transfer: Transfer


@dataclass(slots=True, eq=False)
class ReadOp:
    """A record on its way out of a slot; ``transfer`` tells what became of it.

    Attributes:
        read: What was asked for.
        index: Its place in the batch.
        slot: Where it is thought to be.
        size_bytes: Length that it is thought to have.
        page: Header page.
        bounce: Where the payload goes if the target is not fit for direct I/O; empty otherwise.
        transfer: The read.
    """

    read: RecordRead
    index: int
    slot: SlotId
    size_bytes: int
    page: memoryview
    bounce: memoryview
    transfer: Transfer


class RecordMover:
    """Makes transfers of records and looks at what they brought. Used from the loop thread.

    Args:
        slabs: Where the slots are.
        digest: Namespace digest of the engine.
        header_bytes: Length of the records' own headers, which lie in the header page.
    """

    def __init__(self, slabs: Sequence[Slab], digest: bytes, header_bytes: int) -> None:
        self._slabs = slabs
        self._digest = digest
        self._header_bytes = header_bytes
        self._pages = PagePool()

    def writes(self, records: Sequence[RecordWrite], slots: Sequence[SlotId]) -> list[WriteOp]:
        """Return what puts records into slots."""
        return [
            self._write(record, slot, page)
            for record, slot, page in zip(records, slots, self._pages.take(len(slots)), strict=True)
        ]

    def reads(self, wanted: Sequence[tuple[int, RecordRead, SlotId, int]]) -> list[ReadOp]:
        """Return what gets records (place in the batch, record, slot, length) out of slots."""
        pages = self._pages.take(len(wanted))
        return [
            self._read(index, read, slot, size, page)
            for (index, read, slot, size), page in zip(wanted, pages, strict=True)
        ]

    def wipe(self, slot: SlotId) -> Transfer:
        """Return what makes a slot empty for every later scan."""
        return self._transfer(slot, [aligned_buffer(PAGE)])

    def descriptor(self, op: ReadOp) -> Descriptor | None:
        """Return which record a read has found; None if that can't be told."""
        return decode_descriptor(op.page, self._slabs[op.slot >> SLAB_SHIFT].superblock.slab_id, op.slot & _SLOT_MASK)

    def deliver(self, op: ReadOp) -> None:
        """Bring what was read to where it was asked for, and say how much it is."""
        found = max(0, op.transfer.done_bytes - PAGE) + self._header_bytes
        filled = min(op.size_bytes, found) if op.transfer.done_bytes >= self._header_bytes else 0
        # The header shares its page with our descriptor, so it is copied: 256 bytes.
        left = _fill(op.read.buffers, 0, op.page[: min(filled, self._header_bytes)])
        if op.bounce.nbytes and filled > self._header_bytes:
            _fill(op.read.buffers, left, op.bounce[: filled - self._header_bytes])
        op.read.filled_bytes = filled

    def release(self, ops: Sequence[WriteOp] | Sequence[ReadOp]) -> None:
        """Give back the pages of transfers that have ended."""
        self._pages.give_back([op.page for op in ops])

    def _write(self, record: RecordWrite, slot: SlotId, page: memoryview) -> WriteOp:
        header_bytes = self._header_bytes
        size_bytes = record.size_bytes
        head, *rest = record.buffers
        if head.nbytes == header_bytes and all(is_direct(b) for b in rest):
            page[:header_bytes] = head.cast("B") if head.format != "B" else head
        else:
            # Memory that direct I/O can't take (odd address or length) is copied; slots of a primary tier are fit.
            whole = b"".join(flat(record.buffers))
            page[:header_bytes] = whole[:header_bytes].ljust(header_bytes, b"\0")
            rest = []
            if size_bytes > header_bytes:
                bounce = aligned_buffer(size_bytes - header_bytes)
                bounce[: size_bytes - header_bytes] = whole[header_bytes:]
                rest = [bounce]
        slab = self._slabs[slot >> SLAB_SHIFT]
        descriptor = Descriptor(slab.superblock.epoch, size_bytes, self._digest, record.key)
        encode_descriptor(page, slab.superblock.slab_id, slot & _SLOT_MASK, header_bytes, descriptor)
        return WriteOp(record.key, slot, size_bytes, page, self._transfer(slot, [page, *rest]))

    def _read(self, index: int, read: RecordRead, slot: SlotId, size_bytes: int, page: memoryview) -> ReadOp:
        payload_bytes = -(-max(0, size_bytes - self._header_bytes) // PAGE) * PAGE
        bounce = memoryview(b"")
        targets: list[memoryview] = []
        if payload_bytes:
            head, *rest = read.buffers
            if (
                head.nbytes == self._header_bytes
                and len(rest) == 1
                and is_direct(rest[0])
                and rest[0].nbytes >= payload_bytes
            ):
                target = flat(rest)[0]
                targets = [target if target.nbytes == payload_bytes else target[:payload_bytes]]
            else:
                bounce = aligned_buffer(payload_bytes)
                targets = [bounce]
        return ReadOp(read, index, slot, size_bytes, page, bounce, self._transfer(slot, [page, *targets]))

    def _transfer(self, slot: SlotId, buffers: list[memoryview]) -> Transfer:
        slab = self._slabs[slot >> SLAB_SHIFT]
        return Transfer(slab.fd, slab.offset_of(slot & _SLOT_MASK), buffers, sum(b.nbytes for b in buffers))


def _fill(buffers: Sequence[memoryview], start: int, content: memoryview) -> int:
    """Copy content into buffers from a position on; return the position behind it."""
    at, end = 0, start + content.nbytes
    for buffer in flat(buffers):
        low, high = max(start, at), min(end, at + buffer.nbytes)
        if low < high:
            buffer[low - at : high - at] = content[low - start : high - start]
        at += buffer.nbytes
    return end
