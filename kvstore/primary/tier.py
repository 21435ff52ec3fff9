"""The primary tier: keys, states, pins and eviction of the slots of one memory."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore.errors import ConfigError
from kvstore.eviction import DEFAULT_POLICY
from kvstore.primary.loans import HandOvers, Loans
from kvstore.primary.order import EvictionOrder, Marks, Rank, SharedOrder
from kvstore.tenants import Accounts
from kvstore.types import BlockKey

_WRITING = -1
_FREE = -2
_ABANDONED = -3

_PIECE_SHARE = 1 / 128
_PIECE_MAX = 16
"""Blocks evicted at a time, as a share of the slots and as a maximum. Evicting one by one takes twice as long."""


class SlotState(enum.Enum):
    """State of a slot."""

    FREE = "free"
    WRITING = "writing"
    """Has a key and is being filled; must not be read."""
    READY = "ready"
    """Holds a complete block."""
    ABANDONED = "abandoned"
    """Has no key, but abandoned I/O or the I/O of a spare slot may access it. Not reused before that I/O ends."""


@dataclass(frozen=True, slots=True)
class PrimaryStats:
    """A snapshot of the primary tier: slots by state.

    Attributes:
        slots: All slots.
        free: Free slots.
        writing: Slots that are being filled.
        ready: Slots with complete blocks.
        pinned: Ready slots with at least one pin.
        dirty: Ready slots that must be written to a tier before eviction.
        retained: Ready slots whose blocks have a rank (``retain``).
        abandoned: Slots that abandoned I/O may still access.
        evicted: Blocks evicted since the start.
    """

    slots: int
    free: int
    writing: int
    ready: int
    pinned: int
    dirty: int
    retained: int
    abandoned: int
    evicted: int


class PrimaryTier:
    """Keys, states and pins of the slots of one memory. Moves no bytes and does no I/O.

    A block enters by :meth:`allocate` (WRITING), can be read after :meth:`commit` (READY), and leaves by eviction or
    :meth:`remove`. Guarantees: a pinned, promised or dirty block is never evicted; a slot has at most one key,
    and a key at most one slot; a WRITING block is never reported as READY. Every call is O(1) per block, amortised.
    States are lists by slot, not objects: with a million of these, Python's garbage collector would stop the scheduler
    for 0.7 s. Not thread-safe: one owner, one thread. Other threads may only read, through
    :mod:`kvstore.primary.lending`.

    Args:
        memory: The memory; C-contiguous. Slot ``i`` is row ``i``, of ``slot_bytes``. Released by :meth:`close`.
        slot_bytes: Length of a slot in bytes.
        policy: Name of the eviction policy, see :data:`kvstore.eviction.POLICY_NAMES`.
        slots: Number of slots; by default all that fit into the memory.

    Raises:
        ConfigError: The memory holds fewer than ``slots`` (or no) slots, or there is no such policy.
    """

    def __init__(
        self, memory: memoryview, slot_bytes: int, *, policy: str = DEFAULT_POLICY, slots: int | None = None
    ) -> None:
        fitting = memory.nbytes // slot_bytes if slot_bytes > 0 else 0
        count = fitting if slots is None else slots
        if not 0 < count <= fitting:
            raise ConfigError(
                f"A primary tier of {count} slots of {slot_bytes} bytes does not fit into {memory.nbytes} bytes of "
                f"memory (room for {fitting}). Give more memory, or smaller or fewer slots (at least one)."
            )
        self.slot_bytes = slot_bytes
        self.slots = count
        self.memory = memory.cast("B") if memory.format != "B" or memory.ndim != 1 else memory
        self._slot_of: dict[BlockKey, int] = {}
        self.slot_of = self._slot_of.get
        """Return the slot of a key in any state, or None."""
        self.pins: list[int] = [_FREE] * count
        """Pins of each READY slot; negative in the other states. Read only."""
        self.free: list[int] = list(range(count - 1, -1, -1))
        """Free slots. Read only."""
        self._piece = min(_PIECE_MAX, int(count * _PIECE_SHARE))
        self._policy = policy
        self._order: EvictionOrder | SharedOrder = EvictionOrder(policy, count, self._slot_of, self.pins)
        self._shares: SharedOrder | None = None
        self.evicted: list[BlockKey] = []
        """Blocks evicted since :meth:`take_evicted`."""
        self.unfilled: list[BlockKey] | None = None
        """WRITING blocks discarded or abandoned since their owner took them last; None unless they are recorded."""
        self._evicted_total = 0
        self._pinned_slots = 0
        self._abandoned: dict[int, int] = {}
        """Number of I/Os that may still access each ABANDONED slot."""
        self.loans, self.hand_overs = Loans(), HandOvers()
        self._promised: list[BlockKey] = []
        """Promised blocks without a pin yet. They are pinned only before an eviction, which most steps do not need."""
        self._promise_pins: dict[BlockKey, None] = {}
        self.promise = self._promised.append
        """Promise a READY block: it is neither evicted nor removed until :meth:`end_promises`."""

    def share(self, accounts: Accounts) -> None:
        """Share the slots among tenants from now on.

        Raises:
            ConfigError: The tier already has blocks.
        """
        if self._slot_of:
            raise ConfigError(f"The primary tier has {len(self)} blocks. Expected none before tenants share it.")
        self._order = self._shares = SharedOrder(accounts, self._policy, self._slot_of, self.pins)

    def row(self, slot: int) -> memoryview:
        """Return a view of a slot; release it before :meth:`close`."""
        return self.memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def lookup(self, key: BlockKey) -> SlotState | None:
        """Return READY, WRITING, or None if the key has no slot. Does not count as a use."""
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        return SlotState.READY if self.pins[slot] >= 0 else SlotState.WRITING

    def keys(self) -> list[BlockKey]:
        """Return the keys that have a slot. Another thread may call this, because the copy is one atomic operation."""
        return list(self._slot_of)

    def missing(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Return the keys that have no slot, each once."""
        return [key for key in dict.fromkeys(keys) if key not in self._slot_of]

    @property
    def free_slots(self) -> int:
        """Slots that can be allocated without eviction."""
        return len(self.free)

    def state_of(self, slot: int) -> SlotState:
        """Return the state of a slot."""
        pins = self.pins[slot]
        return SlotState.READY if pins >= 0 else _STATES[pins]

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, key: object) -> bool:
        return key in self._slot_of

    def allocate(self, keys: Sequence[BlockKey]) -> list[int] | None:
        """Give each key a slot to be filled (WRITING), evicting blocks if necessary. All keys get a slot, or none.

        An eviction includes a few more blocks than needed, to free slots for the next calls.

        Args:
            keys: Keys that have no slot, without duplicates.

        Returns:
            The slots, parallel to ``keys``; None if too few blocks can be evicted. Then a block was evicted only if its
            slot is on loan. :meth:`take_evicted` returns the evicted blocks.
        """
        need = len(keys) - len(self.free)
        if need > 0 and not self._evict(need, keys, self._piece):
            return None
        if self._shares is not None:
            self._shares.admit(keys)
        free, slot_of, pins = self.free, self._slot_of, self.pins
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
            The slots; None if too few blocks can be evicted, as for :meth:`allocate`.
        """
        if count > len(self.free) and not self._evict(count - len(self.free)):
            return None
        slots = [self.free.pop() for _ in range(count)]
        for slot in slots:
            self._abandon(slot)
        return slots

    def exchange(self, key: BlockKey, spare: int) -> None:
        """Move a WRITING block to a spare slot whose I/O has ended. Its former slot becomes ABANDONED."""
        self._abandon(self._slot_of[key])
        del self._abandoned[spare]
        self._slot_of[key] = spare
        self.pins[spare] = _WRITING

    def commit(self, keys: Iterable[BlockKey], pins: int = 0) -> None:
        """Make WRITING blocks, now complete, READY with ``pins`` pins each.

        The last block counts as the least recently used, because the end of a prefix is worth less than its start.
        """
        slot_of, counts = self._slot_of, self.pins
        done = 0
        for order, some in self._order.split(tuple(keys)[::-1]):
            insert = order.enter
            for key in some:
                counts[slot_of[key]] = pins
                insert(key)
                done += 1
        if pins:
            self._pinned_slots += done

    def abort(self, keys: Iterable[BlockKey]) -> None:
        """Discard WRITING blocks and free their slots. Their I/O must have ended."""
        keys = tuple(keys)
        if self.unfilled is not None:
            self.unfilled += keys
        self._drop(keys)

    def abandon(self, key: BlockKey) -> None:
        """Discard a WRITING block whose slot I/O may still access; :meth:`reclaim` frees the slot."""
        if self.unfilled is not None:
            self.unfilled.append(key)
        self._abandon(self._slot_of.pop(key))
        if self._shares is not None:
            self._shares.gone((key,))

    def reclaim(self, slot: int) -> None:
        """Note the end of one I/O on an ABANDONED slot. The slot is free after the last one."""
        self._abandoned[slot] -= 1
        if not self._abandoned[slot]:
            del self._abandoned[slot]
            self.pins[slot] = _FREE
            self.free.append(slot)

    def pin(self, keys: Iterable[BlockKey]) -> list[int]:
        """Pin READY blocks against eviction; return their slots. Does not count as a use (see :meth:`touch`)."""
        slot_of, pins = self._slot_of, self.pins
        slots, first = [], []
        for key in keys:
            slot = slot_of[key]
            before = pins[slot]
            pins[slot] = before + 1
            slots.append(slot)
            if before == 0:
                first.append(key)
        if first:
            self._pinned_slots += len(first)
            for order, some in self._order.split(first):
                order.exempt(some)
        return slots

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Remove one pin from each block.

        Blocks that were due for eviction while they were pinned are the next to be evicted, in the order of ``keys``.
        """
        slot_of, pins = self._slot_of, self.pins
        last = []
        for key in keys:
            slot = slot_of[key]
            left = pins[slot] - 1
            pins[slot] = left
            if left == 0:
                last.append(key)
        if last:
            self._pinned_slots -= len(last)
            for order, some in self._order.split(last):
                order.end_exemption(some)

    def pin_promised(self, *, touch: bool = False) -> None:
        """Pin the blocks promised since the last call. Eviction and removal call this first.

        Args:
            touch: Whether this counts as a use of these blocks.
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
        """Record a use of blocks, the first of ``keys`` as the most recent (the start of a prefix is worth most).

        Args:
            keys: The blocks; blocks that are not READY are ignored.
            anew: False to only reorder blocks that were stored in pieces, without counting another use.
        """
        slot_of, pins = self._slot_of, self.pins
        ready = [key for key in reversed(keys) if key in slot_of and pins[slot_of[key]] >= 0]
        if anew:
            self._order.touch(ready)
            return
        for order, some in self._order.split(ready):
            order.settle(some)

    def remove(self, key: BlockKey) -> bool:
        """Drop a READY block without pins, even if dirty; return whether it was dropped."""
        self.pin_promised()
        slot = self._slot_of.get(key)
        if slot is None or self.pins[slot] != 0:
            return False
        self._order.of(key).leave(key)
        self._drop((key,))
        return True

    def retain(self, key: BlockKey, rank: Rank) -> None:
        """Give a READY block a rank: it is evicted after all blocks of lower rank or without rank."""
        self._order.of(key).retain(key, rank)

    def end_retention(self, key: BlockKey) -> None:
        """End :meth:`retain`."""
        self._order.of(key).end_retention(key)

    def demote(self, keys: Iterable[BlockKey]) -> None:
        """Make these blocks the next to be evicted, the last of ``keys`` first, unless they are used before."""
        for key in reversed(tuple(keys)):
            self._order.of(key).demote(key)

    def mark_dirty(self, keys: Iterable[BlockKey]) -> None:
        """Keep READY blocks from eviction until they are clean; see :meth:`take_wanted`."""
        marked = tuple(keys)
        self.marks.dirty.update(marked)
        for order, some in self._order.split(marked):
            order.exempt(some)

    def mark_clean(self, keys: Iterable[BlockKey]) -> None:
        """Note that blocks may be evicted without loss."""
        marked = tuple(keys)
        self.marks.dirty.difference_update(marked)
        for order, some in self._order.split(marked):
            order.end_exemption(some)

    @property
    def marks(self) -> Marks:
        """Marks that protect blocks from eviction. Read only."""
        return self._order.marks

    def take_wanted(self) -> list[BlockKey]:
        """Return the dirty blocks that were due for eviction since the last call."""
        return self._order.take_wanted()

    def take_evicted(self) -> list[BlockKey]:
        """Return the blocks evicted since the last call."""
        evicted, self.evicted = self.evicted, []
        return evicted

    def prepare_eviction(self, count: int) -> None:
        """Prepare the coldest blocks for eviction by the next allocations: dirty ones become wanted.

        Args:
            count: Number of slots to make available: free, next to be evicted, or newly wanted. Blocks already wanted
                do not count, because only the owner knows their state.
        """
        self._order.look_ahead(count - len(self.free))

    def clear(self, still_touched: Iterable[int] = ()) -> list[BlockKey]:
        """Drop every block regardless of state and pins; return the READY ones.

        Slots ``still_touched``, each listed once per I/O that may still access it, become ABANDONED.
        """
        dropped = [key for key, slot in self._slot_of.items() if self.pins[slot] >= 0]
        self._order.clear()
        self._slot_of.clear()
        self._promised.clear()
        self._promise_pins.clear()
        for slot in (*still_touched, *self.loans.outlive_all()):
            self._abandoned[slot] = self._abandoned.get(slot, 0) + 1
        self.pins[:] = [_ABANDONED if slot in self._abandoned else _FREE for slot in range(self.slots)]
        self.free = [slot for slot in range(self.slots - 1, -1, -1) if slot not in self._abandoned]
        self._pinned_slots = 0
        return dropped

    def stats(self) -> PrimaryStats:
        """Return a snapshot; cheap."""
        return PrimaryStats(
            slots=self.slots,
            free=len(self.free),
            writing=len(self._slot_of) - len(self._order),
            ready=len(self._order),
            pinned=self._pinned_slots,
            dirty=len(self.marks.dirty),
            retained=len(self.marks.ranks),
            abandoned=len(self._abandoned),
            evicted=self._evicted_total,
        )

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self.memory.release()

    def _abandon(self, slot: int) -> None:
        self.pins[slot] = _ABANDONED
        self._abandoned[slot] = 1

    def _evict(self, need: int, wanted: Sequence[BlockKey] = (), piece: int = 0) -> bool:
        """Evict blocks until ``need`` more slots are free, not counting slots on loan; return whether there are enough.

        Evicts ``piece`` blocks at a time if possible.
        """
        self.pin_promised()
        while need > 0:
            size = max(need, piece)
            chosen = self._order.choose(size, wanted)
            if len(chosen) < size:
                keep = need if len(chosen) >= need else 0
                for order, some in self._order.split(chosen[keep:]):
                    order.put_back(some)
                del chosen[keep:]
            if not chosen:
                return False
            self._order.evicted(chosen)
            need -= self._drop(chosen)
            self.evicted += chosen
            self._evicted_total += len(chosen)
        return True

    def _drop(self, keys: Sequence[BlockKey]) -> int:
        """Remove blocks from the index, then free their slots; return the number freed (slots on loan are not)."""
        freed = []
        for key in keys:
            slot = self._slot_of.pop(key)
            if self.loans.outlive(slot):
                self._abandon(slot)
            else:
                self.pins[slot] = _FREE
                freed.append(slot)
        self.free += freed
        if self._shares is not None:
            self._shares.gone(keys)
        return len(freed)


_STATES = {_WRITING: SlotState.WRITING, _FREE: SlotState.FREE, _ABANDONED: SlotState.ABANDONED}
