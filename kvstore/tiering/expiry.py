"""Expiry, removal, and forgetting of tenants: removal of forbidden blocks from every tier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.bounded import BoundedDict
from kvstore.tenants import TAG_BYTES
from kvstore.tiering.core import Core
from kvstore.tiering.deadlines import Deadlines
from kvstore.tiering.link import TierLink
from kvstore.types import BlockKey, RemovalCause

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


class Expiry:
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
        self._gone: BoundedDict[BlockKey, None] = BoundedDict(_BLOCKS_MAX)
        """Blocks that stay forbidden until they are stored again, because a tier may still hold them for a while."""
        self._forgetting: dict[bytes, _Forgetting] = {}
        """By tag of the tenant."""
        self.active = False  # Whether any block has a lifetime or is forbidden; if not, no call is needed.
        self.expired = 0  # Number of blocks whose lifetime has ended.

    def forbids(self, key: BlockKey) -> bool:
        """Whether a block must not be used any more."""
        return key in self._gone or self._ends.get(key, math.inf) <= self._clock() or self.forgets(key)

    def forgets(self, key: BlockKey) -> bool:
        """Whether a block belongs to a tenant that is being forgotten."""
        return bool(self._forgetting) and key[:TAG_BYTES] in self._forgetting

    @property
    def tenants_forgotten(self) -> int:
        """Number of tenants that are being forgotten."""
        return len(self._forgetting)

    @property
    def pending(self) -> bool:
        """Whether steps are needed to forget tenants; false after a minute, so that a failed medium ends the wait."""
        since = self._clock() - _FORGETTING_S
        return any(case.since > since for case in self._forgetting.values())

    def begin(self, keys: Sequence[BlockKey], ttl_s: float | None) -> None:
        """Set the lifetime of blocks stored now; None: unlimited."""
        if not self.active and ttl_s is None:
            return
        self.active = True
        for key in keys:
            self._gone.pop(key, None)
            self._ends.remove(key)
            if ttl_s is not None:
                self._ends.set(key, self._clock() + ttl_s)

    def extend(self, keys: Sequence[BlockKey], ttl_s: float | None) -> None:
        """Extend the lifetime of blocks that a request uses. The longest applies; None removes the limit."""
        for key in keys if self.active else ():
            if ttl_s is None:
                self._ends.remove(key)
            elif self._ends.get(key, math.inf) < self._clock() + ttl_s:
                self._ends.set(key, self._clock() + ttl_s)

    def remove(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        """Remove blocks from every tier; they are forbidden until stored again."""
        self.active = True
        for key in keys:
            self._ends.remove(key)
            self._gone[key] = None
        self._drop(keys, cause)
        for link in self._core.links:
            link.call("remove", keys, cause, otherwise=None)

    def forget_tenant(self, tag: bytes) -> None:
        """Remove all blocks of a tenant from every tier. Until they are gone, its requests find and store nothing."""
        if tag not in self._forgetting:
            keys = {key for key in self._primary.keys() if key.startswith(tag)}  # noqa: SIM118 (not a mapping)
            links = [link for link in self._core.links if link.takes_stores]
            self._forgetting[tag] = _Forgetting(keys, links, self._clock())
        self.active = True

    def make_way(self, keys: Sequence[BlockKey]) -> None:
        """Drop forbidden blocks that pins kept in the primary tier, before they are stored again."""
        self._drop([key for key in keys if self.forbids(key)], RemovalCause.EXPIRED)

    def arrived(self, link: TierLink, keys: Sequence[BlockKey]) -> None:
        """Remove blocks that became forbidden while a tier stored them from that tier and the primary tier."""
        late = [key for key in keys if self.forbids(key)]
        if late:
            self._drop(late, RemovalCause.EXPIRED)
            link.call("remove", late, RemovalCause.EXPIRED, otherwise=None)

    def sweep(self) -> None:
        """Remove a bounded number of expired blocks, and all removable blocks of forgotten tenants; once per step."""
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
        self.active = bool(self._ends or self._gone or self._forgetting)

    def _drop(self, keys: Sequence[BlockKey], cause: RemovalCause) -> None:
        self._core.left([key for key in keys if self._primary.remove(key)], cause)
