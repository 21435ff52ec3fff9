"""The index: which block lies in which slot, what may be read, written and evicted. Plain decisions, no I/O.

Used from the loop thread only. Blocks of other namespaces in the same slabs are kept too, under names that no key of
ours can have, so that they count for eviction and for nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.backends.nvme.free_slots import SLAB_SHIFT, FreeSlots, SlotId
from kvstore.backends.nvme.snapshot import Snapshot
from kvstore.backends.nvme.table import OWN_NAMESPACE, SlotTable
from kvstore.eviction import EvictionPolicy
from kvstore.types import KEY_BYTES_MAX, BlockKey

__all__ = ["Index", "is_own"]

_SLOT_MASK: Final = (1 << SLAB_SHIFT) - 1
_RESTORE_STEP: Final = 4096
"""Blocks handed to the policy at once after a start: about a millisecond."""


def is_own(name: bytes) -> bool:
    """Tell whether a name in the index is a key of our namespace."""
    return len(name) <= KEY_BYTES_MAX


class Index:
    """Blocks by key.

    Args:
        policy: Chooses what goes.
        slots: Number of slots of each slab.
        digest: Namespace digest of the engine.
    """

    def __init__(self, policy: EvictionPolicy, slots: Sequence[int], digest: bytes) -> None:
        self.tables = [SlotTable(count) for count in slots]
        self.free = FreeSlots(len(slots))
        self.namespaces: list[bytes] = [digest]
        self.changes = 0
        """Counts changes, so that a snapshot is only written when there were any."""
        self.touched_while_scanning: set[SlotId] | None = None
        """Slots that were taken or freed since a scan was begun, of which it must believe nothing; None: no scan."""
        self._policy = policy
        self._slots: dict[bytes, SlotId] = {}
        self._numbers: dict[bytes, int] = {digest: OWN_NAMESPACE}
        self._readers: Counter[SlotId] = Counter()
        self._left_behind: set[SlotId] = set()
        self._restoring: list[list[bytes]] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def own_keys(self) -> list[BlockKey]:
        """Return all keys of our namespace."""
        if len(self.namespaces) == 1:
            return list(self._slots)
        return [name for name in self._slots if is_own(name)]

    def find(self, key: BlockKey) -> SlotId | None:
        """Return the slot of a block."""
        return self._slots.get(key)

    def size_bytes(self, slot: SlotId) -> int:
        """Return the length of the record in a slot."""
        return self.tables[slot >> SLAB_SHIFT].size_bytes(slot & _SLOT_MASK)

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Note a use of blocks; unknown ones are ignored."""
        for key in keys:
            slot = self._slots.get(key)
            if slot is not None:
                self._clock += 1
                self.tables[slot >> SLAB_SHIFT].use(slot & _SLOT_MASK, self._clock)
                self._policy.touch(key)

    def pin(self, slot: SlotId) -> None:
        """Keep a slot from being given to another block while it is read."""
        self._readers[slot] += 1

    def unpin(self, slot: SlotId) -> None:
        """Undo one :meth:`pin`."""
        self._readers[slot] -= 1
        if not self._readers[slot]:
            del self._readers[slot]
            if slot in self._left_behind:
                self._left_behind.discard(slot)
                self.free.add(slot)

    def reserve(self, count: int) -> tuple[list[SlotId], list[bytes]]:
        """Take slots for new blocks, evicting if need be.

        Returns:
            The slots, fewer than asked for if no more may be evicted; and the blocks that were evicted.
        """
        slots = self.free.take(count)
        evicted: list[bytes] = []
        if len(slots) < count:
            evicted = self._policy.victims(count - len(slots), pinned=self._is_pinned)
            if self._restoring and len(slots) + len(evicted) < count:
                # The policy does not know all blocks yet, and somebody needs the room now.
                for _ in self.settle():
                    pass
                evicted += self._policy.victims(count - len(slots) - len(evicted), pinned=self._is_pinned)
            for name in evicted:
                slot = self._slots.pop(name)
                self._clear(slot)
                slots.append(slot)
        # Neighbours travel together.
        slots.sort()
        self._note(slots)
        return slots, evicted

    def release(self, slot: SlotId) -> None:
        """Give back a reserved slot."""
        self._note((slot,))
        self.free.add(slot)

    def add(self, name: bytes, slot: SlotId, size_bytes: int, namespace: int = OWN_NAMESPACE) -> None:
        """Note a block in a reserved slot."""
        self._clock += 1
        key = name if namespace == OWN_NAMESPACE else name[-self._foreign_key_length(name) :]
        self.tables[slot >> SLAB_SHIFT].set(slot & _SLOT_MASK, key, size_bytes, namespace, self._clock)
        self._slots[name] = slot
        self._policy.insert(name)
        self.changes += 1

    def add_all(self, keys: Sequence[BlockKey], slots: Sequence[SlotId], sizes_bytes: Sequence[int]) -> None:
        """Note blocks of our namespace in reserved slots: :meth:`add` for a batch, at a fraction of its cost."""
        places: dict[int, list[int]] = {}
        for i, slot in enumerate(slots):
            places.setdefault(slot >> SLAB_SHIFT, []).append(i)
        for slab, at in places.items():
            self.tables[slab].set_all(
                [slots[i] & _SLOT_MASK for i in at],
                [keys[i] for i in at],
                [sizes_bytes[i] for i in at],
                OWN_NAMESPACE,
                self._clock + 1,
            )
            self._clock += len(at)
        self._slots.update(zip(keys, slots, strict=True))
        for key in keys:
            self._policy.insert(key)
        self.changes += len(keys)

    def remove(self, name: bytes) -> SlotId | None:
        """Forget a block. Its slot is reserved, for whoever asked to wipe it and :meth:`retire` it."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._policy.remove(name)
            self._clear(slot)
            self._note((slot,))
        return slot

    def correct(self, slot: SlotId, thought: bytes, name: bytes, size_bytes: int, namespace: int) -> None:
        """Note that a slot holds another block than was thought."""
        self.remove(thought)
        if name in self._slots:
            self.retire(slot)
        else:
            self.add(name, slot, size_bytes, namespace)

    def retire(self, slot: SlotId) -> None:
        """Give back the slot of a removed block: at once, or when the last reader has let go of it."""
        if self._readers.get(slot):
            self._left_behind.add(slot)
        else:
            self.free.add(slot)

    def name_of(self, digest: bytes, key: BlockKey) -> tuple[bytes, int]:
        """Return under which name a block of a namespace is kept, and the number of the namespace."""
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = len(self.namespaces)
            self.namespaces.append(digest)
        if number == OWN_NAMESPACE:
            return key, number
        # Longer than any key, so that it is never taken for one.
        return digest + bytes([len(key)]) + key.rjust(KEY_BYTES_MAX, b"\0"), number

    def name_in(self, slot: SlotId) -> bytes | None:
        """Return the name of the block that is thought to be in a slot."""
        table, place = self.tables[slot >> SLAB_SHIFT], slot & _SLOT_MASK
        if not table.size_bytes(place):
            return None
        return self.name_of(self.namespaces[table.namespace(place)], table.key(place))[0]

    def restore(self, slab: int, snapshot: Snapshot) -> None:
        """Take over the rows of a snapshot. The policy learns of them later, by :meth:`settle`."""
        rows, slots = snapshot.rows, snapshot.slots
        numbers = [self.name_of(digest, b"\0")[1] for digest in snapshot.namespaces]
        if numbers != list(range(len(numbers))):
            rows = rows.copy()
            rows["namespace"] = np.array(numbers, "<u2")[rows["namespace"]]
        names = self._names(rows)
        ids = (slots.astype(np.int64) + (slab << SLAB_SHIFT)).tolist()
        self.tables[slab].restore(slots, rows)
        if self._slots:
            # Another slab may have the same block, if it was away for a while: one of them is enough.
            for name, slot in zip(names, ids, strict=True):
                if self._slots.setdefault(name, slot) != slot:
                    self.tables[slab].clear(slot & _SLOT_MASK)
        else:
            self._slots = dict(zip(names, ids, strict=True))
        self._restoring.append(names)
        self._clock = max(self._clock, int(rows["used"].max(initial=0)))

    def settle(self) -> Iterator[None]:
        """Tell the policy of restored blocks, coldest first, a step at a time; each step is short."""
        for names in self._restoring:
            for start in range(0, len(names), _RESTORE_STEP):
                step = names[start : start + _RESTORE_STEP]
                for name in step:
                    if name in self._slots and name not in self._policy:
                        self._policy.insert(name)
                yield
        self._restoring.clear()

    def open_free_slots(self, slab: int) -> None:
        """Make all slots of a slab free that hold nothing."""
        self.free.add_fresh(slab, self.tables[slab].free_slots())

    def snapshot(self, slab: int, slab_id: bytes, epoch: int) -> Snapshot:
        """Return a snapshot of one slab; whole-array work, and independent of what happens afterwards."""
        slots, rows = self.tables[slab].occupied()
        return Snapshot(slab_id, epoch, tuple(self.namespaces), slots, rows)

    def _names(self, rows: npt.NDArray[np.void]) -> list[bytes]:
        keys: list[bytes] = np.ascontiguousarray(rows["key"]).tolist()
        lengths = rows["key_length"]
        width = rows.dtype["key"].itemsize
        if len(keys) and not (lengths == width).all():
            keys = [key[:length] for key, length in zip(keys, lengths.tolist(), strict=True)]
        foreign = rows["namespace"] != OWN_NAMESPACE
        if foreign.any():
            for i in np.flatnonzero(foreign).tolist():
                keys[i] = self.name_of(self.namespaces[rows["namespace"][i]], keys[i])[0]
        return keys

    def _foreign_key_length(self, name: bytes) -> int:
        return name[len(self.namespaces[0])]

    def _is_pinned(self, name: bytes) -> bool:
        return self._slots[name] in self._readers

    def _clear(self, slot: SlotId) -> None:
        self.tables[slot >> SLAB_SHIFT].clear(slot & _SLOT_MASK)
        self.changes += 1

    def _note(self, slots: Iterable[SlotId]) -> None:
        if self.touched_while_scanning is not None:
            self.touched_while_scanning.update(slots)
