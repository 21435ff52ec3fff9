"""Transfers of records to and from slots: header pages, and buffers for direct I/O."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.backends.base import RecordRead, RecordWrite
from kvstore.backends.disk.layout import PAGE, decode_descriptor, encode_descriptor, names_block
from kvstore.backends.vectored import cut, scatter
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
    slot: int
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
    record_bytes: int  # Expected length; 0: unknown, the whole slot is read.
    page: Page
    bounce: memoryview  # Destination of the payload if the request's buffer does not allow direct I/O; otherwise empty.


class RecordMover:
    """Creates transfers of records, and checks and delivers the records read. Used from the loop thread.

    The header of a record, of ``header_bytes`` bytes, is at the start of its header page.
    """

    def __init__(self, owner: int, digest: bytes, header_bytes: int) -> None:
        self._owner = owner
        self._digest = digest
        self._header_bytes = header_bytes
        self._pages: list[Page] = []

    def write(self, index: int, record: RecordWrite, digest: int, slot: int, fd: int, offset: int) -> SlotWrite:
        page = self._page()
        header_bytes, view = self._header_bytes, page.view
        head, *rest = record.buffers
        payload_bytes = sum([b.nbytes for b in rest])
        record_bytes = head.nbytes + payload_bytes
        addresses = direct_addresses(rest) if head.nbytes == header_bytes else None
        if addresses is not None:
            view[:header_bytes] = head
        else:
            # Buffers unsuitable for direct I/O (unaligned address or length) are copied. Primary slots are aligned.
            whole = b"".join(record.buffers)
            view[:header_bytes] = whole[:header_bytes].ljust(header_bytes, b"\0")
            rest = []
            if record_bytes > header_bytes:
                bounce = aligned_buffer(record_bytes - header_bytes)
                bounce[: record_bytes - header_bytes] = whole[header_bytes:]
                rest = [bounce]
            addresses = [address_of(b) for b in rest]
            payload_bytes = sum([b.nbytes for b in rest])
        encode_descriptor(view, self._owner, slot, record_bytes, self._digest, record.key)
        return SlotWrite(
            fd, offset, [view, *rest], PAGE + payload_bytes, addresses=[page.address, *addresses],
            index=index, key=record.key, digest=digest, slot=slot, record_bytes=record_bytes, page=page,
        )  # fmt: skip

    def read(
        self, index: int, read: RecordRead, place: int, record_bytes: int, fd: int, offset: int, slot_bytes: int
    ) -> SlotRead:
        page = self._page()
        wanted = record_bytes - self._header_bytes if record_bytes else slot_bytes - PAGE
        payload_bytes = -(-max(0, wanted) // PAGE) * PAGE
        bounce = memoryview(b"")
        targets: list[memoryview] = []
        addresses: list[int] = []
        if payload_bytes:
            head, *rest = read.buffers
            fits = head.nbytes == self._header_bytes and len(rest) == 1 and rest[0].nbytes >= payload_bytes
            if fits and (direct := direct_addresses(rest)) is not None:
                targets = rest if rest[0].nbytes == payload_bytes else [rest[0][:payload_bytes]]
                addresses = direct
            else:
                bounce = aligned_buffer(payload_bytes)
                targets, addresses = [bounce], [address_of(bounce)]
        return SlotRead(
            fd, offset, [page.view, *targets], PAGE + payload_bytes, addresses=[page.address, *addresses],
            read=read, index=index, place=place, record_bytes=record_bytes, page=page, bounce=bounce,
        )  # fmt: skip

    def is_asked_for(self, op: SlotRead) -> bool:
        """Return whether a read found the requested record; if its length was unknown, set it."""
        if op.done_bytes < PAGE or not names_block(op.page.view, self._digest, op.read.key):
            return False
        if not op.record_bytes and (found := decode_descriptor(op.page.view)) is not None:
            op.record_bytes = found.record_bytes
        return op.record_bytes > 0

    def deliver(self, op: SlotRead) -> None:
        """Copy header and, if necessary, payload to the request's buffers; only if :meth:`is_asked_for` is true."""
        header_bytes, page = self._header_bytes, op.page.view
        filled = min(op.record_bytes, op.done_bytes - PAGE + header_bytes)
        # The header shares its page with our descriptor, so it is copied: 256 bytes.
        head = op.read.buffers[0]
        if filled >= header_bytes == head.nbytes and not op.bounce.nbytes:
            head[:] = page[:header_bytes]
        else:
            scatter(page[: min(filled, header_bytes)], op.read.buffers)
            if op.bounce.nbytes and filled > header_bytes:
                scatter(op.bounce[: filled - header_bytes], cut(op.read.buffers, filled, header_bytes))
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
