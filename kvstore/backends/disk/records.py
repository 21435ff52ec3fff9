"""Transfers of records to and from slots: header pages, and buffers for direct I/O."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.backends.base import RecordRead, RecordWrite
from kvstore.backends.disk.layout import PAGE, mark_of
from kvstore.backends.disk.segment import Segment
from kvstore.backends.vectored import cut, scatter
from kvstore.codec.record import HEADER_BYTES
from kvstore.codec.rows import address_of
from kvstore.diskio import Transfer
from kvstore.types import BlockKey

_CHUNK_PAGES: Final = 256
"""Header pages allocated at a time: 1 MiB."""


class Page(NamedTuple):
    """A page of memory, and its address, determined once because pages are reused."""

    view: memoryview
    address: int


@dataclass(slots=True, eq=False, kw_only=True)
class SlotWrite(Transfer):
    """The write of a record into a slot."""

    index: int  # Position of the record in its batch.
    key: BlockKey
    digest: int
    place: int
    record_bytes: int
    page: Page

    @property
    def failure(self) -> OSError | None:
        """The reason why the record is incomplete; None if it is complete."""
        if self.error is not None or self.done_bytes == self.size_bytes:
            return self.error
        return OSError(f"{self.done_bytes} of {self.size_bytes} bytes were written")


@dataclass(slots=True, eq=False, kw_only=True)
class SlotRead(Transfer):
    """The read of a record from a slot."""

    read: RecordRead
    index: int  # Position of the request in its batch.
    place: int
    record_bytes: int
    mark: int
    generation: int
    page: Page
    bounce: memoryview  # Destination of the payload if the request's buffer does not allow direct I/O; otherwise empty.


class RecordMover:
    """Creates transfers of records, and delivers the records read. Used from the loop thread."""

    def __init__(self) -> None:
        self._pages: list[Page] = []

    def write(self, index: int, record: RecordWrite, digest: int, place: int, fd: int, offset: int) -> SlotWrite:
        page = self._page()
        head, *rest = record.buffers
        payload_bytes = sum([b.nbytes for b in rest])
        record_bytes = head.nbytes + payload_bytes
        addresses = direct_addresses(rest) if head.nbytes == HEADER_BYTES else None
        if addresses is not None:
            page.view[:HEADER_BYTES] = head
        else:
            # Buffers unsuitable for direct I/O (unaligned address or length) are copied. Primary slots are aligned.
            whole = b"".join(record.buffers)
            page.view[:HEADER_BYTES] = whole[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
            rest = []
            if record_bytes > HEADER_BYTES:
                bounce = aligned_buffer(record_bytes - HEADER_BYTES)
                bounce[: record_bytes - HEADER_BYTES] = whole[HEADER_BYTES:]
                rest = [bounce]
            addresses = [address_of(b) for b in rest]
            payload_bytes = sum([b.nbytes for b in rest])
        return SlotWrite(
            fd, offset, [page.view, *rest], PAGE + payload_bytes, addresses=[page.address, *addresses],
            index=index, key=record.key, digest=digest, place=place, record_bytes=record_bytes, page=page,
        )  # fmt: skip

    def read(self, index: int, read: RecordRead, place: int, segment: Segment, slot: int) -> SlotRead:
        record_bytes = segment.size_view[slot]
        page = self._page()
        payload_bytes = -(-max(0, record_bytes - HEADER_BYTES) // PAGE) * PAGE
        bounce = memoryview(b"")
        targets: list[memoryview] = []
        addresses: list[int] = []
        if payload_bytes:
            head, *rest = read.buffers
            fits = head.nbytes == HEADER_BYTES and len(rest) == 1 and rest[0].nbytes >= payload_bytes
            if fits and (direct := direct_addresses(rest)) is not None:
                targets = rest if rest[0].nbytes == payload_bytes else [rest[0][:payload_bytes]]
                addresses = direct
            else:
                bounce = aligned_buffer(payload_bytes)
                targets, addresses = [bounce], [address_of(bounce)]
        return SlotRead(
            segment.file.fd, slot * segment.head.slot_bytes, [page.view, *targets], PAGE + payload_bytes,
            addresses=[page.address, *addresses], read=read, index=index, place=place, record_bytes=record_bytes,
            mark=segment.mark_view[slot], generation=segment.generation_view[slot], page=page, bounce=bounce,
        )  # fmt: skip

    @staticmethod
    def is_asked_for(op: SlotRead) -> bool:
        """Return whether a read found the record that the slot's row describes, in a segment that was not truncated."""
        return op.done_bytes == op.size_bytes and mark_of(op.page.view) == op.mark

    @staticmethod
    def deliver(op: SlotRead) -> None:
        """Copy header and, if necessary, payload to the request's buffers; only if :meth:`is_asked_for` is true."""
        page = op.page.view
        filled = op.record_bytes
        # The header shares its page with padding, so it is copied: 256 bytes.
        head = op.read.buffers[0]
        if filled >= HEADER_BYTES == head.nbytes and not op.bounce.nbytes:
            head[:] = page[:HEADER_BYTES]
        else:
            scatter(page[: min(filled, HEADER_BYTES)], op.read.buffers)
            if op.bounce.nbytes and filled > HEADER_BYTES:
                scatter(op.bounce[: filled - HEADER_BYTES], cut(op.read.buffers, filled, HEADER_BYTES))
        op.read.filled_bytes = filled

    def release(self, ops: Sequence[SlotWrite | SlotRead]) -> None:
        """Reuse the pages of transfers that have ended."""
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


def direct_addresses(buffers: Sequence[memoryview]) -> list[int] | None:
    """Return the addresses of buffers, or None if one of them is unsuitable for direct I/O."""
    addresses = []
    for buffer in buffers:
        if buffer.nbytes % PAGE or not buffer.nbytes:
            return None
        addresses.append(address_of(buffer))
        if addresses[-1] % PAGE:
            return None
    return addresses
