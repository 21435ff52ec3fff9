"""Writes rows of tables: neighbours in one write, and after a failure another row later. Used from the loop thread.

After a failed write the row on the disk is unknown: other engines may have read the new one. A slot with such a row is
neither free nor used (*unsettled*) until a later row was written, with a generation of its own.

After its rows, the generation of a group is written, so that other engines read only groups that have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.backends.disk.drives import Drives
from kvstore.backends.disk.index import Index
from kvstore.backends.disk.layout import GROUP_ROWS, PAGE, ROW_BYTES, State, encode_rows
from kvstore.backends.disk.segment import SLOT_BITS, SLOT_MASK, Segment
from kvstore.diskio import Transfer, bare
from kvstore.types import BlockKey

_ROWS_MAX = 1 << 12
"""Most unsettled rows of one attempt: half a megabyte."""

_ANNOUNCE_S = 0.002
_ALONE_S = 1.0
"""Time in which the generations of several batches of rows become one write. An engine with a read-only mount can't
state that it is there, so an engine that seems to be alone announces its rows, too."""


class RowChange(NamedTuple):
    """The next row of a slot."""

    place: int
    state: int
    size_bytes: int = 0
    mark: int = 0
    key: BlockKey = b""


class TableWriter:
    """Writes rows.

    Args:
        durable: A row counts as written only when it survives a power cut.
        is_alone: Whether no other engine is known in these roots.
    """

    def __init__(self, drives: Drives, index: Index, is_alone: Callable[[], bool], *, durable: bool) -> None:
        self.unsettled: dict[int, int] = {}
        """Places whose row on the disk is unknown, and the state to write."""
        self._drives = drives
        self._index = index
        self._durable = durable
        self._is_alone = is_alone
        self._is_ending = asyncio.Event()
        self._changed: dict[int, dict[int, set[int]]] = {}
        """Groups of rows, by root and segment, that have changed since their generation was written."""
        self._announcing: dict[int, asyncio.Task[None]] = {}
        """By root, so that a frozen one delays no other."""
        self._announced: set[int] = set()
        """Segments whose generations are being written."""

    async def write(self, changes: Sequence[RowChange]) -> dict[int, OSError]:
        """Write the next rows of slots; return the places whose rows may not be there, with the reason.

        Of each slot, one row is written at a time.
        """
        transfers: list[Transfer] = []
        runs: list[list[int]] = []
        changes = sorted(changes)
        content = self._encode(changes)
        start = 0
        for end in range(1, len(changes) + 1):
            if end == len(changes) or changes[end].place != changes[end - 1].place + 1:
                segment, first = self._index.at(changes[start].place)
                rows = content[start * ROW_BYTES : end * ROW_BYTES]
                transfers.append(Transfer(segment.table.fd, segment.rows_at + first * ROW_BYTES, [rows], rows.nbytes))
                runs.append([change.place for change in changes[start:end]])
                start = end
        await self._drives.write(transfers)
        failed: dict[int, OSError] = {}
        for transfer, places in zip(transfers, runs, strict=True):
            if transfer.done_bytes != transfer.size_bytes:
                failed.update(dict.fromkeys(places, transfer.error or OSError("a row was written in part")))
        for places in runs:
            first, last = ((place & SLOT_MASK) // GROUP_ROWS for place in (places[0], places[-1]))
            self._note_changed(self._index.at(places[0])[0], range(first, last + 1))
        if self._durable:
            failed |= await self._sync([place for places in runs for place in places])
        return failed

    def change_all(self, segment: Segment) -> None:
        """Announce all rows of a segment: its last holder may have ended before it announced the last ones."""
        self._note_changed(segment, range(segment.head.groups))

    def settle_later(self, places: Collection[int], state: int = State.FREE) -> None:
        """Write rows with this state later."""
        self.unsettled.update(dict.fromkeys(places, state))

    async def settle(self, root: int) -> None:
        """Write unsettled rows, and generations, of the segments in the root at this position.

        Raises:
            OSError: Some rows still can't be written.
        """
        if self._changed.get(root):
            self._announce_soon(root)
        places = [place for place in self.unsettled if self._index.at(place)[0].root == root][:_ROWS_MAX]
        states = {place: self.unsettled.pop(place) for place in places}
        failed: dict[int, OSError] = dict.fromkeys(places, OSError("the write was cancelled"))
        try:
            failed = await self.write([RowChange(place, state) for place, state in states.items()])
        finally:
            self.unsettled.update({place: states[place] for place in failed})
        for place in [place for place in places if place not in failed]:
            self._index.settle(place, states[place])
        if failed:
            raise next(iter(failed.values()))

    def is_announcing(self, segment: Segment) -> bool:
        """Return whether generations of a segment are being written."""
        return segment.id in self._announced

    async def end(self) -> None:
        """Announce what was written."""
        self._is_ending.set()
        if self._announcing:
            await asyncio.wait(self._announcing.values())

    def _note_changed(self, segment: Segment, groups: Collection[int]) -> None:
        self._changed.setdefault(segment.root, {}).setdefault(segment.id, set()).update(groups)
        self._announce_soon(segment.root)

    def _announce_soon(self, root: int) -> None:
        if (task := self._announcing.get(root)) is None or task.done():
            self._announcing[root] = asyncio.get_running_loop().create_task(self._announce(root))

    async def _announce(self, root: int) -> None:
        """Write the generations of changed groups in a root, until a write fails.

        They are hints, so a failure only delays what other engines see, until the next rows or :meth:`settle`.
        """
        while self._changed.get(root):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ALONE_S if self._is_alone() else _ANNOUNCE_S):
                    await self._is_ending.wait()
            changed = self._changed.pop(root)
            transfers: dict[int, Transfer] = {}
            for number, groups in changed.items():
                if (segment := self._index.segments.get(number)) is not None:
                    segment.generations[list(groups)] += 1
                    first, end = min(groups), max(groups) + 1
                    content = segment.generations[first:end].copy().view(np.uint8).data
                    transfers[number] = Transfer(segment.table.fd, PAGE + 4 * first, [content], content.nbytes)
            self._announced |= changed.keys()
            try:
                with contextlib.suppress(OSError):
                    await self._drives.write(list(transfers.values()))
            finally:
                self._announced -= changed.keys()
            failed = [number for number, each in transfers.items() if each.done_bytes != each.size_bytes]
            for number in failed:
                self._changed.setdefault(root, {}).setdefault(number, set()).update(changed[number])
            if failed:
                return

    def _encode(self, changes: Sequence[RowChange]) -> memoryview:
        at = [self._index.at(change.place) for change in changes]
        values = [segment.next_row(slot, *change[1:]) for (segment, slot), change in zip(at, changes, strict=True)]
        rows = encode_rows(values, [slot for _, slot in at], [segment.head.segment for segment, _ in at])
        return rows.view(np.uint8).data

    async def _sync(self, places: Sequence[int]) -> dict[int, OSError]:
        failed: dict[int, OSError] = {}
        for number in {place >> SLOT_BITS for place in places}:
            try:
                fd = self._index.at(number << SLOT_BITS)[0].table.fd
                await self._drives.sync(fd)
            except OSError as error:
                failed.update({place: bare(error) for place in places if place >> SLOT_BITS == number})
        return failed
