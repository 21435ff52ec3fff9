"""Records on their way to and from slots: header pages, buffers that direct I/O can take, transfers."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.backends.base import RecordRead, RecordWrite
from kvstore.backends.disk.layout import PAGE, decode_descriptor, encode_descriptor, names_block
from kvstore.diskio import flat
from kvstore.diskio.transfers import Transfer
from kvstore.diskio.uring.memory import address_of
from kvstore.types import BlockKey

__all__ = ["Page", "ReadOp", "RecordMover", "WriteOp", "aligned_buffer"]

_CHUNK_PAGES: Final = 256


class Page(NamedTuple):
    """A page of memory, and its address, which is asked for once and used for every transfer."""

    view: memoryview
    address: int


@dataclass(slots=True, eq=False)
class WriteOp:
    """A record on its way into a slot; ``transfer`` tells what became of it."""

    key: BlockKey
    digest: int
    slot: int
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
        place: Slot, and owner above it.
        size_bytes: Length that it is thought to have; 0: unknown, the whole slot is read.
        page: Header page.
        bounce: Where the payload goes if the target is not fit for direct I/O; empty otherwise.
        transfer: The read.
    """

    read: RecordRead
    index: int
    place: int
    size_bytes: int
    page: Page
    bounce: memoryview
    transfer: Transfer


class RecordMover:
    """Makes transfers of records and looks at what they brought. Used from the loop thread.

    Args:
        owner: Number of the owner that writes.
        digest: Namespace digest of the engine.
        header_bytes: Length of the records' own headers, which lie in the header page.
    """

    def __init__(self, owner: int, digest: bytes, header_bytes: int) -> None:
        self._owner = owner
        self._digest = digest
        self._header_bytes = header_bytes
        self._pages: list[Page] = []

    def write(self, record: RecordWrite, digest: int, slot: int, fd: int, offset: int) -> WriteOp:
        """Return what puts a record into a slot."""
        page = self._page()
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
        encode_descriptor(view, self._owner, slot, size_bytes, self._digest, record.key)
        return WriteOp(record.key, digest, slot, size_bytes, page, _transfer(fd, offset, page, rest, addresses))

    def read(
        self, index: int, read: RecordRead, place: int, size_bytes: int, fd: int, offset: int, slot_bytes: int
    ) -> ReadOp:
        """Return what gets a record out of a slot."""
        page = self._page()
        wanted = size_bytes - self._header_bytes if size_bytes else slot_bytes - PAGE
        payload_bytes = -(-max(0, wanted) // PAGE) * PAGE
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
        transfer = _transfer(fd, offset, page, targets, addresses)
        return ReadOp(read, index, place, size_bytes, page, bounce, transfer)

    def wipe(self, slot_fd: int, offset: int) -> Transfer:
        """Return what makes a slot empty for every later reader and scan."""
        page = aligned_buffer(PAGE)
        return _transfer(slot_fd, offset, Page(page, address_of(page)), (), ())

    def is_asked_for(self, op: ReadOp) -> bool:
        """Tell whether a read found the record that was asked for; if its length was unknown, find that out."""
        if op.transfer.done_bytes < PAGE or not names_block(op.page.view, self._digest, op.read.key):
            return False
        if op.size_bytes:
            return True
        found = decode_descriptor(op.page.view)
        if found is None:
            return False
        op.size_bytes = found.record_bytes
        return True

    def deliver(self, op: ReadOp) -> None:
        """Bring what was read to where it was asked for, and say how much it is."""
        header_bytes, page = self._header_bytes, op.page.view
        found = max(0, op.transfer.done_bytes - PAGE) + header_bytes
        filled = min(op.size_bytes, found) if op.transfer.done_bytes >= PAGE else 0
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
        self._pages.extend([op.page for op in ops])

    def _page(self) -> Page:
        if not self._pages:
            chunk = aligned_buffer(_CHUNK_PAGES * PAGE)
            for start in range(0, chunk.nbytes, PAGE):
                view = chunk[start : start + PAGE]
                self._pages.append(Page(view, address_of(view)))
        return self._pages.pop()


def aligned_buffer(size_bytes: int) -> memoryview:
    """Return a new page-aligned buffer of zeros, rounded up to whole pages."""
    return memoryview(mmap.mmap(-1, max(1, -(-size_bytes // PAGE)) * PAGE))


def _transfer(fd: int, offset: int, page: Page, payload: Sequence[memoryview], addresses: Sequence[int]) -> Transfer:
    size_bytes = PAGE + sum([b.nbytes for b in payload])
    return Transfer(fd, offset, [page.view, *payload], size_bytes, addresses=[page.address, *addresses])


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
