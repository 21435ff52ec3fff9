"""How long blocks stay: retention and expiry.

Retained blocks have a temporary priority in the primary tier, within a share of it. Of blocks with equal priority,
those with the latest end are evicted first: the end approximates the next use, and the best block to evict is the one
used farthest in the future (Belady, 1966). Expired blocks leave every tier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.bounded import BoundedDict
from kvstore.primary.tier import SlotState
from kvstore.tenants import TAG_BYTES
from kvstore.tiering.core import Core, Part
from kvstore.tiering.deadlines import Deadlines
from kvstore.tiering.link import TierLink
from kvstore.tiering.policy import PRIORITY_MAX
from kvstore.tiering.requests import RequestState
from kvstore.types import BlockKey, MissCause, RemovalCause

_HAND_OVER: Final = PRIORITY_MAX + 1
"""Priority of blocks that another engine will fetch."""


class Retention(Part):
    """Gives blocks a priority until its deadline. Another request can replace or end it earlier.

    Blocks that another engine will fetch have the highest priority, which no request changes, until that engine has
    fetched them.
    """

    def __init__(self, core: Core) -> None:
        self._primary = core.primary
        self._seconds_max = core.config.retain_s_max
        self._clock = core.clock
        self._ends: Deadlines[BlockKey] = Deadlines()
        self._fetches: dict[BlockKey, int] = {}
        """Outstanding fetches of each block that other engines will fetch."""

    def __repr__(self) -> str:
        """Show how many priorities there are, and how much memory their ends take."""
        return f"Retention({self._ends}, {len(self._fetches)} to be fetched)"

    def use(self, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Give blocks that a request stores or uses the priorities of its policy."""
        for part in state.policy.retain:
            self._begin(state.after(part.after, keys), part.priority, part.seconds)
        if state.hands_over:
            self.hand_over(keys, state)

    def hand_over(self, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Retain the READY blocks of a request for the engine that takes it over; each request adds one fetch."""
        new = [key for key in keys if key not in state.handed and self._primary.lookup(key) is SlotState.READY]
        self._begin(new, _HAND_OVER, state.ctx.hand_over_s)
        for key in new:
            self._fetches[key] = self._fetches.get(key, 0) + 1
        state.handed.update(new)

    def fetched(self, keys: Iterable[BlockKey]) -> None:
        """Note that another engine has fetched blocks."""
        for key in keys:
            due = self._fetches.get(key, 0)
            if due > 1:
                self._fetches[key] = due - 1
            elif due:
                self.end((key,))

    def end_request(self, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Give the blocks of a request that has ended their priorities, or demote them."""
        self.use(keys, state)
        if state.policy.demote_tokens is not None:
            ours = [key for key in state.after(state.policy.demote_tokens, keys) if key not in self._fetches]
            self._primary.demote(ours)

    def _begin(self, keys: Iterable[BlockKey], priority: int, seconds: float | None) -> None:
        """Give the READY blocks a priority for a time; None: the longest time. Priority 0 ends the priority."""
        if priority != _HAND_OVER and self._fetches:
            keys = [key for key in keys if key not in self._fetches]
        if not priority:
            self.end(keys)
            return
        end = self._clock() + (self._seconds_max if seconds is None else min(seconds, self._seconds_max))
        rank = priority, -int(end)
        for key in reversed(tuple(keys)):  # The end of a prefix is evicted first.
            if self._primary.lookup(key) is SlotState.READY:
                self._primary.retain(key, rank)
                self._ends.set(key, end)
                self.active = True

    def end(self, keys: Iterable[BlockKey]) -> None:
        """End the priority of blocks."""
        for key in keys:
            self._fetches.pop(key, None)
            self._primary.end_retention(key)

    def step(self) -> bool:
        """End the priorities past their deadline."""
        self.end(self._ends.take_due(self._clock()))
        return bool(self._ends)

    def left(self, keys: Sequence[BlockKey]) -> None:
        """Drop the state of blocks that left the primary tier."""
        for key in keys:
            self._ends.remove(key)
            self._fetches.pop(key, None)

    def reset(self) -> None:
        """Drop all state, because the primary tier is cleared."""
        self.active = False
        self._ends.clear()
        self._fetches.clear()


_EXPIRED_PER_STEP: Final = 1024

_BLOCKS_MAX: Final = 1 << 18
"""Maximum blocks with a lifetime (beyond it, the earliest lifetimes end early), and maximum forbidden blocks."""

_FORGETTING_S: Final = 60.0
"""Time for which an idle engine makes steps to forget a tenant. After that, it continues with the next request."""


@dataclass(slots=True)
class _Forgetting:
    """Progress of forgetting a tenant."""

    keys: set[BlockKey]  # Remaining blocks of the tenant in the primary tier; some may still be in use.
    links: list[TierLink]  # Tiers that may still hold blocks of the tenant.
    since: float  # Start time.


class Expiry(Part):
    """Tracks forbidden blocks and removes them from all tiers.

    Blocks are forbidden individually, or by tenant while the tenant is being forgotten. A tier's ``forget`` is called
    once no store of the tenant's blocks is in progress there. No new store begins, so the tier removes all of them.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._primary = core.primary
        self._clock = core.clock
        self._ends: Deadlines[BlockKey] = Deadlines()
        """Ends of lifetimes."""
        self._gone: BoundedDict[BlockKey, RemovalCause] = BoundedDict(_BLOCKS_MAX)
        """Blocks that stay forbidden until they are stored again, because a tier may still hold them for a while."""
        self._forgetting: dict[bytes, _Forgetting] = {}
        """By tag of the tenant."""
        self.expired = 0  # Number of blocks whose lifetime has ended.

    def forbids(self, key: BlockKey) -> bool:
        """Whether a block must not be used any more."""
        return key in self._gone or self._ends.get(key, math.inf) <= self._clock() or self.forgets(key)

    def cause_of(self, key: BlockKey) -> MissCause:
        """Return why a forbidden block is missing."""
        return MissCause.REMOVED if self.forgets(key) else MissCause(self._gone.get(key) or RemovalCause.EXPIRED)

    def forgets(self, key: BlockKey) -> bool:
        """Whether a block belongs to a tenant that is being forgotten."""
        return bool(self._forgetting) and key[:TAG_BYTES] in self._forgetting

    @property
    def tenants_forgotten(self) -> int:
        """Number of tenants that are being forgotten."""
        return len(self._forgetting)

    @property
    def removing(self) -> bool:
        """Whether a tier may still hold blocks of a tenant that is being forgotten."""
        return any(case.links for case in self._forgetting.values())

    @property
    def pending(self) -> bool:
        """Whether steps are needed to forget tenants; false after a minute, so that a failed medium ends the wait."""
        since = self._clock() - _FORGETTING_S
        return any(case.since > since for case in self._forgetting.values())

    def store(self, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Set the lifetime of blocks that a request stores now."""
        ttl_s = state.policy.ttl_s
        if not self.active and ttl_s is None:
            return
        self.active = True
        for key in keys:
            self._gone.pop(key, None)
            self._ends.remove(key)
            if ttl_s is not None:
                self._ends.set(key, self._clock() + ttl_s)

    def use(self, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Extend the lifetime of blocks that a request uses. The longest applies; None removes the limit."""
        ttl_s = state.policy.ttl_s
        for key in keys if self.active else ():
            if ttl_s is None:
                self._ends.remove(key)
            elif self._ends.get(key, math.inf) < self._clock() + ttl_s:
                self._ends.set(key, self._clock() + ttl_s)

    def end_request(self, keys: Sequence[BlockKey], state: RequestState) -> None:
        """Forget the blocks of a request that has ended, or its tenant."""
        if state.policy.forget_tokens is not None:
            self.remove(state.after(state.policy.forget_tokens, keys), RemovalCause.REMOVED)
        if state.policy.forget_tenant and self._core.tenants is not None and (state.ctx.tag or keys):
            self.forget_tenant((state.ctx.tag or keys[0])[:TAG_BYTES])

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        """Remove blocks from every tier; they are forbidden until stored again."""
        self.active = True
        for key in keys:
            self._ends.remove(key)
            self._gone[key] = cause
        self._drop(keys, cause)
        for link in self._core.links:
            link.call(link.tier.remove, keys, cause, otherwise=None)

    def forget_tenant(self, tag: bytes) -> None:
        """Remove all blocks of a tenant from every tier. Until they are gone, its requests find and store nothing."""
        if tag not in self._forgetting:
            keys = {key for key in self._primary.keys() if key.startswith(tag)}  # noqa: SIM118 (not a mapping)
            links = [link for link in self._core.links if link.takes_stores]
            self._forgetting[tag] = _Forgetting(keys, links, self._clock())
        self.active = True

    def make_way(self, keys: Sequence[BlockKey]) -> None:
        """Drop forbidden blocks that transfers kept in the primary tier, before they are stored again."""
        self._drop([key for key in keys if self.forbids(key)], RemovalCause.EXPIRED)

    def arrived(self, link: TierLink, keys: Sequence[BlockKey]) -> None:
        """Remove blocks that became forbidden while a tier stored them from that tier and the primary tier."""
        late = [key for key in keys if self.forbids(key)]
        if late:
            self._drop(late, RemovalCause.EXPIRED)
            link.call(link.tier.remove, late, RemovalCause.EXPIRED, otherwise=None)

    def step(self) -> bool:
        """Remove a bounded number of expired blocks, and all removable blocks of forgotten tenants."""
        gone = self._ends.take_due(self._clock(), _EXPIRED_PER_STEP, keep=_BLOCKS_MAX)
        if gone:
            self.expired += len(gone)
            self.remove(gone, RemovalCause.EXPIRED)
        for tag, case in list(self._forgetting.items()):
            self._drop(list(case.keys), RemovalCause.REMOVED)
            case.keys = {key for key in case.keys if key in self._primary}
            stores = [job for job in self._core.jobs if not job.is_load]
            storing = {job.link for job in stores if any(key.startswith(tag) for key in job.transfer.keys)}
            case.links = [link for link in case.links if link in storing or not link.forget(tag)]
            if not case.keys and not case.links:
                del self._forgetting[tag]
        return bool(self._ends or self._gone or self._forgetting)

    def _drop(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        self._core.left([key for key in keys if self._primary.remove(key)], cause)
