"""Rate limits and counts of tenants."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.primary.tier import PrimaryTier
from kvstore.quantity import ByteSize
from kvstore.tenants import OTHERS, Account, Accounts, Tenants
from kvstore.types import BlockKey

_BURST_S = 1.0
"""Maximum burst, in seconds of the rate."""


@dataclass(slots=True)
class TenantStats:
    """Blocks of one tenant, or of all unnamed tenants together, since the start."""

    blocks: int = 0  # In the primary tier now.
    stored: int = 0  # Computed by the engine and stored in the primary tier.
    loaded: int = 0  # Loaded by the engine, from any tier.
    evicted: int = 0  # Evicted from the primary tier.
    unsaved: int = 0  # Not stored in a tier, because of ``store_rate``.
    declined: int = 0  # Computed again although a tier held them, because of ``load_rate``.


class Rates:
    """Token buckets that limit the blocks of each tenant stored in the tiers, or loaded from them.

    A bucket holds ``_BURST_S`` of the rate, and at least one block.
    """

    def __init__(self, accounts: Accounts, name: str, block_bytes: int, clock: Callable[[], float]) -> None:
        self._accounts = accounts
        self._name = name
        self._block_bytes = block_bytes
        self._clock = clock
        self._blocks_per_s: dict[Account, float] = {}
        self._saved: dict[Account, tuple[float, float]] = {}
        """Blocks available, and the time of that level."""
        self.refused: Counter[str] = Counter()
        """Refused blocks, by name of the tenant."""

    def allows(self, key: BlockKey) -> bool:
        """Return whether a block may pass now; if not, count it."""
        account = self._accounts.of(key)
        if self._level(account) >= 1.0:
            return True
        self.refused[account.name] += 1
        return False

    def take(self, keys: Sequence[BlockKey]) -> int:
        """Take the blocks of one tenant from its bucket. Return how many may pass; the rest count as refused."""
        account = self._accounts.of(keys[0])
        level = self._level(account)
        passing = len(keys) if level == math.inf else min(len(keys), int(level))
        self._saved[account] = level - passing, self._clock()
        self.refused[account.name] += len(keys) - passing
        return passing

    def _level(self, account: Account) -> float:
        rate = self._blocks_per_s.get(account)
        if rate is None:
            limit = getattr(account.tenant, self._name)
            rate = self._blocks_per_s[account] = math.inf if limit is None else ByteSize(limit) / self._block_bytes
        if rate == math.inf:
            return rate
        most = max(1.0, rate * _BURST_S)
        now = self._clock()
        level, since = self._saved.get(account, (most, now))
        return min(most, level + (now - since) * rate)


class TenantTable:
    """The tenants of a manager. Creating it divides the primary tier among them.

    Args:
        primary: The primary tier, still empty.

    Attributes:
        stores: Rates of stores; None if no tenant has one.
        loads: Rates of loads; None if no tenant has one.

    Raises:
        ConfigError: The primary tier is not empty.
    """

    def __init__(self, tenants: Tenants, primary: PrimaryTier, clock: Callable[[], float]) -> None:
        self._accounts = Accounts(tenants, primary.slots, clock)
        primary.share(self._accounts)
        self._stats = {name: TenantStats() for name in (*tenants.named, OTHERS)}
        self.stores, self.loads = (
            Rates(self._accounts, name, primary.slot_bytes, clock)
            if any(getattr(tenant, name) is not None for tenant in (*tenants.named.values(), tenants.others))
            else None
            for name in ("store_rate", "load_rate")
        )

    def of(self, key: BlockKey) -> TenantStats:
        """Return the counts of a block's tenant."""
        return self._stats[self._accounts.of(key).name]

    def stats(self) -> dict[str, TenantStats]:
        """Return the counts by name."""
        for name, stats in self._stats.items():
            stats.blocks = stats.evicted = 0
            stats.unsaved = 0 if self.stores is None else self.stores.refused[name]
            stats.declined = 0 if self.loads is None else self.loads.refused[name]
        for account in self._accounts:
            stats = self._stats[account.name]
            stats.blocks += account.blocks
            stats.evicted += account.evicted
        return self._stats
