"""What the manager does for tenants: rates of stores and loads, and counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.primary.tier import PrimaryTier
from kvstore.quantity import ByteSize
from kvstore.tenants import OTHERS, Account, Accounts, Tenants
from kvstore.types import BlockKey

__all__ = ["TenantStats", "TenantTable"]

_BURST_S = 1.0
"""Time for which a rate may be saved up."""


@dataclass(slots=True)
class TenantStats:
    """Blocks of one tenant, or of all without a name, since the start.

    Attributes:
        blocks: In the primary tier now.
        stored: Computed by the engine, and stored in the primary tier.
        loaded: Loaded by the engine, from any tier.
        evicted: Evicted from the primary tier.
        unsaved: Not stored in a tier, because of ``store_rate``.
        declined: Computed again although a tier had them, because of ``load_rate``.
    """

    blocks: int = 0
    stored: int = 0
    loaded: int = 0
    evicted: int = 0
    unsaved: int = 0
    declined: int = 0


class TenantTable:
    """The tenants of a manager. The primary tier is shared among them from now on.

    Args:
        tenants: The rule and the shares.
        primary: The primary tier, still empty.
        clock: Monotonic seconds.

    Attributes:
        limits_stores: Whether any tenant has a rate of stores.
        limits_loads: Whether any has one of loads.

    Raises:
        ConfigError: The primary tier is not empty.
    """

    def __init__(self, tenants: Tenants, primary: PrimaryTier, clock: Callable[[], float]) -> None:
        self._accounts = Accounts(tenants, primary.slots, clock)
        self._evictions = primary.share(self._accounts)
        self._block_bytes = primary.slot_bytes
        self._clock = clock
        self._stats = {name: TenantStats() for name in (*tenants.named, OTHERS)}
        everyone = (*tenants.named.values(), tenants.others)
        self.limits_stores = any(each.store_rate is not None for each in everyone)
        self.limits_loads = any(each.load_rate is not None for each in everyone)
        self._stores: dict[Account, _Bucket] = {}
        self._loads: dict[Account, _Bucket] = {}

    def note_loaded(self, keys: Sequence[BlockKey]) -> None:
        """Count blocks of one tenant that the engine loads."""
        if keys:
            self._of(keys).loaded += len(keys)

    def note_stored(self, keys: Sequence[BlockKey]) -> None:
        """Count blocks of one tenant that the engine stores."""
        if keys:
            self._of(keys).stored += len(keys)

    def take_stores(self, keys: Sequence[BlockKey]) -> int:
        """Return how many blocks of one tenant may be stored in a tier now, the first ones, and count them."""
        account = self._accounts.of(keys[0])
        bucket = self._bucket(self._stores, account, account.tenant.store_rate)
        count = len(keys) if bucket is None else bucket.take(len(keys), self._clock())
        self._of(keys).unsaved += len(keys) - count
        return count

    def may_load(self, key: BlockKey) -> bool:
        """Return whether a block may be loaded from a tier now; if not, count it."""
        account = self._accounts.of(key)
        bucket = self._bucket(self._loads, account, account.tenant.load_rate)
        if bucket is None or bucket.level(self._clock()) >= 1:
            return True
        self._of((key,)).declined += 1
        return False

    def note_load(self, key: BlockKey) -> None:
        """Note that a block that :meth:`may_load` is being loaded."""
        account = self._accounts.of(key)
        bucket = self._bucket(self._loads, account, account.tenant.load_rate)
        if bucket is not None:
            bucket.take(1, self._clock())

    def stats(self) -> dict[str, TenantStats]:
        """Return the counts by name."""
        for stats in self._stats.values():
            stats.blocks = 0
        for account in self._accounts:
            self._stats[account.name].blocks += account.blocks
        for name, stats in self._stats.items():
            stats.evicted = self._evictions[name]
        return self._stats

    def _of(self, keys: Sequence[BlockKey]) -> TenantStats:
        return self._stats[self._accounts.of(keys[0]).name]

    def _bucket(self, buckets: dict[Account, _Bucket], account: Account, rate: int | str | None) -> _Bucket | None:
        if rate is None:
            return None
        if account not in buckets:
            buckets[account] = _Bucket(ByteSize(rate) / self._block_bytes, self._clock())
        return buckets[account]


class _Bucket:
    """Blocks that may pass now: filled at a rate, for at most ``_BURST_S``, but at least for one block."""

    def __init__(self, blocks_per_s: float, now: float) -> None:
        self._rate = blocks_per_s
        self._size = max(1.0, blocks_per_s * _BURST_S)
        self._level = self._size
        self._filled_at = now

    def level(self, now: float) -> float:
        """Return how many blocks may pass."""
        self._level = min(self._size, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now
        return self._level

    def take(self, count: int, now: float) -> int:
        """Return how many of some blocks may pass, and let them."""
        passing = min(count, int(self.level(now)))
        self._level -= passing
        return passing
