"""The gate alone, with simulated tiers and an engine of known speed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvstore.tiering.gate import SLACK_S_MAX, Gate

BLOCK = 16
"""Tokens per block."""


@dataclass
class World:
    """Tiers and an engine of known speed, and a gate that learns from them."""

    fixed_s: list[float]  # Fixed time of a load, by tier.
    block_s: list[float]  # Time per block, by tier.
    token_s: float = 1e-3  # Time to compute a token.
    pair_s: float = 1e-7  # Time per token and token before it.
    noise: float = 0.0  # Largest relative deviation of a measurement.
    step_s: float = 0.01
    now: float = 1000.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.gate = Gate(len(self.fixed_s))

    def load_s(self, tier: int, blocks: int) -> float:
        """Return the true time of a load."""
        return self.fixed_s[tier] + self.block_s[tier] * blocks

    def recompute_s(self, start: int, end: int) -> float:
        """Return the true time to compute tokens."""
        return self.token_s * (end - start) + self.pair_s * (end**2 - start**2) / 2

    def compute(self, tokens: int, context: int = 0) -> None:
        """Report a step to the gate."""
        seconds = self.step_s + self.recompute_s(context, context + tokens)
        self.gate.note_step([(tokens, context)], seconds * self._noise())

    def load(self, tier: int, blocks: int) -> None:
        """Report a load to the gate."""
        self.gate.note_load(tier, blocks, self.load_s(tier, blocks) * self._noise())

    def learn(self) -> None:
        """Report steps and loads of many sizes."""
        for _ in range(10):
            self.gate.note_step([(1, 500)], self.step_s)
        for _ in range(30):
            self.compute(self.rng.randrange(64, 4096), self.rng.choice((0, 0, 2048, 8192)))
            for tier in range(len(self.fixed_s)):
                self.load(tier, self.rng.randrange(1, 300))

    def time_of(self, tiers: Sequence[int], count: int, start: int = 0) -> float:
        """Return the time until a prefix is ready if ``count`` of its blocks are loaded."""
        numbers = {tier: sum(other == tier for other in tiers[:count]) for tier in set(tiers[:count]) - {-1}}
        loads = max((self.load_s(tier, number) for tier, number in numbers.items()), default=0.0)
        end = start + BLOCK * len(tiers)
        return loads + self.recompute_s(start + BLOCK * count, end)

    def choose(self, tiers: Sequence[int], start: int = 0) -> int:
        """Return the gate's choice for a prefix."""
        ends = range(start + BLOCK, start + BLOCK * (len(tiers) + 1), BLOCK)
        return self.gate.choose(start, ends, tiers, [0] * len(self.fixed_s))

    def _noise(self) -> float:
        return 1.0 + self.rng.uniform(-self.noise, self.noise)


@pytest.mark.parametrize("seed", range(200))
def test_never_slower_than_the_better_of_both(seed: int) -> None:
    """With constant, measured rates, no choice takes over 1.05 times loading or computing everything."""
    rng = random.Random(seed)
    tiers = rng.choice((1, 2))
    world = World(
        [10 ** rng.uniform(-4, -0.3) for _ in range(tiers)],
        [10 ** rng.uniform(-5, -1) for _ in range(tiers)],
        10 ** rng.uniform(-5, -2),
        rng.choice((0.0, 10 ** rng.uniform(-10, -7))),
        step_s=10 ** rng.uniform(-3, -1),
        rng=rng,
    )
    world.learn()
    for _ in range(20):
        count = rng.randrange(1, 300)
        split = rng.randrange(count + 1) if tiers == 2 else count
        prefix = [0] * split + [1] * (count - split)
        start = BLOCK * rng.choice((0, 0, 10, 100))
        chosen = world.time_of(prefix, world.choose(prefix, start), start)
        best = min(world.time_of(prefix, 0, start), world.time_of(prefix, count, start))
        assert chosen <= 1.05 * best + 0.004, f"seed {seed}: {chosen} instead of {best}, {world}"


def test_noisy_measurements_move_the_choice_little() -> None:
    """With 30 % noise, clear cases are still decided correctly."""
    for seed in range(50):
        fast = World([0.001], [1e-4], noise=0.3, rng=random.Random(seed))
        slow = World([0.5], [0.1], noise=0.3, rng=random.Random(seed))
        fast.learn()
        slow.learn()
        assert (fast.choose([0] * 100), slow.choose([0] * 100)) == (100, 0)


def test_computation_delays_all_waiting_requests() -> None:
    """A load of ten times the computing time is worth it for eleven requests, but not for nine."""
    world = World([0.0], [BLOCK * 1e-3 * 10])
    world.learn()
    world.gate._prefill.p, world.gate._prefill.q = 1e-3, 0.0
    ends = [BLOCK * (index + 1) for index in range(20)]
    assert [world.gate.choose(0, ends, [0] * 20, [0], None, waiting) for waiting in (1, 9, 11)] == [0, 0, 20]
    assert world.gate.recompute_s(0, 100, 3) == pytest.approx(0.3)


def test_a_part_from_the_fast_tier() -> None:
    """A prefix that starts on a fast tier and ends on a slow one is loaded up to the end of the fast part."""
    world = World([0.001, 0.001], [1e-4, 0.1])
    world.learn()
    assert world.choose([0] * 60 + [1] * 40) == 60
    assert world.choose([1] + [0] * 99) == 100, "one slow block makes the others usable"


def test_blocks_in_the_primary_tier_are_always_used() -> None:
    """Blocks in the primary tier cost nothing, both after a slow block and before one."""
    world = World([0.2], [1.0])
    world.learn()
    assert world.choose([-1] * 5) == 5
    assert world.choose([-1] * 5 + [0] * 5) == 5
    assert world.choose([0] + [-1] * 500) == 501


def test_loads_under_way_count() -> None:
    """A tier that is fast enough alone is too slow behind the loads of other requests."""
    world = World([0.001], [0.01])
    world.learn()
    ends = range(BLOCK, BLOCK * 101, BLOCK)
    assert world.gate.choose(0, ends, [0] * 100, [0]) == 100
    assert world.gate.choose(0, ends, [0] * 100, [1000]) == 0


def test_long_contexts_are_worth_loading() -> None:
    """Attention makes each token costlier, so a tier too slow for a short prompt is worth it for a long one."""
    world = World([0.0001], [0.02], token_s=1e-3, pair_s=1e-6)
    world.learn()
    assert world.choose([0] * 10) == 0
    assert world.choose([0] * 100) == 100


def test_before_anything_is_known_everything_is_loaded() -> None:
    """Without a prefill rate the gate is not ready; unmeasured tiers are loaded from."""
    world = World([9.0, 9.0], [9.0, 9.0])
    for count in range(5):
        assert world.gate.is_ready == (count >= 3)
        world.compute(1000)
    assert world.choose([0] * 50) == 50
    for _ in range(3):
        assert world.choose([0] * 50) == 50
        world.load(0, 10)
    assert world.choose([0] * 50) == 0
    assert world.choose([1] * 50) == 50


@pytest.mark.parametrize("place", [0, 1, 10])
def test_one_outlier_changes_no_choice(place: int) -> None:
    """One load or step of 30 s, at any position, is forgotten after three normal ones."""
    world = World([0.001], [1e-4])
    for number in range(14):
        if number == place:
            world.gate.note_load(0, 10, 30.0)
            world.gate.note_step([(1000, 0)], 30.0)
        else:
            world.load(0, 10 + number)
            world.compute(500 + 10 * number)
        if number >= place + 3:
            assert world.choose([0] * 100) == 100
            assert 0.3 < world.gate.recompute_s(0, 1000) / world.recompute_s(0, 1000) < 3


def test_invalid_measurements_are_ignored() -> None:
    """Clocks that go backwards, zero blocks, zero time and infinities leave finite, plausible estimates."""
    world = World([0.01], [0.001])
    world.learn()
    before = world.gate.load_s(0, 100)
    for seconds in (-5.0, math.nan, math.inf, -math.inf):
        world.gate.note_load(0, 10, seconds)
        world.gate.note_step([(500, 0)], seconds)
        world.gate.note_answer(0, seconds if math.isfinite(seconds) else 0.0)
    world.gate.note_step([], 0.0)
    assert world.gate.load_s(0, 100) == before
    world.gate.note_load(0, 0, 0.0)
    after = world.gate.load_s(0, 100)
    assert before is not None and after is not None and abs(after - before) < 0.1 * before


def test_tiny_loads_do_not_hide_a_slow_link() -> None:
    """After many loads of one block, one large load is enough to know the throughput approximately."""
    world = World([0.001], [0.05])
    world.learn()
    for _ in range(200):
        world.load(0, 1)
    for _ in range(2):
        world.load(0, 200)
    known = world.gate.load_s(0, 200)
    assert known is not None and known > 0.5 * world.load_s(0, 200)


def test_a_few_loads_from_a_cache_below_do_not_open_a_slow_tier() -> None:
    """If one load in ten is a hundred times faster (a server's page cache), the estimate stays within a factor of 2."""
    world = World([0.3], [0.01])
    world.learn()
    for number in range(100):
        if number % 10:
            world.load(0, world.rng.randrange(1, 100))
        else:
            world.gate.note_load(0, 50, 0.008)
    known = world.gate.load_s(0, 50)
    assert known is not None and known > 0.5 * world.load_s(0, 50)


def explore(world: World, prefix: int, requests: int) -> tuple[list[bool], int, float]:
    """Serve requests according to the gate's choices.

    Returns:
        Whether each request loaded, the number of blocks read by probes, and the longest time lost.
    """
    gate, loaded, probed, lost_s = world.gate, [], 0, 0.0
    for _ in range(requests):
        world.now += 10.0
        count = world.choose([0] * prefix)
        if count:
            recompute_s = world.recompute_s(0, BLOCK * count)
            deadline_s, load_s = gate.deadline_s(0, count, recompute_s), world.load_s(0, count)
            if load_s > deadline_s:
                gate.note_late(0, count)
                gate.note_late_end(0, count, world.now, world.now + load_s)
                lost_s = max(lost_s, deadline_s)
            else:
                world.load(0, count)
                lost_s = max(lost_s, load_s - recompute_s)
        elif size := gate.explores(0, prefix):
            gate.note_exploring(0, size)
            probed += size
            gate.note_explored(0, size, world.load_s(0, size))
        loaded.append(count > 0)
    return loaded, probed, lost_s


@pytest.mark.parametrize(
    ("fixed_s", "block_s", "prefix"),
    [(0.3, 1e-4, 100), (0.001, 0.012, 100), (0.001, 1e-4, 100), (0.001, 1e-4, 10), (0.05, 1e-4, 10)],
)
def test_a_recovered_tier_is_noticed(fixed_s: float, block_s: float, prefix: int) -> None:
    """A tier that was far too slow and has become worth using, even if only just, is used again.

    It is used immediately if its probes became far faster; short prefixes have no probes.
    """
    world = World([5.0], [0.5])
    world.learn()
    explore(world, prefix, 200)
    world.fixed_s, world.block_s = [fixed_s], [block_s]
    assert world.time_of([0] * prefix, prefix) < 0.8 * world.time_of([0] * prefix, 0)
    loaded, _, lost_s = explore(world, prefix, 200)
    assert all(loaded[5 if prefix >= 16 else 4 * 32 :])
    assert lost_s <= SLACK_S_MAX


@pytest.mark.parametrize(("fixed_s", "block_s"), [(5.0, 0.5), (0.001, 0.1), (3.0, 1e-4)])
def test_a_tier_that_stays_slow_costs_little(fixed_s: float, block_s: float) -> None:
    """Probes read at most a sixteenth of the declined blocks, one probe at a time; few requests lose a little time."""
    world = World([fixed_s], [block_s])
    world.learn()
    loaded, probed, lost_s = explore(world, 64, 1000)
    assert sum(loaded) <= 1000 / 32
    assert lost_s <= SLACK_S_MAX
    assert 0 < probed <= 64 * 1000 / 16
    world.gate.note_exploring(0, 1)
    assert not any(world.gate.explores(0, 64) for _ in range(100))
    world.gate.note_explored(0)
    assert any(world.gate.explores(0, 64) for _ in range(16))


def test_probe_behind_late_loads_is_no_evidence() -> None:
    """A probe behind abandoned loads is slow; a normal next probe is not taken for a recovery."""
    world = World([0.0], [0.1])
    world.learn()
    gate = world.gate
    explore(world, 64, 20)
    for clogged in (True, True, True, False, False):
        if clogged:
            gate.note_late(0, 64)
        gate.note_exploring(0, gate.explores(0, 64))
        gate.note_explored(0, 4, 6.4 if clogged else 0.4)
        assert world.choose([0] * 64) == 0


def test_reads_that_are_fast_while_small_tempt_no_one() -> None:
    """A tier with fast small reads and slow complete loads is tried no more often than any other."""
    world = World([0.0], [0.1])
    world.learn()
    world.load_s = lambda tier, blocks: 1e-5 * blocks if blocks < 10 else 0.1 * blocks  # type: ignore[method-assign]
    loaded, _, lost_s = explore(world, 64, 1000)
    assert sum(loaded) <= 1000 / 32 + 1 and lost_s <= SLACK_S_MAX


def test_a_slower_tier_is_noticed_after_two_loads() -> None:
    """A link that becomes a hundred times slower is declined from the third request on."""
    world = World([0.001], [1e-4])
    world.learn()
    world.block_s = [0.1]
    for _ in range(2):
        assert world.choose([0] * 100) == 100
        world.load(0, 100)
    assert world.choose([0] * 100) == 0


def test_a_stall_counts_once() -> None:
    """Nothing is loaded while a load is late. Ten loads delayed by one stall move the estimate as one outlier."""
    world = World([0.001], [1e-4])
    world.learn()
    for _ in range(10):
        world.gate.note_late(0, 5)
    assert world.choose([0] * 100) == 0
    for number in range(10):
        world.gate.note_late_end(0, 5, 100.0, 105.0 + number / 100)
    assert world.choose([0] * 100) == 100
    assert world.gate.counts.abandoned == 50


def test_a_lost_load_starves_no_tier() -> None:
    """A tier that never reports a load is measured again, and used after a load that it reports."""
    world = World([0.001], [1e-4])
    world.learn()
    world.gate.note_late(0, 5)
    loaded, _, _ = explore(world, 100, 50)
    assert all(loaded[1:])


def test_slack_and_pieces_bound_the_loss_of_a_stall() -> None:
    """A load falls behind by at most the slack, and the pieces of a split load are short and few."""
    world = World([0.001], [0.01])
    world.learn()
    assert world.gate.slack_s(10.0) == SLACK_S_MAX
    assert world.gate.slack_s(0.001) < SLACK_S_MAX
    for blocks in (1, 5, 100, 100_000):
        size = world.gate.piece_blocks(0, blocks)
        assert 1 <= size <= blocks and math.ceil(blocks / size) <= 32
    assert world.gate.piece_blocks(0, 100) in (5, 6)


def test_a_tier_too_slow_to_answer_is_tried_seldom() -> None:
    """If a tier's answers to lookups take longer than computing, only one request in 32 waits for it."""
    world = World([0.001], [1e-4])
    world.learn()
    ends = range(BLOCK, BLOCK * 11, BLOCK)
    assert world.gate.choose(0, ends, [0] * 10, [0], 0) == 10
    for _ in range(40):
        world.gate.note_answer(0, 0.6)
    assert world.gate.choose(0, ends, [0] * 10, [0], 0) == 0
    assert world.gate.choose(0, ends, [0] * 10, [0]) == 10
    assert sum(world.gate.tries_anyway(0) for _ in range(320)) == 10
    for _ in range(40):
        world.gate.note_answer(0, 0.0)
    assert world.gate.choose(0, ends, [0] * 10, [0], 0) == 10
    world.gate.note_late(0, 5)
    assert not any(world.gate.tries_anyway(0) for _ in range(320)), "it stalls, so it would not load either"


def test_decoding_is_no_prefill() -> None:
    """Decode-only steps update the fixed part of a step, but no computing rate."""
    gate = Gate(1)
    for _ in range(100):
        gate.note_step([(1, 1000), (8, 2000)], 0.03)
    assert not gate.is_ready
    for tokens in (500, 1000, 2000):
        gate.note_step([(tokens, 0)], 0.03 + tokens * 1e-3)
    assert gate.recompute_s(0, 1000) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_the_percentile_of_loads(sigma: float) -> None:
    """5 % of the loads of any size exceed it, or fewer if hardly any take much longer than usual."""
    rng, gate, exceeded = random.Random(1), Gate(1), []
    for _ in range(6000):
        blocks = rng.choice((1, 8, 64))
        seconds = (0.005 + 0.001 * blocks) * rng.lognormvariate(0.0, sigma)
        usual_s = gate.p95_s(0, blocks)
        if usual_s is not None:
            exceeded.append(seconds > usual_s)
        gate.note_load(0, blocks, seconds)
    assert 0.04 < sum(exceeded[1000:]) / 5000 < 0.06


def test_the_percentile_of_a_steady_tier() -> None:
    """It is clearly above the usual time, and follows a tier that becomes slower; each tier has its own."""
    gate = Gate(2)
    assert gate.p95_s(0, 1) is None
    for _ in range(500):
        gate.note_load(0, 1, 0.01)
    assert gate.p95_s(0, 1) == pytest.approx(0.015, rel=0.01)
    assert gate.p95_s(1, 1) is None
    for _ in range(500):
        gate.note_load(0, 1, 0.5)
    assert gate.p95_s(0, 1) == pytest.approx(0.75, rel=0.05)
    for _ in range(2000):
        gate.note_load(0, 1, 0.0)
    assert gate.p95_s(0, 1) == pytest.approx(0.003), "no shorter than what an engine can tell apart"


def test_a_first_step_that_compiles_hides_no_prefill() -> None:
    """Its duration does not become the fixed part of the steps that compute prompts."""
    gate = Gate(1)
    gate.note_step([(1, 1000)], 20.0)
    for _ in range(3):
        gate.note_step([(1000, 0)], 1.03)
    assert gate.recompute_s(0, 1000) == pytest.approx(1.03, rel=0.01)
    for _ in range(2):
        gate.note_step([(1, 1000)], 0.03)
    for _ in range(30):
        gate.note_step([(1000, 0)], 1.03)
    assert gate.recompute_s(0, 1000) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("place", range(3))
def test_a_step_that_compiles_is_not_the_usual_one(place: int) -> None:
    """Whichever of the first three steps compiles, the fastest of them is the fixed part of later steps."""
    gate = Gate(1)
    for number in range(3):
        gate.note_step([(1, 1000)], 20.0 if number == place else 0.03)
    for _ in range(3):
        gate.note_step([(1000, 0)], 1.03)
    assert gate.recompute_s(0, 1000) == pytest.approx(1.0, rel=0.01)


def test_only_a_trial_is_late_soon() -> None:
    """A load that takes longer than computing gets its time, because requests wait for it; a trial does not."""
    world = World([0.5], [0.01])
    world.learn()
    load_s = world.load_s(0, 10)
    assert world.gate.deadline_s(0, 10, load_s / 5) > load_s
    for _ in range(1000):
        world.gate.explores(0, 10)
    assert world.gate.deadline_s(0, 10, load_s / 5) < load_s / 5
