"""Records on their way to and from slots: header pages, buffers that direct I/O can take, transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.backends.base import RecordRead, RecordWrite
from kvstore.backends.nvme.free_slots import SLAB_SHIFT, SlotId
from kvstore.backends.nvme.layout import PAGE, Descriptor, decode_descriptor, encode_descriptor, is_named
from kvstore.backends.nvme.pages import Page, PagePool, aligned_buffer
from kvstore.backends.nvme.slab import Slab
from kvstore.diskio import flat
from kvstore.diskio.transfers import Transfer
from kvstore.diskio.uring.memory import address_of
from kvstore.types import BlockKey

__all__ = ["ReadOp", "RecordMover", "WriteOp"]

_SLOT_MASK: Final = (1 << SLAB_SHIFT) - 1


@dataclass(slots=True, eq=False)
class WriteOp:
    """A record on its way into a slot; ``transfer`` tells what became of it."""

    key: BlockKey
    slot: SlotId
    size_bytes: int
    page: Page
    transfer: Transfer

    @property
    def failure(self) -> OSError | None:
        """Why it is not all there; None if it is."""
        done, size = self.transfer.done_bytes, self.transfer.size_bytes
        return self.transfer.error or (None if done == size else OSError(f"{done} of {size} bytes were written"))


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
    page: Page
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
        return self._transfer(slot, Page.of(aligned_buffer(PAGE)), (), ())

    def descriptor_of_another(self, op: ReadOp) -> Descriptor | None:
        """Return which record a read has found if that can be told and is not plainly the one that was asked for."""
        if is_named(op.page.view, self._digest, op.read.key):
            return None
        slab_id = self._slabs[op.slot >> SLAB_SHIFT].superblock.slab_id
        return decode_descriptor(op.page.view, slab_id, op.slot & _SLOT_MASK)

    def deliver(self, op: ReadOp) -> None:
        """Bring what was read to where it was asked for, and say how much it is."""
        header_bytes, page = self._header_bytes, op.page.view
        found = max(0, op.transfer.done_bytes - PAGE) + header_bytes
        filled = min(op.size_bytes, found) if op.transfer.done_bytes >= header_bytes else 0
        # The header shares its page with our descriptor, so it is copied: 256 bytes.
        head = op.read.buffers[0]
        if filled >= header_bytes == head.nbytes and not op.bounce.nbytes and head.format == "B":
            head[:] = page[:header_bytes]
        else:
            left = _fill(op.read.buffers, 0, page[: min(filled, header_bytes)])
            if op.bounce.nbytes and filled > header_bytes:
                _fill(op.read.buffers, left, op.bounce[: filled - header_bytes])
        op.read.filled_bytes = filled

    def release(self, ops: Sequence[WriteOp] | Sequence[ReadOp]) -> None:
        """Give back the pages of transfers that have ended."""
        self._pages.give_back([op.page for op in ops])

    def _write(self, record: RecordWrite, slot: SlotId, page: Page) -> WriteOp:
        header_bytes, view = self._header_bytes, page.view
        head, *rest = record.buffers
        size_bytes = head.nbytes + sum([b.nbytes for b in rest])
        addresses = _direct_addresses(rest) if head.nbytes == header_bytes else None
        if addresses is not None:
            view[:header_bytes] = head.cast("B") if head.format != "B" else head
        else:
            # Memory that direct I/O can't take (odd address or length) is copied; slots of a primary tier are fit.
            whole = b"".join(flat(record.buffers))
            view[:header_bytes] = whole[:header_bytes].ljust(header_bytes, b"\0")
            rest = []
            if size_bytes > header_bytes:
                bounce = aligned_buffer(size_bytes - header_bytes)
                bounce[: size_bytes - header_bytes] = whole[header_bytes:]
                rest = [bounce]
            addresses = [address_of(b) for b in rest]
        superblock = self._slabs[slot >> SLAB_SHIFT].superblock
        encode_descriptor(
            view, superblock.slab_id, slot & _SLOT_MASK, header_bytes, superblock.epoch, size_bytes, self._digest,
            record.key,
        )  # fmt: skip
        return WriteOp(record.key, slot, size_bytes, page, self._transfer(slot, page, rest, addresses))

    def _read(self, index: int, read: RecordRead, slot: SlotId, size_bytes: int, page: Page) -> ReadOp:
        payload_bytes = -(-max(0, size_bytes - self._header_bytes) // PAGE) * PAGE
        bounce = memoryview(b"")
        targets: list[memoryview] = []
        addresses: list[int] = []
        if payload_bytes:
            head, *rest = read.buffers
            fits = head.nbytes == self._header_bytes and len(rest) == 1 and rest[0].nbytes >= payload_bytes
            if fits and (direct := _direct_addresses(rest)) is not None:
                target = flat(rest)[0]
                targets = [target if target.nbytes == payload_bytes else target[:payload_bytes]]
                addresses = direct
            else:
                bounce = aligned_buffer(payload_bytes)
                targets, addresses = [bounce], [address_of(bounce)]
        transfer = self._transfer(slot, page, targets, addresses)
        return ReadOp(read, index, slot, size_bytes, page, bounce, transfer)

    def _transfer(self, slot: SlotId, page: Page, payload: Sequence[memoryview], addresses: Sequence[int]) -> Transfer:
        slab = self._slabs[slot >> SLAB_SHIFT]
        size_bytes = PAGE + sum([b.nbytes for b in payload])
        offset = slab.offset_of(slot & _SLOT_MASK)
        return Transfer(slab.fd, offset, [page.view, *payload], size_bytes, addresses=[page.address, *addresses])


def _direct_addresses(buffers: Sequence[memoryview]) -> list[int] | None:
    """Return where buffers lie, or None if direct I/O does not take one of them as it lies."""
    addresses = []
    for buffer in buffers:
        if buffer.nbytes % PAGE or not buffer.nbytes:
            return None
        addresses.append(address_of(buffer))
        if addresses[-1] % PAGE:
            return None
    return addresses


def _fill(buffers: Sequence[memoryview], start: int, content: memoryview) -> int:
    """Copy content into buffers from a position on; return the position behind it."""
    at, end = 0, start + content.nbytes
    for buffer in flat(buffers):
        low, high = max(start, at), min(end, at + buffer.nbytes)
        if low < high:
            buffer[low - at : high - at] = content[low - start : high - start]
        at += buffer.nbytes
    return end
