"""Eviction policies compared with plain models of them, and properties of every policy."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable
from typing import TypeAlias

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.eviction import (
    ARC,
    LRU,
    POLICY_NAMES,
    Adaptive,
    EvictionPolicy,
    RuleChoice,
    SharedPolicy,
    make_policy,
)
from kvstore.tenants import Tenants, tag_of

Pinned: TypeAlias = Callable[[bytes], bool]

KEYS = [bytes([number]) for number in range(14)]

key = st.sampled_from(KEYS)
operation = st.one_of(
    st.tuples(st.just("insert"), key),
    st.tuples(st.just("use"), key),
    st.tuples(st.just("use"), key),
    st.tuples(st.just("remove"), key),
    st.tuples(st.just("victims"), st.integers(0, 5), st.frozensets(key, max_size=5)),
    st.tuples(st.just("fill"), st.lists(key, max_size=8), st.integers(1, 10)),
)


class PlainLRU:
    """A list, oldest use first."""

    def __init__(self, hint: int) -> None:
        self.blocks: list[bytes] = []

    def order(self) -> list[bytes]:
        """Return all blocks, coldest first."""
        return self.blocks

    def insert(self, key: bytes) -> None:
        """Move to the end."""
        self.remove(key)
        self.blocks.append(key)

    def touch(self, key: bytes) -> None:
        """Move to the end if present."""
        if key in self.blocks:
            self.insert(key)

    def remove(self, key: bytes) -> None:
        self.blocks = [block for block in self.blocks if block != key]

    def victims(self, count: int, pinned: Pinned) -> list[bytes]:
        """Remove the first unpinned blocks."""
        chosen = [block for block in self.blocks if not pinned(block)][:count]
        self.blocks = [block for block in self.blocks if block not in chosen]
        return chosen


class PlainARC:
    """Four lists, oldest first, and the target size of the first (p in the paper)."""

    def __init__(self, hint: int) -> None:
        self.hint = hint
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.p = 0.0

    @property
    def c(self) -> int:
        """The capacity."""
        return max(1, self.hint, len(self.t1) + len(self.t2))

    def order(self) -> list[bytes]:
        """Return all blocks, those used once first."""
        return self.t1 + self.t2

    def insert(self, key: bytes) -> None:
        """Cases II to IV of the paper."""
        if key in self.t1 or key in self.t2:
            self.touch(key)
        elif key in self.b1:
            self.p = min(self.c, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(key)
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(key)
            self.t2.append(key)
        else:
            self.t1.append(key)

    def touch(self, key: bytes) -> None:
        """Case I of the paper."""
        for queue in (self.t1, self.t2):
            if key in queue:
                queue.remove(key)
                self.t2.append(key)
                return

    def remove(self, key: bytes) -> None:
        for queue in (self.t1, self.t2, self.b1, self.b2):
            if key in queue:
                queue.remove(key)

    def victims(self, count: int, pinned: Pinned) -> list[bytes]:
        """REPLACE of the paper, repeatedly."""
        chosen: list[bytes] = []
        while len(chosen) < count:
            queues = [(self.t1, self.b1), (self.t2, self.b2)]
            if len(self.t1) <= self.p:
                queues.reverse()
            for queue, ghost in queues:
                if free := [key for key in queue if not pinned(key)]:
                    queue.remove(free[0])
                    ghost.append(free[0])
                    chosen.append(free[0])
                    break
            else:
                break
        if count:
            self._trim()
        return chosen

    def _trim(self) -> None:
        while self.b1 and len(self.t1) + len(self.b1) > self.c:
            self.b1.pop(0)
        while self.b2 and len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) > 2 * self.c:
            self.b2.pop(0)


MODELS = [(LRU, PlainLRU), (ARC, PlainARC), (Adaptive, PlainLRU)]
"""Below 64 blocks, the adaptive policy is LRU."""


@pytest.mark.parametrize(("policy_type", "model_type"), MODELS, ids=lambda kind: kind.__name__)
@given(hint=st.integers(0, 12), operations=st.lists(operation, max_size=60))
@settings(max_examples=300, deadline=None)
def test_policy_equals_its_plain_model(
    policy_type: type[EvictionPolicy],
    model_type: type[PlainLRU | PlainARC],
    hint: int,
    operations: list[tuple[object, ...]],
) -> None:
    """After any sequence of calls a policy holds the model's blocks in its order and chooses its victims."""
    policy, model = policy_type(hint), model_type(hint)
    for step in operations:
        match step:
            case ("insert", bytes(one)):
                policy.insert(one)
                model.insert(one)
            case ("use", bytes(one)):
                policy.touch(one)
                model.touch(one)
            case ("remove", bytes(one)):
                assert policy.remove(one) == (one in model.order())
                model.remove(one)
            case ("victims", int(count), frozenset(pins)):
                pinned = pins.__contains__
                assert policy.victims(count, pinned=pinned) == model.victims(count, pinned)
            case ("fill", list(keys), int(capacity)):
                # As an owner does: make room, then insert.
                for one in keys:
                    if one not in policy and len(policy) >= capacity:
                        assert policy.victims(1) == model.victims(1, lambda key: False)
                    policy.insert(one)
                    model.insert(one)
        assert list(policy) == model.order(), f"after {step}"
        assert len(policy) == len(model.order())
        assert all((one in policy) == (one in model.order()) for one in KEYS)


@pytest.mark.parametrize("name", POLICY_NAMES)
@given(
    inserted=st.lists(key, max_size=20),
    used=st.lists(key, max_size=20),
    pins=st.frozensets(key),
    need=st.integers(-1, 20),
)
@settings(max_examples=150, deadline=None)
def test_pinned_blocks_are_never_chosen_and_keep_their_places(
    name: str, inserted: list[bytes], used: list[bytes], pins: frozenset[bytes], need: int
) -> None:
    """Victims are distinct unpinned members, as many as requested if available; pinned blocks keep their order."""
    policy = make_policy(name, 8)
    for one in inserted:
        policy.insert(one)
    for one in used:
        policy.touch(one)
    before = list(policy)
    victims = policy.victims(need, pinned=pins.__contains__)
    assert not pins & set(victims)
    assert len(victims) == len(set(victims)) == min(max(need, 0), len(set(before) - pins))
    assert set(policy) == set(before) - set(victims)
    if len(victims) == len(set(before) - pins):
        assert list(policy) == [one for one in before if one in pins], "pinned blocks changed their order"


@pytest.mark.parametrize("name", POLICY_NAMES)
@given(weights=st.lists(st.integers(1, 100), min_size=1, max_size=14), need=st.integers(0, 800))
@settings(max_examples=100, deadline=None)
def test_weights_bound_the_number_of_victims(name: str, weights: list[int], need: int) -> None:
    """With weights, victims are chosen until their sum suffices, and not one more."""
    policy = make_policy(name)
    weight = dict(zip(KEYS, weights, strict=False))
    for one in weight:
        policy.insert(one)
    victims = policy.victims(need, weight=weight.__getitem__)
    got = sum(weight[one] for one in victims)
    assert got >= min(need, sum(weights))
    assert not victims or got - weight[victims[-1]] < need


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("failing", ["pinned", "weight"])
def test_a_callback_that_raises_loses_no_block_but_those_chosen(name: str, failing: str) -> None:
    """If a predicate raises, all blocks not yet chosen remain, in their order."""
    policy = make_policy(name, 10)
    for one in KEYS[:10]:
        policy.insert(one)

    def raises_for_the_fifth(one: bytes) -> bool:
        if one == KEYS[4]:
            raise RuntimeError("a defect of the owner")
        return one == KEYS[1]

    with pytest.raises(RuntimeError):
        if failing == "pinned":
            policy.victims(10, pinned=raises_for_the_fifth)
        else:
            policy.victims(10, weight=raises_for_the_fifth)
    left = list(policy)
    assert left == [one for one in KEYS[:10] if one in left]
    assert set(KEYS[5:10]) <= set(left)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_iteration_order_restores_the_order(name: str) -> None:
    """A policy filled from another's iteration order evicts in that order."""
    policy = make_policy(name, 10)
    for one in KEYS:
        policy.insert(one)
    for one in KEYS[3:6]:
        policy.touch(one)
    again = make_policy(name, 10)
    for one in policy:
        again.insert(one)
    assert list(again) == list(policy)
    assert again.victims(len(KEYS)) == list(policy)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_memory_is_bounded(name: str, rng: random.Random) -> None:
    """The memory of evicted blocks is bounded by a small multiple of the capacity."""
    policy = make_policy(name, 100)
    for number in range(20_000):
        if len(policy) >= 100:
            policy.victims(rng.randrange(1, 30))
        policy.insert(number.to_bytes(4, "big"))
        if rng.random() < 0.3:
            policy.touch(rng.choice(list(policy)[-5:]))
    queues = [value for value in vars(policy).values() if hasattr(value, "move_to_end")]
    assert sum(map(len, queues)) <= 300
    policy.clear()
    assert list(policy) == [] and sum(map(len, queues)) == 0


def test_scan_does_not_evict_blocks_in_use() -> None:
    """Blocks in use survive a scan of blocks that are used once; LRU loses them."""

    def survivors(policy: EvictionPolicy) -> int:
        hot = [b"hot" + bytes([number]) for number in range(50)]
        for _ in range(4):
            for one in hot:
                policy.insert(one)
        for number in range(1000):
            if len(policy) >= 100:
                policy.victims(1)
            policy.insert(b"scan" + number.to_bytes(4, "big"))
        return sum(one in policy for one in hot)

    assert survivors(make_policy("arc", 100)) == 50
    assert survivors(make_policy("lru", 100)) == 0


def _scans(rounds: int) -> list[bytes]:
    """Return uses of 500 blocks, two at a time, each time after 1,000 blocks that are used once."""
    number, uses = itertools.count(), list[bytes]()
    for _ in range(rounds):
        uses += [b"scan %d" % next(number) for _ in range(1000)] + 2 * [b"used %d" % each for each in range(500)]
    return uses


def _sessions(blocks: int, first: int = 0) -> list[bytes]:
    """Return uses of blocks, each of which is used three times more, the last time 800 blocks later."""
    return [b"block %d" % (at - age) for at in range(first, first + blocks) for age in (0, 266, 400, 800)]


def _hits(policy: EvictionPolicy, uses: list[bytes], capacity: int = 1000) -> int:
    hits = 0
    for one in uses:
        hits += one in policy
        if one not in policy and len(policy) >= capacity:
            policy.victims(1)
        policy.insert(one)
    return hits


def test_adaptive_policy_chooses_the_rule_with_more_hits() -> None:
    """It has nearly the hits of the better rule, also after uses of another kind, for which the other is better."""
    first = {name: make_policy(name, 1000) for name in ("lru", "arc", "adaptive")}
    scans = {name: _hits(policy, _scans(20)) for name, policy in first.items()}
    assert scans["adaptive"] > 0.95 * scans["arc"] > 1.4 * scans["lru"]
    sessions = {name: _hits(make_policy(name, 1000), _sessions(6000)) for name in first}
    assert sessions["adaptive"] > 0.95 * sessions["lru"] > 1.3 * sessions["arc"]
    for policy in first.values():
        _hits(policy, _sessions(4000))
    later = {name: _hits(policy, _sessions(4000, 4000)) for name, policy in first.items()}
    assert later["adaptive"] > 0.95 * later["lru"] > 1.05 * later["arc"]


def test_a_small_lead_changes_no_choice() -> None:
    """While ARC gains one hit in 10,000 uses, the adaptive policy remains LRU."""
    lru, arc, adaptive = policies = [make_policy(name, 1000) for name in ("lru", "arc", "adaptive")]
    for number in range(6):
        for policy in policies:
            _hits(policy, [b"used 3", b"used 3", *(b"scan %d %d" % (number, each) for each in range(10_000))])
        assert b"used 3" in arc and list(adaptive) == list(lru)


def test_adaptive_policy_chooses_again_after_it_shrank() -> None:
    """A tenant's policy, whose capacity is its number of blocks, also chooses after it lost 99 of 100 blocks."""
    shrunk, arc = make_policy("adaptive"), make_policy("arc")
    _hits(shrunk, [b"before %d" % number for number in range(100_000)], 100_000)
    shrunk.victims(99_000)
    assert _hits(shrunk, _scans(20)) > 0.9 * _hits(arc, _scans(20))
    shrunk.victims(990)
    for number in range(20):
        shrunk.insert(b"last %d" % number)
    assert list(shrunk)[-20:] == [b"last %d" % number for number in range(20)]


def test_uses_of_unknown_blocks_choose_no_rule() -> None:
    """Uses of blocks that are not there leave the adaptive policy's choice as it is."""
    policy, other = make_policy("adaptive", 1000), make_policy("adaptive", 1000)
    for used, unknown in zip(_sessions(4000), _scans(8), strict=True):
        for each in (policy, other):
            _hits(each, [used])
        policy.touch(unknown)
    assert list(policy) == list(other)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_cleared_policy_is_like_a_new_one(name: str) -> None:
    """After clear, no use of the blocks before it counts, not even for the choice of the rule."""
    cleared, new = make_policy(name, 1000), make_policy(name, 1000)
    _hits(cleared, _scans(12))
    cleared.clear()
    assert _hits(cleared, _sessions(1500)) == _hits(new, _sessions(1500))
    assert list(cleared) == list(new)


def test_choice_of_the_rule_takes_bounded_memory() -> None:
    """At most 1,024 blocks are simulated for each rule, and as many evicted ones remembered, whatever the capacity."""
    choice = RuleChoice()
    for capacity in (100_000, 10_000_000):
        for number in range(200_000):
            choice.use(number.to_bytes(32), capacity)
        assert len(pickle.dumps(choice)) < 3 * 1024 * 60


def test_names() -> None:
    """Policies are found by name in any spelling; the error for an unknown name lists the known and the nearest."""
    assert isinstance(make_policy("A-R-C", 5), ARC)
    assert isinstance(make_policy("LRU"), LRU)
    known = r"Known: adaptive, arc, lru\."
    with pytest.raises(ConfigError, match=rf"Unknown eviction policy 'lur'\. {known} .* 'lru'\?"):
        make_policy("lur")


TENANTS = msgspec.convert(
    {"by": "cache_salt", "named": {"a": {"guaranteed": 0.5}, "b": {}, "c": {"maximum": 0.1}}}, Tenants
)


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("weight", [None, 3])
def test_tenants_share_by_their_accounts(name: str, weight: int | None) -> None:
    """After any operations, the accounts decide whose blocks are evicted, and the policy which of them."""
    policy = make_policy(name, 40, TENANTS)
    assert isinstance(policy, SharedPolicy)
    rng = random.Random(f"shared {name}")
    tags = {each: tag_of(each, named=each != "d") for each in "abcd"}
    alone = {each: make_policy(name) for each in tags}
    for step in range(3000):
        tenant = rng.choice("abcd")
        one = tags[tenant] + b"%d" % rng.randrange(40)
        match rng.randrange(6):
            case 0:
                policy.touch(one)
                alone[tenant].touch(one)
            case 1:
                assert policy.remove(one) == alone[tenant].remove(one)
            case _:
                if one not in policy and len(policy) >= 40:
                    before = {each: len(kept) for each, kept in alone.items()}
                    pinned = set(rng.sample(list(policy), 4))
                    weigh = None if weight is None else lambda key: 3
                    gone = policy.victims(3, pinned=pinned.__contains__, weight=weigh)
                    assert gone and not pinned & set(gone)
                    for victim in gone:
                        (whose,) = (each for each, tag in tags.items() if victim.startswith(tag))
                        assert alone[whose].victims(1, pinned=pinned.__contains__) == [victim]
                    assert len(alone["a"]) == before["a"] or len(alone["a"]) >= 20
                    if before["c"] > 4 and step % 2:
                        assert len(alone["c"]) < before["c"] or pinned
                policy.insert(one)
                alone[tenant].insert(one)
        assert set(policy) == {key for each in alone.values() for key in each}
        assert len(policy) == sum(map(len, alone.values())) and all(key in policy for key in alone["a"])
    policy.clear()
    assert not len(policy) and policy.victims(1) == []
