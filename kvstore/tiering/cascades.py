"""Cascades: stores of blocks from the primary tier to the tiers below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.bounded import BoundedDict
from kvstore.tiering.admission import Admission
from kvstore.tiering.core import Core, Part
from kvstore.tiering.jobs import OpenJob
from kvstore.tiering.link import TierLink
from kvstore.tiering.policy import OffloadPolicy
from kvstore.tiering.requests import RequestState
from kvstore.tiering.retention import Expiry
from kvstore.tiering.tenants import Rates
from kvstore.types import BlockKey, JobResult, MissCause, Outcome, RemovalCause, TransferJob

_LAZY_SHARE: Final = 0.125
"""Share of the slots kept free or ready for eviction while there are lazy blocks, so that a burst of stores need not
wait for a tier."""

_CAUSES: Final = {Outcome.SHED: MissCause.SHED, Outcome.NO_SPACE: MissCause.NO_SPACE}
"""Causes of later misses, by the outcome of a store; that of all others is :attr:`MissCause.STORE_FAILED`."""

_SIGHTINGS_MAX: Final = 1 << 17
"""Maximum blocks with a count of uses; some megabytes of memory."""


@dataclass(slots=True)
class Below:
    """The stores of a block that are left, and whether it stays above; only for blocks of which something is left."""

    withheld: int = 0  # Mask of the tiers from which it is withheld.
    pending: int = 0  # Mask of the tiers to which its store is pending.
    uses: int = 1  # Uses that a withheld store needs at least; more for a block that was promoted from a slower tier.
    stays: bool = True  # Whether it may stay in the primary tier (not with ``cpu: false``).


class Cascades(Part):
    """Decides which blocks of the primary tier go to which tiers, when, and how many at a time.

    A block is *withheld* from a tier if it was not stored there (policy, too few sightings, no room, its tenant's rate,
    a failure). It is stored when a request that may store it uses it again. A store is *pending* if it must be made
    before the primary tier evicts the block (``lazy``). A block withheld for lack of room also joins the tier's queue
    (``TierLink.queue``), and is stored when there is room.
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
        self._backfill_uses = config.backfill_uses
        self._below: defaultdict[BlockKey, Below] = defaultdict(Below)
        self._pending_blocks = 0  # Blocks with pending stores.
        self._wanted: dict[BlockKey, None] = {}
        """Blocks with pending stores that are due for eviction, and not yet being stored."""
        self._writing_back = 0  # Blocks whose pending stores have begun.
        self._sightings: BoundedDict[BlockKey, int] = BoundedDict(_SIGHTINGS_MAX)
        """Uses of blocks, for admission. The least recently seen blocks are dropped first."""
        self._admissions: dict[int, Admission] = {}
        """Choice of each tier, by its bit; empty until the first request that leaves the choice to the tiers."""
        self.lost_blocks = 0  # Blocks whose pending stores failed.

    @property
    def waits(self) -> bool:
        """Whether blocks wait for room. Without unfinished stores there is room, and the next step stores them."""
        return any(link.queue for link in self._links)

    @property
    def unsent(self) -> int:
        """Number of blocks whose stores are pending or wait for room, counted for each tier."""
        pending = sum(below.pending.bit_count() for below in self._below.values()) if self._pending_blocks else 0
        return pending + sum(len(link.queue) for link in self._links)

    @property
    def making_room(self) -> bool:
        """Whether write-backs are running or due, which free slots."""
        return bool(self._pending_blocks or self._writing_back)

    def stored(self, keys: Sequence[BlockKey], slots: Sequence[int], state: RequestState) -> None:
        """Commit filled blocks in the primary tier and store them below, by their request's policy."""
        policy = state.policy
        links = state.store_links
        plain = policy.min_uses == 1 and not policy.lazy and policy.cpu and not state.cut and self._rates is None
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
            self._withhold(keys, faster, self._backfill_uses)

    def choose_uses(self) -> None:
        """Let each tier choose how often a block has to be used before it is stored."""
        if not self._admissions:
            self._admissions = {link.bit: Admission(link, self._primary.slots) for link in self._links}

    def note_sightings(self, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Count one sighting of each block of a prefix by a request.

        Counts of the end of a prefix are dropped before those of its start, so that no block is admitted without its
        predecessors.
        """
        # Read all counts before writing any, because a new entry may displace another of the same prefix.
        seen = {key: self._sightings.get(key, 0) + 1 for key in reversed(keys)}
        for key, count in seen.items():
            self._sightings[key] = count
        for key in keys if self._admissions else ():
            digest = xxh3_64_intdigest(key)
            for link in self._links:
                admission = self._admissions[link.bit]
                if not digest & admission.mask:
                    stores = link in state.store_links and state.may_store(key)
                    admission.use(key, seen[key], state.policy.min_uses if stores else inf)

    def exclude(self, keys: Sequence[BlockKey]) -> None:
        """Note that the policy of a request stores blocks nowhere, not even in the primary tier."""
        self._core.note_unstored(self._links, keys, MissCause.STORE_POLICY)

    def use(self, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Make withheld and pending stores of blocks that a request uses again, by its policy."""
        left = [key for key in keys if key in self._below]
        if state.policy.cpu:
            for key in left:
                self._below[key].stays = True
                self._drop_if_done(key)
        for link in state.store_links:
            bit = link.bit
            due = [key for key in left if state.may_store(key) and self._due(key, bit, state)]
            # Blocks that wait for room have been offered, and counted by their tenant's rate. Later ones wait, too.
            if link.queue and (waiting := [key for key in due if key in link.queue]):
                if state.policy.cpu:
                    state.note_cut(waiting[0], bit)
                due = [key for key in due if key not in link.queue]
            if due:
                self.send(link, due, state)

    def step(self) -> bool:
        """Store waiting blocks as far as there is room, and make pending stores in time for evictions."""
        self._resume()
        if self._pending_blocks:
            self._primary.prepare_eviction(self._evictable_min - self._writing_back - len(self._wanted))
            self.write_wanted()
        return bool(self._below) or self.waits

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
                if key in self._below and self._below[key].withheld & link.bit:
                    due.append(key)
            self._pin_and_submit(link, self._permitted(link, due), None)

    def write_wanted(self) -> None:
        """Make the pending stores of blocks that an allocation tried to evict."""
        self._wanted.update(dict.fromkeys(self._primary.take_wanted()))
        if self._wanted:
            self._write(self._wanted)
            self._wanted = {key: None for key in self._wanted if self._is_pending(key)}

    def write_all(self) -> None:
        """Make all waiting and pending stores, as far as there is room."""
        self._resume()
        self._write(list(self._below))

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
        if self._below:
            passing = [key for key in keys if key in self._below and not self._below[key].stays]
            gone = list(filter(self._primary.remove, passing))
            if gone:
                self._core.left(gone, RemovalCause.REMOVED)

    def left(self, keys: Iterable[BlockKey]) -> None:
        """Drop the state of blocks that left the primary tier."""
        for key in keys:
            self._pending_blocks -= self._is_pending(key)
            self._below.pop(key, None)
            for link in self._links:
                # Neither withheld nor pending if a request that used the block stored it in the meantime.
                if link.queue and link.queue.pop(key, False) is None:
                    link.dropped += 1

    def reset(self) -> None:
        """Drop all state, because the primary tier is cleared, and the others begin a new epoch."""
        self._below.clear()
        self._wanted.clear()
        if self._admissions:
            self._admissions.clear()
            self.choose_uses()
        self._pending_blocks = 0
        for link in self._links:
            link.queue.clear()

    def _send_some(self, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Store blocks to the allowed tiers with room, and withhold them from the others."""
        policy = state.policy
        whole = keys
        self.active = True
        if not policy.cpu:
            for key in keys:
                self._below[key].stays = False
        for link in self._links:
            if link not in state.store_links:
                self._withhold_from(link, keys, MissCause.STORE_POLICY)
        later: dict[BlockKey, None] = {}
        for link in state.store_links:
            due = self._admitted(link, keys, policy)
            if not (policy.lazy and policy.cpu):
                self.send(link, due, state)
                continue
            for key in due:
                self._pending_blocks += not self._is_pending(key)
                self._below[key].pending |= link.bit
            later.update(dict.fromkeys(due))
        if later:
            self._primary.mark_dirty(later)
        if not policy.cpu:
            self.end_transit(whole)

    def _admitted(self, link: TierLink, keys: Sequence[BlockKey], policy: OffloadPolicy) -> Sequence[BlockKey]:
        """Return the new blocks with enough uses, and withhold the others."""
        uses = policy.min_uses or self._admissions[link.bit].min_uses
        if uses <= 1:
            return keys
        early = [key for key in keys if self._sightings.get(key, 0) < uses]
        self._withhold_from(link, early, MissCause.MIN_USES)
        return [key for key in keys if self._sightings.get(key, 0) >= uses]

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

    def _write(self, keys: Iterable[BlockKey]) -> None:
        """Make pending stores of blocks, as far as there is room. Those to a dead tier count as lost."""
        for link in self._links:
            pending = [key for key in keys if key in self._below and self._below[key].pending & link.bit]
            due = self._permitted(link, pending)
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
        below, policy = self._below.get(key), state.policy
        if below is None or below.pending & bit:
            return below is not None and not policy.lazy
        uses = max(policy.min_uses or self._admissions[bit].min_uses, below.uses)
        return bool(below.withheld & bit) and (uses <= 1 or self._sightings.get(key, 0) >= uses)

    def _is_pending(self, key: BlockKey) -> bool:
        return key in self._below and self._below[key].pending > 0

    def _withhold_from(self, link: TierLink, keys: Sequence[BlockKey], cause: MissCause) -> None:
        self._withhold(keys, link.bit)
        link.unstored.note(keys, cause)

    def _withhold(self, keys: Sequence[BlockKey], mask: int, uses: int = 1) -> None:
        self.active = True
        for key in keys:
            below = self._below[key]
            below.withheld |= mask
            below.uses = max(below.uses, uses)

    def _settle(self, keys: Sequence[BlockKey], bit: int) -> None:
        """Clear a tier's bit in the masks of blocks to be stored there; the job's pins protect them from now on."""
        for key in keys if self._below else ():
            if (below := self._below.get(key)) is None:
                continue
            below.withheld &= ~bit
            if below.pending & bit:
                below.pending &= ~bit
                if not below.pending:
                    self._pending_blocks -= 1
                    self._primary.mark_clean((key,))
            self._drop_if_done(key)

    def _drop_if_done(self, key: BlockKey) -> None:
        below = self._below[key]
        if below.stays and not (below.withheld or below.pending):
            del self._below[key]
