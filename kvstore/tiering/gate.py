"""The gate: how much of a prefix to load, so that loading takes no longer than computing.

Computing a request's blocks delays every waiting request. Loading them delays only this request, because the engine
computes for others in the meantime. So the saved computing time counts once per waiting request.

The gate does no I/O and reads no clock: times are passed in. Its estimates are two-term fits to recent measurements:

- Load time of a tier: a fixed term, and a term per block in progress in the tier when the load begins.
- Computing time: a term per token, and a term per token and preceding token of context (attention).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

SLACK_S_MAX: Final = 0.2
"""Maximum time by which a load may exceed its prediction. A tier's stall costs a request little more than this."""

_SLACK_S_MIN: Final = 0.05
"""Minimum of that time: a few steps of a busy engine."""

_NOISE_S: Final = 0.002
"""Differences below the length of a short step are not measurable. Loading is then preferred, because it leaves the
device to other requests."""

_TAIL_STEP: Final = 1.1
"""Factor by which one load above the 95th percentile raises the estimate; 19 loads below lower it by the same."""

_TAIL_MIN: Final = 1.5
"""Minimum 95th percentile, as a multiple of the estimate: a load slightly slower than usual is not hedged."""

_SAMPLES_MIN: Final = 3
"""Measurements before an estimate is used: two consistent ones correct a first outlier."""

_PROBE_SHARE: Final = 16
"""A declined request causes a probe: a read of one in this many of its blocks, for which no request waits."""

_TRIAL_EVERY: Final = 32
"""After this many declined requests, one request loads regardless, for at most the minimum slack. This detects a tier
that has become fast enough without showing it in its probes."""

_WAIT_EVERY: Final = 32
"""One in this many requests waits for a tier with slow lookups, to measure it."""

_PREFILL_TOKENS_MIN: Final = 16
"""Minimum tokens of one request in a step that count as prefill; speculative decoding has fewer."""

_PIECE_S: Final = 0.05
"""Predicted time per job of a split load, so that a stall is noticed early and finished pieces are used."""
_PIECES_MAX: Final = 32


class _Fit:
    """``y = p * u + q * v`` with ``p, q >= 0``, by least squares of relative errors over recent measurements.

    A single measurement far from the estimate is clipped to three times or a third of it. A second consecutive one on
    the same side means that conditions have changed: the estimate restarts from these two. If all measurements have
    the same ``u / v``, both terms get equal shares.
    """

    __slots__ = ("_odd", "_odd_sign", "_suu", "_suv", "_suy", "_svv", "_svy", "count", "p", "q")

    def __init__(self) -> None:
        self.count = 0
        self.p = self.q = 0.0
        self._odd = (0.0, 0.0, 0.0, 0.0)
        self._odd_sign = 0
        self._begin()

    def add(self, u: float, v: float, y: float) -> int:
        """Add a measurement (``u > 0``). Return 1 or -1 if it is far above or below the estimate, otherwise 0."""
        if not (u > 0.0 and v >= 0.0 and y >= 0.0 and math.isfinite(u + v + y)):
            return 0
        expected = self.p * u + self.q * v
        odd = sign = (y > 3.0 * expected + _NOISE_S) - (y < expected / 3.0 - _NOISE_S) if self.count else 0
        if sign and sign == self._odd_sign:
            self._begin()
            self._sum(*self._odd)
            expected, sign = y, 0
        elif sign:
            self._odd = (u, v, y, y)
            y = 3.0 * expected + _NOISE_S if sign > 0 else expected / 3.0
        self._odd_sign = sign
        self._sum(u, v, y, expected if self.count else y)
        self.count += 1
        self._solve()
        return odd

    def _begin(self) -> None:
        self._suu = self._suv = self._svv = self._suy = self._svy = 0.0

    def _sum(self, u: float, v: float, y: float, scale: float) -> None:
        keep = 1.0 - 1.0 / min(self.count + 1, 24)  # About the last 24 measurements count.
        weight = 1.0 / max(scale, _NOISE_S / 2) ** 2  # Weigh by relative error.
        self._suu = keep * self._suu + weight * u * u
        self._suv = keep * self._suv + weight * u * v
        self._svv = keep * self._svv + weight * v * v
        self._suy = keep * self._suy + weight * u * y
        self._svy = keep * self._svy + weight * v * y

    def _solve(self) -> None:
        uu, vv = self._suu * 1.001, self._svv * 1.001  # The 0.001 makes the solution unique for equal u / v.
        rest = uu * vv - self._suv * self._suv
        p = q = 0.0
        if rest > 0.0:
            p = (self._suy * vv - self._svy * self._suv) / rest
            q = (self._svy * uu - self._suy * self._suv) / rest
        if vv <= 0.0 or q < 0.0:
            p, q = self._suy / self._suu, 0.0
        elif p < 0.0:
            p, q = 0.0, self._svy / self._svv
        self.p, self.q = p, q


@dataclass(slots=True)
class _Tier:
    """Estimates of one tier."""

    load: _Fit = field(default_factory=_Fit)
    """Load time as a function of the blocks in progress, including the load's own."""
    tail: float = 3.0  # 95th percentile of the load time, as a multiple of its estimate.
    answer_s: float = 0.0  # Time to answer a lookup that had no immediate answer.
    late: int = 0  # Abandoned loads not reported yet.
    probe: _Fit = field(default_factory=_Fit)  # Probe time as a function of its blocks.
    probing: bool = False  # Whether a probe is in progress.
    hindered: bool = False  # Whether loads were late when the probe began, which may have delayed it.
    trials: int = 0  # Loads to try against the estimate.
    stall_ended: float = -math.inf  # Time of the last report of an abandoned load.
    declined: int = 0  # Requests declined by the estimate.
    impatient: int = 0  # Requests for which waiting for its answer was estimated to take too long.

    @property
    def is_known(self) -> bool:
        """Whether decisions use the estimate."""
        return self.load.count >= _SAMPLES_MIN and not self.trials

    def learn(self, blocks: int, seconds: float) -> None:
        """Add the measurement of a load. If it is far below the estimate, one more load is tried to confirm it."""
        self.trials = 1 if self.load.add(1.0, blocks, seconds) < 0 else 0


@dataclass(slots=True)
class GateCounts:
    """Decisions of the gate since the start."""

    loaded: int = 0  # Blocks loaded by the gate's decision.
    recomputed: int = 0  # Blocks held by a tier but computed, because that was estimated to be faster.
    abandoned: int = 0  # Blocks whose load was abandoned because it exceeded its prediction.
    explored: int = 0  # Blocks read only to measure a tier.
    saved_s: float = 0.0  # Estimated seconds that loading saved, summed over all waiting requests.
    lost_s: float = 0.0  # Estimated seconds lost to loads that took longer than computing.


class Gate:
    """Measures the speed of tiers and of computing, and compares them. Bounded memory; never waits.

    All blocks have the same length, so the throughput of a tier is in blocks.

    ``tiers``: number of tiers; they are identified by index.
    """

    def __init__(self, tiers: int) -> None:
        self.counts = GateCounts()  # Counts of decisions.
        self._tiers = [_Tier() for _ in range(tiers)]
        self._prefill = _Fit()
        self._step_s = 0.0
        """Duration of a decode-only step."""
        self._steps = 0
        """Number of decode-only steps, up to ``_SAMPLES_MIN``."""

    @property
    def is_ready(self) -> bool:
        """Whether the computing time is known. Until then, everything is loaded."""
        return self._prefill.count >= _SAMPLES_MIN

    def note_step(self, prefills: Sequence[tuple[int, int]], seconds: float) -> None:
        """Add the measurement of an engine step.

        ``prefills``: scheduled tokens and preceding tokens of context, per request. Requests with few tokens are
        decoding; their time counts as the fixed part of a step.
        """
        if not 0.0 < seconds < math.inf:
            return
        tokens = attended = 0.0
        for count, context in prefills:
            if count >= _PREFILL_TOKENS_MIN:
                tokens += count
                attended += count * (context + count / 2)
        if tokens:
            fixed_s = self._step_s if self._steps > 1 else 0.0
            self._prefill.add(tokens, attended, max(0.0, seconds - fixed_s))
        elif self._steps < _SAMPLES_MIN:
            # The first steps may include compilation.
            self._steps += 1
            self._step_s = min(seconds, self._step_s or seconds)
        else:
            self._step_s += 0.1 * (min(seconds, 3 * self._step_s) - self._step_s)

    def note_load(self, tier: int, blocks: int, seconds: float) -> None:
        """Add the measurement of a load.

        ``blocks``: blocks in progress in the tier when the load began, including its own.
        """
        one = self._tiers[tier]
        usual_s = self.p95_s(tier, blocks)
        if usual_s is not None:
            one.tail = max(_TAIL_MIN, one.tail * (_TAIL_STEP if seconds > usual_s else _TAIL_STEP ** (-1 / 19)))
        one.learn(blocks, seconds)
        one.late = 0

    def note_late(self, tier: int, blocks: int) -> None:
        """Note that a load is abandoned. No more loads go to this tier until it reports one."""
        one = self._tiers[tier]
        one.late += 1
        one.trials = 0
        self.counts.abandoned += blocks

    def note_late_end(self, tier: int, blocks: int, since: float, now: float) -> None:
        """Note the report of an abandoned load. Loads delayed by the same stall count once.

        ``blocks``: as for :meth:`note_load`.
        """
        one = self._tiers[tier]
        one.late = max(0, one.late - 1)
        if since >= one.stall_ended or one.load.count < _SAMPLES_MIN:
            one.learn(blocks, now - since)
            one.stall_ended = now

    def note_answer(self, tier: int, seconds: float) -> None:
        """Add the time that a tier took to answer a lookup, or the time waited so far if the request stops waiting."""
        one = self._tiers[tier]
        one.answer_s += 0.2 * (min(max(0.0, seconds), 3 * one.answer_s + SLACK_S_MAX) - one.answer_s)

    def count_wait(self, recompute_s: float, waited_s: float) -> None:
        """Count the time that loading saved or cost: the computing time of all waiting requests minus the wait."""
        if recompute_s >= waited_s:
            self.counts.saved_s += recompute_s - waited_s
        else:
            self.counts.lost_s += waited_s - recompute_s

    def recompute_s(self, start: int, end: int, waiting: int = 1) -> float:
        """Return the estimated time to compute tokens from ``start`` to ``end``, multiplied by the waiting requests."""
        tokens = max(0, end - start)
        return waiting * (self._prefill.p * tokens + self._prefill.q * tokens * (start + tokens / 2))

    def load_s(self, tier: int, blocks: int, samples_min: int = _SAMPLES_MIN) -> float | None:
        """Return the estimated load time with ``blocks`` in progress, including the load's own; None if unmeasured."""
        fit = self._tiers[tier].load
        return fit.p + fit.q * blocks if fit.count >= samples_min else None

    def p95_s(self, tier: int, blocks: int) -> float | None:
        """Return an upper estimate of the 95th percentile of the load time; arguments as for :meth:`load_s`."""
        expected_s = self.load_s(tier, blocks)
        return None if expected_s is None else self._tiers[tier].tail * max(expected_s, _NOISE_S)

    def choose(
        self,
        start: int,
        ends: Sequence[int],
        tiers: Sequence[int],
        queued: Sequence[int],
        unknown: int | None = None,
        waiting: int = 1,
    ) -> int:
        """Return the number of blocks of a prefix to load that saves the most time; 0 if loading saves none.

        Args:
            tiers: Tier of each block; -1 for a block in the primary tier or being promoted to it.
            unknown: Index of the first block whose tier has not answered yet. That block and later ones are loaded
                after the answer.
            waiting: Requests that wait to be computed, including this one.
        """
        fixed, slope, under_way = [], [], list(queued)
        for one in self._tiers:
            fixed.append(math.inf if one.late else one.load.p if one.is_known else 0.0)
            slope.append(one.load.q if one.is_known else 0.0)
        p, half_q = self._prefill.p, self._prefill.q / 2
        # (end - start) * (start + (end - start) / 2) == (end² - start²) / 2
        computed_before = p * start + half_q * start * start
        best, best_saved, load_s = 0, -_NOISE_S, 0.0
        waits_for = -1 if unknown is None else unknown
        for index, tier in enumerate(tiers):
            if tier >= 0:
                count = under_way[tier] = under_way[tier] + 1
                seconds = fixed[tier] + slope[tier] * count
                if 0 <= waits_for <= index:
                    seconds += self._tiers[tier].answer_s
                if seconds > load_s:
                    load_s = seconds
            end = ends[index]
            saved = waiting * (p * end + half_q * end * end - computed_before) - load_s
            if saved >= best_saved:
                best, best_saved = index + 1, saved
        return best

    def slack_s(self, recompute_s: float) -> float:
        """Return the time by which a load may exceed its prediction, given the computing time."""
        return min(SLACK_S_MAX, max(_SLACK_S_MIN, recompute_s))

    def deadline_s(self, tier: int, blocks: int, recompute_s: float) -> float:
        """Return the time after which a load with ``blocks`` in progress is late, given the computing time."""
        expected_s = self.load_s(tier, blocks) or 0.0
        if self._tiers[tier].trials and expected_s > recompute_s:
            return _SLACK_S_MIN
        return expected_s + self.slack_s(recompute_s)

    def patience_s(self, tier: int, recompute_s: float) -> float:
        """Return the longest time to wait for a tier's answer to a lookup."""
        return min(self._tiers[tier].answer_s, recompute_s) + self.slack_s(recompute_s)

    def piece_blocks(self, tier: int, blocks: int) -> int:
        """Return the blocks per job for splitting a load; an unmeasured tier gets the smallest pieces."""
        fit = self._tiers[tier].load
        by_time = math.ceil(_PIECE_S / fit.q) if fit.q * blocks > _PIECE_S else blocks
        return max(by_time if fit.count >= _SAMPLES_MIN else 1, -(-blocks // _PIECES_MAX))

    def tries_anyway(self, tier: int) -> bool:
        """Count a request, and return whether it waits for a tier's answer although the estimate is against it."""
        one = self._tiers[tier]
        one.impatient += 1
        return not one.late and one.impatient % _WAIT_EVERY == 0

    def explores(self, tier: int, blocks: int) -> int:
        """Count a request that declined ``blocks`` of a tier, and return the number of blocks to probe; 0 for none."""
        one = self._tiers[tier]
        one.declined += 1
        if not one.declined % _TRIAL_EVERY:
            one.trials = 1
        return 0 if one.probing else blocks // _PROBE_SHARE

    def note_exploring(self, tier: int, blocks: int) -> None:
        """Note that a probe begins."""
        one = self._tiers[tier]
        one.probing, one.hindered = True, one.late > 0
        self.counts.explored += blocks

    def note_explored(self, tier: int, blocks: int = 0, seconds: float = math.nan) -> None:
        """Note the end of a probe. If it was far faster than earlier probes, a load is tried.

        The estimate of loads ignores probes, because small reads may be fast on a tier whose large reads are slow.

        Args:
            blocks: As for :meth:`note_load`.
            seconds: As for :meth:`note_load`; NaN if the probe failed.
        """
        one = self._tiers[tier]
        hindered = one.hindered or one.late > 0
        one.probing = False
        if seconds < math.inf:
            one.late = 0
        if not hindered and one.probe.add(1.0, blocks, seconds) < 0:
            one.trials = 1
