"""Tenants: ownership of blocks, and each tenant's share of a cache.

The first bytes of a block's key are the tag of its tenant, so the key identifies the tenant everywhere. Blocks of
different tenants have different keys even if their content is equal, so no tenant finds blocks stored by another.
"""

from __future__ import annotations

import hashlib
import heapq
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import msgspec

from kvstore.config import did_you_mean
from kvstore.errors import ConfigError
from kvstore.quantity import ByteSize, Seconds
from kvstore.types import BlockKey

TAG_BYTES: Final = 8
"""Length of a tenant's tag, at the start of a key."""

OTHERS: Final = "others"
"""Name under which all unnamed tenants are counted."""

_RULES: Final = ("cache_salt", "adapter", "parameter")

_ABOVE_MAXIMUM, _IDLE, _ACTIVE = range(3)
"""Order in which blocks are taken from accounts, by the state of the account."""

_PIECE_BLOCKS: Final = 8
"""Minimum blocks taken from an account at a time, if available."""

_tag_in: Final = operator.itemgetter(slice(TAG_BYTES))
"""Returns the tag in a key; faster than a Python function."""


class Tenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares and rate limits of a tenant."""

    values: tuple[str, ...] = ()  # Values of the rule that identify this tenant; if empty, its name.
    guaranteed: float = 0.0  # Share of a cache that other tenants cannot displace while this tenant is active.
    maximum: float = 1.0  # Share of a cache above which the tenant's blocks are displaced before those of all others.
    store_rate: int | str | None = None
    """Maximum bytes per second stored in the lower tiers, such as ``"200MB"``; None: unlimited."""
    load_rate: int | str | None = None  # Maximum bytes per second loaded from the lower tiers; None: unlimited.

    def __post_init__(self) -> None:
        if not 0.0 <= self.guaranteed <= self.maximum <= 1.0:
            raise ConfigError(
                f"guaranteed is {self.guaranteed!r}, and maximum is {self.maximum!r}. Expected shares from 0 to 1, the "
                "guaranteed one not above the maximum."
            )
        for name in ("store_rate", "load_rate"):
            value = getattr(self, name)
            if value is not None and ByteSize(value) == 0:
                raise ConfigError(f"{name} is {value!r}. Expected bytes per second, above 0, such as '200MB'.")


class Tenants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rule that assigns requests to tenants, and the shares and rates of tenants."""

    by: str
    """Rule: the request's ``cache_salt``, the name of its LoRA ``adapter``, or the ``parameter`` ``"tenant"`` of its
    offload policy."""
    named: dict[str, Tenant] = {}  # The named tenants.
    others: Tenant = Tenant()
    """Limits of every other tenant, one per value of the rule; requests without a value form one tenant. No share can
    be guaranteed here, because the number of such tenants is unknown."""
    idle_s: float | str = 600.0
    """Time since its last use after which a tenant's guarantee has no effect, and its blocks are displaced before those
    of active tenants."""

    def __post_init__(self) -> None:
        if self.by not in _RULES:
            raise ConfigError(f"by is {self.by!r}. Expected one of {', '.join(_RULES)}.{did_you_mean(self.by, _RULES)}")
        Seconds(self.idle_s)
        if self.others.values or self.others.guaranteed:
            raise ConfigError("others has values or a guaranteed share, which only named tenants can have.")
        if not all(self.named) or OTHERS in self.named:
            raise ConfigError(f"A tenant is named '' or {OTHERS!r}. Expected another name.")
        total = sum(tenant.guaranteed for tenant in self.named.values())
        if total > 1.0 + 1e-9:
            raise ConfigError(f"The guaranteed shares of the tenants add up to {total:g}. Expected at most 1.")
        twice = [value for value, times in Counter(value for value, _ in self.values()).items() if times > 1]
        if twice:
            # The value may be a secret (a cache salt), so only the names of the tenants are shown.
            both = [name for value, name in self.values() if value == twice[0]]
            raise ConfigError(f"The tenants {both} have a value in common. Expected different values.")

    def values(self) -> Iterable[tuple[str, str]]:
        """Yield each value that identifies a named tenant, with the tenant's name."""
        return ((value, name) for name, tenant in self.named.items() for value in tenant.values or (name,))


def tag_of(name: str, *, named: bool) -> bytes:
    """Return the tag of a tenant, the same in every process. A hash, so that the name can be guessed but not read.

    Args:
        name: Name of a named tenant, or the value of the rule for any other tenant.
        named: Whether it is a named tenant.
    """
    kind = b"kvstore.named" if named else b"kvstore.other"
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=TAG_BYTES, person=kind).digest()


class Tags:
    """The tags of tenants by the value of the rule."""

    def __init__(self, tenants: Tenants) -> None:
        self._known = {value: tag_of(name, named=True) for value, name in tenants.values()}

    def of(self, value: str) -> bytes:
        """Return the tag of the tenant with this value of the rule; the empty value is a tenant, too."""
        return self._known.get(value) or tag_of(value, named=False)


@dataclass(slots=True, eq=False)
class Account:
    """The blocks of one tenant, or of several unnamed tenants, in one cache."""

    name: str  # Name of the tenant, or ``OTHERS``.
    tenant: Tenant  # Its shares and rates.
    used_at: float  # Time of its last use.
    blocks: int = 0  # Number of its blocks in the cache.
    evicted: int = 0  # Number of its blocks evicted from the primary tier.


class Accounts:
    """The accounts of all tenants in one cache, and the order in which they lose blocks when the cache is full.

    Unnamed tenants have an account by the first byte of their tag, so if there are many, some share an account.

    Accounts above their maximum lose blocks first, then idle accounts, then the account furthest above its guarantee.
    An active account loses guaranteed blocks only to its own new blocks. So without guarantees, all active tenants that
    need room converge to equal shares.

    ``clock``: monotonic seconds; by default, tenants are never idle.
    """

    def __init__(self, tenants: Tenants, capacity: int = 0, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._tenants = tenants
        self.capacity = capacity  # Blocks that the cache can hold; may change.
        self._clock = clock
        self._idle_s = Seconds(tenants.idle_s)
        self._named = {
            tag_of(name, named=True): Account(name, tenant, clock()) for name, tenant in tenants.named.items()
        }
        self._others: dict[int, Account] = {}
        self._giver = Account("", tenants.others, 0.0)
        self._given_turn = _ACTIVE
        self._gives = 0
        """Single blocks to take from the last account before all accounts are compared again."""

    def of(self, key: BlockKey) -> Account:
        """Return the account of a block."""
        tag = key[:TAG_BYTES]
        return self._named.get(tag) or self._tagged(tag)

    def groups(self, keys: Iterable[BlockKey]) -> Iterator[tuple[Account, Iterator[BlockKey]]]:
        """Yield runs of adjacent blocks of the same account, in order, each with its account."""
        return ((self._tagged(tag), theirs) for tag, theirs in groupby(keys, _tag_in))

    def _tagged(self, tag: bytes) -> Account:
        account = self._named.get(tag)
        if account is None:
            account = self._others.get(tag[0])
            if account is None:
                account = self._others[tag[0]] = Account(OTHERS, self._tenants.others, self._clock())
        return account

    def __iter__(self) -> Iterator[Account]:
        yield from self._named.values()
        yield from self._others.values()

    def use(self, account: Account) -> None:
        """Record a use of a block of an account."""
        account.used_at = self._clock()

    def collect(
        self, need: int, take: Callable[[Account, int], int], wanted_by: Account | None = None, extra: int = 0
    ) -> int:
        """Take blocks from the accounts, in the order above.

        Args:
            take: Called with an account and a number of blocks; returns the number taken.
            extra: Blocks that this account is about to add; they count as its own.

        Returns:
            The number of blocks taken; fewer than ``need`` if the others are guaranteed or can't be taken.
        """
        if need == 1 and self._gives and self._gives_again(wanted_by, extra) and take(self._giver, 1):
            self._gives -= 1
            return 1
        line = []
        for number, account in enumerate(self):
            if account.blocks:
                blocks = account.blocks + (extra if account is wanted_by else 0)
                line.append((*self._turn(account, blocks, account is wanted_by), number, account, blocks))
        heapq.heapify(line)
        left = need
        while left > 0 and line:
            turn, below, number, account, blocks = heapq.heappop(line)
            if below >= 0:
                continue
            size = min(left, -below)
            if line and line[0][0] == turn:
                size = min(size, max(_PIECE_BLOCKS, line[0][1] - below))
            taken = take(account, size)
            self._giver, self._given_turn, self._gives = account, turn, _PIECE_BLOCKS - 1 if taken else 0
            left -= taken
            blocks -= taken
            if taken == size:
                heapq.heappush(line, (*self._turn(account, blocks, account is wanted_by), number, account, blocks))
        return need - left

    def _gives_again(self, wanted_by: Account | None, extra: int) -> bool:
        """Whether blocks may still be taken from the last account in the same turn."""
        account = self._giver
        is_asking = account is wanted_by
        turn, below = self._turn(account, account.blocks + (extra if is_asking else 0), is_asking)
        return turn == self._given_turn and below < 0

    def _turn(self, account: Account, blocks: int, is_active: bool) -> tuple[int, int]:
        """Return the turn of an account with ``blocks`` blocks, and its limit in that turn minus ``blocks``."""
        tenant = account.tenant
        maximum = int(tenant.maximum * self.capacity)
        if blocks > maximum:
            return _ABOVE_MAXIMUM, maximum - blocks
        if not is_active and self._clock() - account.used_at > self._idle_s:
            return _IDLE, -blocks
        return _ACTIVE, int(tenant.guaranteed * self.capacity) - blocks
