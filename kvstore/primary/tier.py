"""The primary tier: slots of one memory, their keys, states and pins, and their eviction."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.primary.handovers import HandOvers
from kvstore.primary.loans import Loans
from kvstore.primary.order import EvictionOrder, Marks, Rank
from kvstore.primary.shares import SharedOrder
from kvstore.tenants import Accounts
from kvstore.types import BlockKey

__all__ = ["PrimaryStats", "PrimaryTier", "SlotState"]

_WRITING = -1
_FREE = -2
_ABANDONED = -3


class SlotState(enum.Enum):
    """State of a slot."""

    FREE = "free"
    WRITING = "writing"
    """It has a key and is being filled; it must not be read."""
    READY = "ready"
    """It holds a whole block."""
    ABANDONED = "abandoned"
    """It has no key, but I/O may touch it: abandoned I/O, or that of a spare slot. It is not reused before its end."""


@dataclass(frozen=True, slots=True)
class PrimaryStats:
    """A snapshot of the primary tier: slots by state.

    Attributes:
        slots: All slots.
        free: Free slots.
        writing: Slots that are being filled.
        ready: Slots with whole blocks.
        pinned: Ready slots with at least one pin.
        held: Ready slots that are held on request (``hold``).
        dirty: Ready slots that must be written to a tier before they are evicted.
        retained: Ready slots whose blocks have a rank (``retain``).
        abandoned: Slots that abandoned I/O may still touch.
        evicted: Blocks evicted since the start.
    """

    slots: int
    free: int
    writing: int
    ready: int
    pinned: int
    held: int
    dirty: int
    retained: int
    abandoned: int
    evicted: int


class PrimaryTier:
    """Keys, states and pins of the slots of one memory. It moves no bytes and does no I/O.

    A block enters by :meth:`allocate` (WRITING), can be read after :meth:`commit` (READY), and leaves by eviction or
    :meth:`remove`. Guarantees: a pinned, promised, held or dirty block is never evicted; a slot belongs to one key at
    most and a key to one slot; a WRITING block is never reported as READY. Every call is O(1) per block, amortised.
    Not thread-safe: one owner, one thread. Only ``keys``, ``loans`` and ``hand_overs`` serve a second, reading thread
    (``lending``).

    Args:
        memory: The memory; C-contiguous. Slot ``i`` is its row ``i`` of ``slot_bytes``. Released by :meth:`close`.
        slot_bytes: Length of a slot in bytes.
        policy: Name of the eviction policy, see :data:`kvstore.eviction.POLICY_NAMES`.
        slots: Number of slots; by default as many as the memory holds.

    Raises:
        ConfigError: The memory holds fewer than ``slots`` (or no) slots, or there is no such policy.
    """

    def __init__(self, memory: memoryview, slot_bytes: int, *, policy: str = "lru", slots: int | None = None) -> None:
        fitting = memory.nbytes // slot_bytes if slot_bytes > 0 else 0
        count = fitting if slots is None else slots
        if not 0 < count <= fitting:
            raise ConfigError(
                f"A primary tier of {count} slots of {slot_bytes} bytes does not fit into {memory.nbytes} bytes of "
                f"memory (room for {fitting}). Give more memory, or smaller or fewer slots (at least one)."
            )
        self.slot_bytes = slot_bytes
        self.slots = count
        self._memory = memory.cast("B") if memory.format != "B" or memory.ndim != 1 else memory
        self._slot_of: dict[BlockKey, int] = {}
        self._pins: list[int] = [_FREE] * count
        """Pins of a READY slot; one of the negative constants for the other states."""
        self._free: list[int] = list(range(count - 1, -1, -1))
        self._policy = policy
        self._order: EvictionOrder | SharedOrder = EvictionOrder(policy, count, self._is_pinned)
        self._shares: SharedOrder | None = None
        self._evicted: list[BlockKey] = []
        self._evicted_total = 0
        self._pinned_slots = 0
        self._abandoned: dict[int, int] = {}
        """Number of I/Os that may still touch each ABANDONED slot."""
        self.loans, self.hand_overs = Loans(), HandOvers()
        self._promised: list[BlockKey] = []
        """Promised blocks that are not pinned yet: most steps evict nothing, so no pin is needed."""
        self._promise_pins: dict[BlockKey, None] = {}
        self.promise = self._promised.append
        """Promise a READY block: it is neither evicted nor removed until :meth:`end_promises`."""

    def share(self, accounts: Accounts) -> Counter[str]:
        """Share the slots among tenants from now on; there are no blocks yet.

        Returns:
            Blocks evicted by name of the tenant; the tier counts on.
        """
        if self._slot_of:
            raise ConfigError(f"The primary tier has {len(self)} blocks. Expected none before tenants share it.")
        self._order = self._shares = SharedOrder(accounts, self._policy, self._is_pinned)
        return self._shares.evictions

    @property
    def memory(self) -> memoryview:
        """The memory, as bytes."""
        return self._memory

    def row(self, slot: int) -> memoryview:
        """Return a view of a slot; release it before :meth:`close`."""
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def lookup(self, key: BlockKey) -> SlotState | None:
        """Return READY, WRITING, or None if the key has no slot. Does not count as a use of the block."""
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        return SlotState.READY if self._pins[slot] >= 0 else SlotState.WRITING

    def keys(self) -> list[BlockKey]:
        """Return the keys that have a slot. Also for another thread: the list is made in one operation."""
        return list(self._slot_of)

    def missing(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Return the keys that have no slot, each once."""
        return [key for key in dict.fromkeys(keys) if key not in self._slot_of]

    @property
    def free_slots(self) -> int:
        """Slots that can be allocated without an eviction."""
        return len(self._free)

    def slot_of(self, key: BlockKey) -> int | None:
        """Return the slot of a key, whatever its state."""
        return self._slot_of.get(key)

    def state_of(self, slot: int) -> SlotState:
        """Return the state of a slot."""
        pins = self._pins[slot]
        return SlotState.READY if pins >= 0 else _STATES[pins]

    def pin_count(self, slot: int) -> int:
        """Return the pins of a slot; 0 if it is not READY."""
        return max(0, self._pins[slot])

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: object) -> bool:
        return key in self._slot_of

    def allocate(self, keys: Sequence[BlockKey]) -> list[int] | None:
        """Give each key a slot to be filled (WRITING), evicting what may be evicted; all of them or none.

        Args:
            keys: Keys that have no slot, without duplicates.

        Returns:
            The slots, parallel to ``keys``; None, with nothing evicted, if too few blocks can be evicted.
            :meth:`take_evicted` returns the evicted blocks.
        """
        if len(keys) > len(self._free) and not self._evict(len(keys) - len(self._free), keys):
            return None
        if self._shares is not None:
            self._shares.admit(keys)
        free, slot_of, pins = self._free, self._slot_of, self._pins
        slots = []
        for key in keys:
            slot = free.pop()
            slot_of[key] = slot
            pins[slot] = _WRITING
            slots.append(slot)
        return slots

    def allocate_spare(self, count: int) -> list[int] | None:
        """Allocate slots without keys, for one I/O: they are ABANDONED until :meth:`reclaim` or :meth:`exchange`.

        Returns:
            The slots; None, with nothing changed, if too few blocks can be evicted (see :meth:`take_evicted`).
        """
        if count > len(self._free) and not self._evict(count - len(self._free)):
            return None
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._abandon(slot)
        return slots

    def exchange(self, key: BlockKey, spare: int) -> None:
        """Move a WRITING block to a spare slot whose I/O has ended; its former slot becomes ABANDONED."""
        self._abandon(self._slot_of[key])
        del self._abandoned[spare]
        self._slot_of[key] = spare
        self._pins[spare] = _WRITING

    def commit(self, keys: Iterable[BlockKey], pins: int = 0) -> None:
        """Make WRITING blocks READY, each with ``pins`` pins: they are whole.

        The last block counts as the least recently used, because the end of a prefix is worth less than its start.
        """
        slot_of, counts = self._slot_of, self._pins
        done = 0
        for insert, some in self._order.entries(tuple(keys)[::-1]):
            for key in some:
                counts[slot_of[key]] = pins
                insert(key)
                done += 1
        if pins:
            self._pinned_slots += done

    def abort(self, keys: Iterable[BlockKey]) -> None:
        """Discard WRITING blocks whose slots are no longer touched: the slots become free."""
        for key in keys:
            self._drop(key)

    def abandon(self, key: BlockKey) -> None:
        """Discard a WRITING block whose slot may still be touched; :meth:`reclaim` frees the slot."""
        self._abandon(self._slot_of.pop(key))
        if self._shares is not None:
            self._shares.gone(key)

    def reclaim(self, slot: int) -> None:
        """Note the end of one I/O on an ABANDONED slot; after the last one the slot is free."""
        self._abandoned[slot] -= 1
        if not self._abandoned[slot]:
            del self._abandoned[slot]
            self._pins[slot] = _FREE
            self._free.append(slot)

    def pin(self, keys: Iterable[BlockKey], count: int = 1) -> list[int]:
        """Pin READY blocks against eviction; return their slots. Does not count as a use (see :meth:`touch`)."""
        slot_of, pins, order = self._slot_of, self._pins, self._order
        slots = []
        for key in keys:
            slot = slot_of[key]
            held_already = pins[slot]
            if held_already == 0:
                self._pinned_slots += 1
                if order.has_set_aside:
                    order.spare(key)
            pins[slot] = held_already + count
            slots.append(slot)
        return slots

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Remove one pin from each block; parked blocks become first in line for eviction, in this order."""
        slot_of, pins, order = self._slot_of, self._pins, self._order
        for key in keys:
            slot = slot_of[key]
            left = pins[slot] - 1
            pins[slot] = left
            if left == 0:
                self._pinned_slots -= 1
                if order.has_set_aside:
                    order.let_go(key)

    def pin_promised(self, *, touch: bool = False) -> None:
        """Pin the blocks promised since the last call. Eviction and removal call this first.

        Args:
            touch: Whether to note a use of these blocks.
        """
        if self._promised:
            if touch:
                self.touch(self._promised)
            new = [key for key in dict.fromkeys(self._promised) if key not in self._promise_pins]
            self._promised.clear()
            self.pin(new)
            self._promise_pins.update(dict.fromkeys(new))

    def end_promises(self) -> list[BlockKey]:
        """End all promises; return the promised blocks that had been pinned."""
        self._promised.clear()
        held = list(self._promise_pins)
        if held:
            self.unpin(reversed(held))
            self._promise_pins.clear()
        return held

    def touch(self, keys: Sequence[BlockKey], *, anew: bool = True) -> None:
        """Note a use of blocks, the first of ``keys`` as the most recent (the start of a prefix is worth most).

        Args:
            keys: The blocks; those that are not READY are ignored.
            anew: False to reorder blocks that were stored in pieces, without counting a further use.
        """
        slot_of, pins = self._slot_of, self._pins
        ready = [key for key in reversed(keys) if key in slot_of and pins[slot_of[key]] >= 0]
        if anew:
            self._order.touch(ready)
        else:
            self._order.settle(ready)

    def remove(self, key: BlockKey) -> bool:
        """Drop a READY block without pins, even if held or dirty; return whether it was dropped."""
        self.pin_promised()
        slot = self._slot_of.get(key)
        if slot is None or self._pins[slot] != 0:
            return False
        self._order.leave(key)
        self._drop(key)
        return True

    def hold(self, key: BlockKey) -> None:
        """Protect a READY block from eviction until :meth:`release`, independently of pins."""
        self.marks.held.add(key)
        self._order.spare(key)

    def release(self, key: BlockKey) -> None:
        """End :meth:`hold`."""
        self.marks.held.discard(key)
        self._order.let_go(key)

    def retain(self, key: BlockKey, rank: Rank) -> None:
        """Give a READY block a rank: it is evicted after all blocks of lower rank or none."""
        self._order.retain(key, rank)

    def end_retention(self, key: BlockKey) -> None:
        """End :meth:`retain`."""
        self._order.end_retention(key)

    def demote(self, keys: Iterable[BlockKey]) -> None:
        """Evict these blocks next, the last of ``keys`` first, unless they are used before."""
        for key in reversed(tuple(keys)):
            self._order.demote(key)

    def mark_dirty(self, keys: Iterable[BlockKey]) -> None:
        """Keep READY blocks from eviction until they are clean; see :meth:`take_wanted`."""
        for key in keys:
            self.marks.dirty.add(key)
            self._order.spare(key)

    def mark_clean(self, keys: Iterable[BlockKey]) -> None:
        """Note that blocks may be evicted without loss."""
        for key in keys:
            self.marks.dirty.discard(key)
            self._order.let_go(key)

    @property
    def marks(self) -> Marks:
        """What keeps blocks from eviction: read only."""
        return self._order.marks

    def take_wanted(self) -> list[BlockKey]:
        """Return the dirty blocks that were due for eviction since the last call."""
        return self._order.take_wanted()

    @property
    def has_evicted(self) -> bool:
        """Whether :meth:`take_evicted` has something to return."""
        return bool(self._evicted)

    def take_evicted(self) -> list[BlockKey]:
        """Return the blocks evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def prepare_eviction(self, count: int) -> None:
        """Prepare the coldest blocks for eviction by the next allocations: dirty ones become wanted.

        Args:
            count: Slots to have free, first in line or newly wanted. Blocks already wanted are not counted, because
                only the owner knows their state.
        """
        self._order.look_ahead(count - len(self._free))

    def clear(self, still_touched: Iterable[int] = ()) -> list[BlockKey]:
        """Drop every block, whatever its state and pins; return the READY ones.

        Slots ``still_touched`` become ABANDONED; each is listed once per I/O that may still touch it.
        """
        dropped = [key for key, slot in self._slot_of.items() if self._pins[slot] >= 0]
        self._order.clear()
        self._slot_of.clear()
        self._promised.clear()
        self._promise_pins.clear()
        for slot in (*still_touched, *self.loans.outlive_all()):
            self._abandoned[slot] = self._abandoned.get(slot, 0) + 1
        self._pins = [_ABANDONED if slot in self._abandoned else _FREE for slot in range(self.slots)]
        self._free = [slot for slot in range(self.slots - 1, -1, -1) if slot not in self._abandoned]
        self._pinned_slots = 0
        return dropped

    def stats(self) -> PrimaryStats:
        """Return a snapshot; cheap."""
        return PrimaryStats(
            slots=self.slots,
            free=len(self._free),
            writing=len(self._slot_of) - len(self._order),
            ready=len(self._order),
            pinned=self._pinned_slots,
            held=len(self.marks.held),
            dirty=len(self.marks.dirty),
            retained=len(self.marks.ranks),
            abandoned=len(self._abandoned),
            evicted=self._evicted_total,
        )

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._memory.release()

    def _is_pinned(self, key: BlockKey) -> bool:
        return self._pins[self._slot_of[key]] > 0

    def _abandon(self, slot: int) -> None:
        self._pins[slot] = _ABANDONED
        self._abandoned[slot] = 1

    def _evict(self, need: int, wanted: Sequence[BlockKey] = ()) -> bool:
        """Evict blocks until ``need`` more slots are free, or evict none. Slots on loan do not count."""
        self.pin_promised()
        while need > 0:
            chosen = self._order.choose(need, wanted)
            if len(chosen) < need:
                self._order.put_back(chosen)
                return False
            self._order.evicted(chosen)
            need -= sum([self._drop(key) for key in chosen])
            self._evicted += chosen
            self._evicted_total += len(chosen)
        return True

    def _drop(self, key: BlockKey) -> bool:
        """Remove a block from the index, then free its slot; return whether it is free (False if it is on loan)."""
        slot = self._slot_of.pop(key)
        if self._shares is not None:
            self._shares.gone(key)
        is_lent = self.loans.outlive(slot)
        self._pins[slot] = _ABANDONED if is_lent else _FREE
        if is_lent:
            self._abandoned[slot] = 1
        else:
            self._free.append(slot)
        return not is_lent


_STATES = {_WRITING: SlotState.WRITING, _FREE: SlotState.FREE, _ABANDONED: SlotState.ABANDONED}
