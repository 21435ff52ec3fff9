"""Cascades: stores of blocks from the primary tier to the tiers below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.bounded import BoundedDict
from kvstore.primary.tier import SlotState
from kvstore.tiering.core import Core, Part
from kvstore.tiering.jobs import OpenJob
from kvstore.tiering.leases import Expiry
from kvstore.tiering.link import TierLink
from kvstore.tiering.requests import RequestState
from kvstore.tiering.tenants import Rates
from kvstore.types import BlockKey, JobResult, MissCause, Outcome, RemovalCause, TransferJob

_LAZY_SHARE: Final = 0.125
"""Share of the slots kept free or ready for eviction while there are lazy blocks, so that a burst of stores need not
wait for a tier."""

_CAUSES: Final = {Outcome.SHED: MissCause.SHED, Outcome.NO_SPACE: MissCause.NO_SPACE}
"""Causes of later misses, by the outcome of a store; that of all others is :attr:`MissCause.STORE_FAILED`."""

_SIGHTINGS_MAX: Final = 1 << 17
"""Maximum blocks with a count of uses; some megabytes of memory."""


class Cascades(Part):
    """Decides which blocks of the primary tier go to which tiers, when, and how many at a time.

    Two masks of tiers are kept per block. A block is *withheld* from a tier if it was not stored there (policy, too few
    sightings, no room, its tenant's rate, a failure). It is stored when a request that may store it uses it again. A
    block is *owed* to a tier if it must be written there before the primary tier evicts it (``lazy``). A block withheld
    for lack of room also joins the tier's queue (``TierLink.waiting``), and is stored when there is room.
    """

    def __init__(self, core: Core, expiry: Expiry) -> None:
        self._core = core
        self._expiry = expiry
        self._primary = core.primary
        self._jobs = core.jobs
        self._links = [link for link in core.links if link.takes_stores]
        config = core.config
        self._rates = None if core.tenants is None else core.tenants.stores
        self._all_bits = sum(link.bit for link in self._links)
        self._store_blocks_max = max(1, int(core.primary.slots * config.store_share))
        self._evictable_min = max(1, int(core.primary.slots * _LAZY_SHARE))
        self._withheld: dict[BlockKey, int] = {}
        self._owed: dict[BlockKey, int] = {}
        self._transient: set[BlockKey] = set()
        """Blocks that may not stay in the primary tier (``cpu: false``)."""
        self._backfill_uses = config.backfill_uses
        self._filling: set[BlockKey] = set()
        """Withheld blocks that were promoted from a slower tier; ``backfill.min_uses`` applies to them as well."""
        self._wanted: dict[BlockKey, None] = {}
        """Owed blocks that are due for eviction, and not yet being stored."""
        self._writing_back = 0  # Owed blocks being stored.
        self._sightings: BoundedDict[BlockKey, int] = BoundedDict(_SIGHTINGS_MAX)
        """Uses of blocks, for admission. The least recently seen blocks are dropped first."""
        self.lost_blocks = 0  # Owed blocks that a tier failed to store before their eviction.

    @property
    def waits(self) -> bool:
        """Whether blocks wait for room. Without unfinished stores there is room, and the next step stores them."""
        return any(link.queue for link in self._links)

    @property
    def unsent(self) -> int:
        """Number of blocks that are owed or wait for room, counted for each tier."""
        return sum(map(int.bit_count, self._owed.values())) + sum(len(link.queue) for link in self._links)

    @property
    def making_room(self) -> bool:
        """Whether write-backs are running or due, which free slots."""
        return bool(self._owed or self._writing_back)

    def stored(self, keys: Sequence[BlockKey], slots: Sequence[int], state: RequestState) -> None:
        """Commit filled blocks in the primary tier and store them below, by their request's policy."""
        policy = state.policy
        links = state.store_links
        plain = policy.min_uses <= 1 and not policy.lazy and policy.cpu and not state.cut and self._rates is None
        if not plain or len(links) < len(self._links) or len(keys) > min(map(self.room, links), default=len(keys)):
            self._primary.commit(keys)
            self._send_some(keys, state)
            return
        self._primary.commit(keys, pins=len(links))
        for link in links:
            self._submit(link, keys, slots, state)

    def room(self, link: TierLink) -> int:
        """Return how many more blocks a tier may have in unfinished stores."""
        return 0 if link.dead else max(0, min(self._store_blocks_max, link.store_blocks_max) - link.storing)

    def lend(self, link: TierLink, keys: Sequence[BlockKey], state: RequestState) -> TransferJob:
        """Open a store of READY blocks that the tier itself requested; it is not submitted."""
        transfer = TransferJob(self._jobs.new_id(), keys, self._primary.pin(keys), state.ctx)
        self._jobs.add(OpenJob(transfer, link, False, state))
        return transfer

    def promoted(self, keys: Sequence[BlockKey], link: TierLink) -> None:
        """Withhold promoted blocks from the faster tiers, which lack them: a later use may store them there."""
        faster = (link.bit - 1) & self._all_bits
        if faster and self._backfill_uses is not None:
            self._withhold(keys, faster)
            self._filling.update(keys)

    def note_sightings(self, keys: Sequence[BlockKey]) -> None:
        """Count one sighting of each block of a prefix.

        Counts of the end of a prefix are dropped before those of its start, so that no block is admitted without its
        predecessors.
        """
        # Read all counts before writing any, because a new entry may displace another of the same prefix.
        seen = {key: self._sightings.get(key, 0) + 1 for key in reversed(keys)}
        for key, count in seen.items():
            self._sightings[key] = count

    def exclude(self, keys: Sequence[BlockKey]) -> None:
        """Note that the policy of a request stores blocks nowhere, not even in the primary tier."""
        for link in self._links:
            link.unstored.note(keys, MissCause.STORE_POLICY)
        if not self._core.links:
            self._core.absent.note(keys, MissCause.STORE_POLICY)

    def use(self, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Store withheld and owed blocks that a request uses again, by its policy."""
        self._transient.difference_update(keys if state.policy.cpu else ())
        notes = [key for key in keys if (key in self._withheld or key in self._owed) and state.may_store(key)]
        ready = [key for key in notes if self._primary.lookup(key) is SlotState.READY]
        for link in state.store_links:
            bit = link.bit
            due = [key for key in ready if self._due(key, bit, state)]
            # Blocks that wait for room have been offered, and counted by their tenant's rate. Later ones wait, too.
            if link.queue and (waiting := [key for key in due if key in link.queue]):
                if state.policy.cpu:
                    state.note_cut(waiting[0], bit)
                due = [key for key in due if key not in link.queue]
            if due:
                self.send(link, due, state)

    def step(self) -> bool:
        """Store waiting blocks as far as there is room, and write back owed blocks in time for their eviction."""
        self._resume()
        if self._owed:
            self._primary.prepare_eviction(self._evictable_min - self._writing_back - len(self._wanted))
            self.write_wanted()
        return bool(self._withheld or self._owed or self._transient) or self.waits

    def _resume(self) -> None:
        """Store waiting blocks in queue order, as far as there is room."""
        for link in self._links:
            waiting = link.queue
            if link.dead:
                link.dropped += len(waiting)
                waiting.clear()
            if not waiting:
                continue
            due: list[BlockKey] = []
            room = self.room(link)
            while waiting and len(due) < room:
                key, _ = waiting.popitem(last=False)
                # A request that used the block may have stored it in the meantime.
                if self._withheld.get(key, 0) & link.bit:
                    due.append(key)
            self._pin_and_submit(link, self._permitted(link, due), None)

    def write_wanted(self) -> None:
        """Write back owed blocks that an allocation tried to evict."""
        self._wanted.update(dict.fromkeys(self._primary.take_wanted()))
        if self._wanted:
            self._write([key for key in self._wanted if key in self._owed])
            self._wanted = {key: None for key in self._wanted if key in self._owed}

    def write_all(self) -> None:
        """Store all waiting and owed blocks, as far as there is room."""
        self._resume()
        self._write(list(self._owed))

    def finish(self, job: OpenJob, result: JobResult) -> None:
        """Process the result of a store and unpin its slots."""
        keys, link = job.transfer.keys, job.link
        if job.write_back:
            self._writing_back -= len(keys)
        if job.abandoned:
            for slot in job.transfer.slots:
                self._primary.reclaim(slot)
            return
        link.stored += len(keys)
        if link.unstored:
            for key in keys:
                link.unstored.pop(key, None)
        if not result.success:
            stored = set(result.successful_keys)
            failed = [key for key in keys if key not in stored]
            link.stored -= len(failed)
            link.failed_stores += len(failed)
            outcome = next((outcome for outcome in result.outcomes if not outcome.ok), Outcome.IO_ERROR)
            self._withhold_from(link, failed, _CAUSES.get(outcome, MissCause.STORE_FAILED))
            if job.write_back:
                self.lost_blocks += len(failed)
        self._primary.unpin(reversed(keys))
        self.end_transit(keys)

    def end_transit(self, keys: Iterable[BlockKey]) -> None:
        """Drop the unpinned blocks that may not stay in the primary tier (``cpu: false``)."""
        if self._transient:
            gone = [key for key in keys if key in self._transient and self._primary.remove(key)]
            if gone:
                self._core.left(gone, RemovalCause.REMOVED)

    def left(self, keys: Iterable[BlockKey]) -> None:
        """Drop the state of blocks that left the primary tier."""
        for key in keys:
            self._withheld.pop(key, None)
            self._owed.pop(key, None)
            self._transient.discard(key)
            self._filling.discard(key)
            for link in self._links:
                # Neither withheld nor owed if a request that used the block stored it in the meantime.
                if link.queue and link.queue.pop(key, False) is None:
                    link.dropped += 1

    def reset(self) -> None:
        """Drop all state, because the primary tier is cleared."""
        for notes in (self._withheld, self._owed, self._transient, self._filling, self._wanted):
            notes.clear()
        for link in self._links:
            link.queue.clear()

    def _send_some(self, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Store blocks to the allowed tiers with room, and withhold them from the others."""
        policy = state.policy
        whole = keys
        self.active = True
        if not policy.cpu:
            self._transient.update(keys)
        for link in self._links:
            if link not in state.store_links:
                self._withhold_from(link, keys, MissCause.STORE_POLICY)
        if policy.min_uses > 1:
            early = [key for key in keys if self._sightings.get(key, 0) < policy.min_uses]
            for link in state.store_links:
                self._withhold_from(link, early, MissCause.MIN_USES)
            keys = [key for key in keys if self._sightings.get(key, 0) >= policy.min_uses]
        if policy.lazy and policy.cpu and state.store_links:
            mask = sum(link.bit for link in state.store_links)
            self._owed.update((key, self._owed.get(key, 0) | mask) for key in keys)
            self._primary.mark_dirty(keys)
            return
        for link in state.store_links:
            self.send(link, keys, state)
        if not policy.cpu:
            self.end_transit(whole)

    def send(self, link: TierLink, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Store READY blocks to a tier, even if they were offered to it before. Blocks without room wait."""
        if self._rates is not None:
            keys = self._within_rate(self._rates, link, keys, state)
        if state.cut:
            behind = [key for key in keys if state.is_cut(key, link.bit)]
            self._wait_for_room(link, behind)
            keys = [key for key in keys if not state.is_cut(key, link.bit)]
        room = self.room(link)
        if len(keys) > room:
            state.note_cut(keys[room], link.bit)
            self._wait_for_room(link, keys[room:])
            keys = keys[:room]
        self._pin_and_submit(link, keys, state)

    def _within_rate(
        self, rates: Rates, link: TierLink, keys: Sequence[BlockKey], state: RequestState
    ) -> Sequence[BlockKey]:
        """Return the leading blocks that the tenant's rate allows, and withhold the rest.

        Once the rate is exceeded, the request stores nothing more to this tier.
        """
        count = 0 if state.over_rate & link.bit or not keys else rates.take(keys)
        if count < len(keys):
            state.over_rate |= link.bit
            self._withhold_from(link, keys[count:], MissCause.RATE)
        return keys[:count]

    def _wait_for_room(self, link: TierLink, keys: Sequence[BlockKey]) -> None:
        self._withhold_from(link, keys, MissCause.SHED)
        if link.dead:
            link.dropped += len(keys)
        else:
            link.queue.update(dict.fromkeys(keys))

    def _write(self, keys: Sequence[BlockKey]) -> None:
        """Write back owed blocks, as far as there is room. Blocks owed to a dead tier count as lost."""
        for link in self._links:
            due = self._permitted(link, [key for key in keys if self._owed.get(key, 0) & link.bit])
            if link.dead:
                self.lost_blocks += len(due)
                self._settle(due, link.bit)
                self._withhold(due, link.bit)
                continue
            due = due[: self.room(link)]
            self._pin_and_submit(link, due, None, write_back=True)
            self._writing_back += len(due)

    def _permitted(self, link: TierLink, keys: list[BlockKey]) -> list[BlockKey]:
        """Return the blocks that are not forbidden by now; the tier gets the others only if they are stored again."""
        if not self._expiry.active:
            return keys
        forbidden = {key for key in keys if self._expiry.forbids(key)}
        self._settle(tuple(forbidden), link.bit)
        return [key for key in keys if key not in forbidden]

    def _pin_and_submit(
        self, link: TierLink, keys: Sequence[BlockKey], state: RequestState | None, *, write_back: bool = False
    ) -> None:
        if keys:
            slots = self._primary.pin(keys)
            self._settle(keys, link.bit)
            self._submit(link, keys, slots, state, write_back=write_back)

    def _submit(
        self,
        link: TierLink,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        state: RequestState | None,
        *,
        write_back: bool = False,
    ) -> None:
        """Submit a store of pinned blocks. If the tier raises, the pins stay, because it may be reading the slots."""
        transfer = TransferJob(self._jobs.new_id(), keys, slots, None if state is None else state.ctx)
        self._jobs.submit(OpenJob(transfer, link, False, state, write_back=write_back))

    def _due(self, key: BlockKey, bit: int, state: RequestState) -> bool:
        policy = state.policy
        if self._owed.get(key, 0) & bit:
            return not policy.lazy
        if not self._withheld.get(key, 0) & bit:
            return False
        uses = policy.min_uses
        if key in self._filling:
            uses = max(uses, self._backfill_uses or 1)
        return uses <= 1 or self._sightings.get(key, 0) >= uses

    def _withhold_from(self, link: TierLink, keys: Sequence[BlockKey], cause: MissCause) -> None:
        self._withhold(keys, link.bit)
        link.unstored.note(keys, cause)

    def _withhold(self, keys: Sequence[BlockKey], mask: int) -> None:
        self.active = True
        for key in keys:
            self._withheld[key] = self._withheld.get(key, 0) | mask

    def _settle(self, keys: Sequence[BlockKey], bit: int) -> None:
        """Clear a tier's bit in the masks of blocks to be stored there; the job's pins protect them from now on."""
        for notes in (self._withheld, self._owed):
            if not notes:
                continue
            for key in keys:
                mask = notes.get(key, 0)
                if mask & bit and mask != bit:
                    notes[key] = mask & ~bit
                elif mask == bit:
                    del notes[key]
                    if notes is self._owed:
                        self._primary.mark_clean((key,))
                    else:
                        self._filling.discard(key)
