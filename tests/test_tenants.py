"""Tenants: their tags, their configuration, and the choice of evicted blocks when a cache is full."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from kvstore.errors import ConfigError
from kvstore.tenants import OTHERS, TAG_BYTES, Account, Accounts, Tags, Tenants, tag_of


def tenants(**options: Any) -> Tenants:
    """Return tenants as configured by an operator."""
    return msgspec.convert({"by": "cache_salt", **options}, Tenants)


class Cache:
    """A cache of 100 blocks that can all be taken, except each tenant's ``stuck`` ones."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        self.accounts = Accounts(tenants(**options), 100, lambda: self.now)
        self.stuck: Counter[str] = Counter()

    def account(self, name: str, *, named: bool = True) -> Account:
        return self.accounts.of(tag_of(name, named=named) + b"block")

    def fill(self, **blocks: int) -> None:
        """Set the blocks of named tenants."""
        for name, count in blocks.items():
            self.account(name).blocks = count

    def collect(self, need: int, wanted_by: str | None = None) -> dict[str, int]:
        """Take blocks, and return the number taken from each tenant."""
        taken: Counter[str] = Counter()

        def take(account: Account, size: int) -> int:
            count = min(size, account.blocks - taken[account.name] - self.stuck[account.name])
            taken[account.name] += count
            return count

        asking = None if wanted_by is None else self.account(wanted_by)
        total = self.accounts.collect(need, take, asking, need if asking else 0)
        assert total == taken.total() <= need
        return {name: count for name, count in taken.items() if count}


def test_a_value_means_a_named_tenant_or_one_of_its_own() -> None:
    """Tags are short, equal in all processes, and differ between a name and another tenant's equal value."""
    tags = Tags(tenants(named={"acme": {"values": ["s1", "s2"]}, "globex": {}}))
    assert tags.of("s1") == tags.of("s2") == tag_of("acme", named=True)
    assert tags.of("globex") == tag_of("globex", named=True)
    assert tags.of("acme") == tag_of("acme", named=False) != tags.of("s1")
    assert len({tags.of(value) for value in ("", "s1", "globex", "acme", "nobody", "\udcff")}) == 6
    assert all(len(tags.of(value)) == TAG_BYTES for value in ("", "s1"))
    assert tag_of("acme", named=True).hex() == "b6aa46322d127b91"


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"by": "user"}, "by is 'user'"),
        ({"by": "cache-salt"}, "Did you mean 'cache_salt'"),
        ({"named": {"a": {"guaranteed": 0.7}, "b": {"guaranteed": 0.4}}}, "1.1"),
        ({"named": {"a": {"guaranteed": 0.5, "maximum": 0.4}}}, "0.5"),
        ({"named": {"a": {"maximum": 1.5}}}, "1.5"),
        ({"named": {"a": {"guaranteed": -0.1}}}, "-0.1"),
        ({"named": {"a": {"store_rate": 0}}}, "store_rate"),
        ({"named": {"a": {"load_rate": "fast"}}}, "fast"),
        ({"named": {"a": {"share": 1}}}, "share"),
        ({"named": {OTHERS: {}}}, OTHERS),
        ({"named": {"": {}}}, "''"),
        ({"named": {"a": {"values": ["s"]}, "b": {"values": ["t", "s"]}}}, "'a', 'b'"),
        ({"named": {"a": {"values": ["s", "s"]}}}, "'a', 'a'"),
        ({"others": {"guaranteed": 0.1}}, "others"),
        ({"others": {"values": ["s"]}}, "others"),
        ({"idle_s": "soon"}, "soon"),
    ],
)
def test_a_mistake_is_named(options: dict[str, Any], wrong: str) -> None:
    """The error states the mistake without showing a value of the rule, which may be a secret."""
    with pytest.raises((ConfigError, msgspec.ValidationError)) as caught:
        tenants(**options)
    assert wrong in str(caught.value)
    assert "'s'" not in str(caught.value)


def test_tenant_furthest_above_its_guarantee_yields_first() -> None:
    """The tenant furthest above its guarantee gives a piece of eight blocks at a time, until all are about equal."""
    cache = Cache(named={"a": {"guaranteed": 0.5}, "b": {"guaranteed": 0.1}, "c": {}})
    cache.fill(a=60, b=10, c=30)
    assert cache.collect(12) == {"c": 12}
    assert cache.collect(30) == {"c": 22, "a": 8}
    assert cache.collect(40) == {"c": 30, "a": 10}
    assert cache.collect(41) == {"c": 30, "a": 10}, "what is guaranteed stays"


def test_new_blocks_count_as_their_tenants() -> None:
    """A tenant at its guarantee displaces its own blocks, and no other guarantee prevents it."""
    cache = Cache(named={"a": {"guaranteed": 0.5}, "b": {"guaranteed": 0.5}})
    cache.fill(a=50, b=50)
    assert cache.collect(10, "a") == {"a": 10}
    cache.fill(a=30, b=70)
    assert cache.collect(10, "a") == {"b": 10}
    assert cache.collect(30, "a") == {"b": 20, "a": 10}
    cache.stuck["a"] = 30
    assert cache.collect(30, "a") == {"b": 20}


def test_above_the_maximum_goes_first() -> None:
    """A tenant above its maximum gives first, even if another tenant has more above its guarantee."""
    cache = Cache(named={"a": {"maximum": 0.2}, "b": {}, "c": {"guaranteed": 0.2, "maximum": 0.3}})
    cache.fill(a=25, b=60, c=15)
    assert cache.collect(5) == {"a": 5}
    assert cache.collect(10) == {"a": 5, "b": 5}
    cache.fill(a=20, b=50, c=30)
    assert cache.collect(4, "c") == {"c": 4}


def test_idle_tenants_give_before_active_ones() -> None:
    """Idle tenants may lose all of their blocks; their guarantee holds again from the next use on."""
    cache = Cache(named={"a": {"guaranteed": 0.5}, "b": {"guaranteed": 0.5}}, idle_s="10m")
    cache.fill(a=50, b=50)
    cache.now = 601.0
    cache.accounts.use(cache.account("b"))
    assert cache.collect(60, "b") == {"a": 50, "b": 10}
    assert cache.collect(60) == {"a": 50}
    cache.accounts.use(cache.account("a"))
    assert cache.collect(60, "b") == {"b": 50}
    cache.now = 602.0
    assert cache.collect(10, "b") == {"b": 10}, "a is active"


def test_requesting_tenant_is_active() -> None:
    """Its own guarantee counts even if its last use was long ago."""
    cache = Cache(named={"a": {"guaranteed": 0.5}, "b": {}})
    cache.fill(a=40, b=60)
    cache.now = 10_000.0
    cache.accounts.use(cache.account("b"))
    assert cache.collect(8, "a") == {"b": 8}


def test_tenants_without_a_name_are_bounded() -> None:
    """Ten thousand of them share at most 256 accounts, with equal shares."""
    cache = Cache()
    found = {cache.account(f"salt-{number}", named=False) for number in range(10_000)}
    assert len(found) == len(list(cache.accounts)) == 256
    assert {account.name for account in found} == {OTHERS}
    assert cache.account("salt-1", named=False) is cache.account("salt-1", named=False)


def test_no_random_cache_breaks_the_rules() -> None:
    """No guaranteed block is taken, and none of an active tenant while others are idle or above their maximum."""
    rng = random.Random(20261123)
    for _ in range(3000):
        names = "abcde"[: rng.randint(1, 5)]
        shares = [rng.random() / len(names) for _ in names]
        named = {
            name: {
                "guaranteed": round(share, 3),
                "maximum": round(rng.uniform(share, 1.0), 3) if rng.random() < 0.5 else 1,
            }
            for name, share in zip(names, shares, strict=True)
        }
        cache = Cache(named=named)
        blocks = {name: rng.randint(0, 60) for name in names}
        cache.fill(**blocks)
        cache.now = 700.0
        idle = {name for name in names if rng.random() < 0.3}
        for name in set(names) - idle:
            cache.accounts.use(cache.account(name))
        asking = rng.choice([None, *names])
        need = rng.randint(1, 80)
        gave = cache.collect(need, asking)
        idle.discard(asking or "")
        limit = {name: int(each["guaranteed"] * 100) for name, each in named.items()}
        most = {name: int(each["maximum"] * 100) for name, each in named.items()}
        new = {name: need if name == asking else 0 for name in names}
        for name in names:
            left = blocks[name] - gave.get(name, 0)
            floor = 0 if name in idle else min(limit[name], most[name])
            assert gave.get(name, 0) == 0 or left + new[name] >= floor
            if sum(gave.values()) < need:
                assert left == 0 or left + new[name] <= floor, "it had more to give"
        generous = {name for name in gave if name not in idle and blocks[name] + new[name] <= most[name]}
        for name in names if generous else ():
            left = blocks[name] - gave.get(name, 0)
            assert left == 0 or left + new[name] <= most[name]
            assert name not in idle or left == 0
