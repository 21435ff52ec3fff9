"""The gate: how much of a prefix to load, so that loading takes no longer than computing.

Computing the blocks of a request delays every request that waits, loading them only this one: the engine computes for
others meanwhile. So what loading saves counts once for each of them.

It has no I/O and no clock: times are passed in. Its estimates are fits of two terms to recent measurements:

- Time of a load from a tier: a fixed part, and a part per block that is under way in the tier when it begins.
- Time of computing: a part per token, and a part per token and token of context before it (attention).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["SLACK_S_MAX", "Gate", "GateCounts"]

SLACK_S_MAX: Final = 0.2
"""Most time that a load may lag behind its prediction. A request loses little more when a tier stalls."""

_SLACK_S_MIN: Final = 0.05
"""Least such time: a few steps of a busy engine."""

_NOISE_S: Final = 0.002
"""Differences below the length of a short step are not measurable. Loading is then preferred: it leaves the device
to other requests."""

_TAIL_STEP: Final = 1.1
"""Factor by which one load above the 95th percentile raises its estimate; 19 loads below it lower it as much."""

_TAIL_MIN: Final = 1.5
"""Least percentile, as a multiple of the estimate: a load that takes little longer than usual needs no help."""

_SAMPLES_MIN: Final = 3
"""Measurements before an estimate is used: two that agree correct a first one that was an outlier."""

_PROBE_SHARE: Final = 16
"""A declined request causes a probe: a read of one in so many of its blocks, for which nothing waits."""

_TRIAL_EVERY: Final = 32
"""One in so many declined requests is followed by one that loads nevertheless, for as long as the least slack. That
notices a tier that has become worth it without a sign in its probes."""

_WAIT_EVERY: Final = 32
"""One in so many requests waits for the answer of a tier that answers lookups too slowly, to measure it."""

_PREFILL_TOKENS_MIN: Final = 16
"""Tokens of one request in a step from which they are a prefill; speculative decoding has fewer."""

_PIECE_S: Final = 0.05
"""Predicted time per job of a split load, so that a stall is noticed early and what has arrived is used."""
_PIECES_MAX: Final = 32


class _Fit:
    """``y = p * u + q * v`` with ``p, q >= 0``, by least squares of relative errors over recent measurements.

    One measurement far from the estimate is clipped to three times or a third of it. A second one in a row on the same
    side shows that conditions have changed: the estimate begins anew with these two. Where all measurements have the
    same ``u / v``, both terms get equal shares.
    """

    __slots__ = ("_odd", "_odd_sign", "_suu", "_suv", "_suy", "_svv", "_svy", "count", "p", "q")

    def __init__(self) -> None:
        self.count = 0
        self.p = self.q = 0.0
        self._odd = (0.0, 0.0, 0.0, 0.0)
        self._odd_sign = 0
        self._begin()

    def add(self, u: float, v: float, y: float) -> int:
        """Add a measurement, ``u > 0``; return 1 or -1 if it is far above or below the estimate, otherwise 0."""
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
        keep = 1.0 - 1.0 / min(self.count + 1, 24)  # The last 24 or so count.
        weight = 1.0 / max(scale, _NOISE_S / 2) ** 2  # Relative errors count.
        self._suu = keep * self._suu + weight * u * u
        self._suv = keep * self._suv + weight * u * v
        self._svv = keep * self._svv + weight * v * v
        self._suy = keep * self._suy + weight * u * y
        self._svy = keep * self._svy + weight * v * y

    def _solve(self) -> None:
        uu, vv = self._suu * 1.001, self._svv * 1.001  # Without the 0.001, equal u / v had no unique solution.
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


class _Tier:
    """Estimates of one tier.

    Attributes:
        load: Time of a load by blocks under way, itself included.
        tail: 95th percentile of the time of a load, as a multiple of its estimate.
        answer_s: Time until it answers a lookup that it could not answer immediately.
        late: Abandoned loads that it has not reported.
        probe: Time of a probe by its blocks.
        probing: Whether a probe is under way.
        hindered: Whether loads were late when it began: it may have waited for them.
        trials: Loads that are tried although the estimate is against it.
        stall_ended: Time of the last report of an abandoned load.
        declined: Requests that the estimate declined.
        impatient: Requests that did not wait for its answer.
    """

    __slots__ = (
        "answer_s", "declined", "hindered", "impatient", "late", "load", "probe", "probing", "stall_ended", "tail",
        "trials",
    )  # fmt: skip

    def __init__(self) -> None:
        self.load = _Fit()
        self.tail = 3.0
        self.answer_s = 0.0
        self.late = 0
        self.probe = _Fit()
        self.probing = self.hindered = False
        self.trials = 0
        self.stall_ended = -math.inf
        self.declined = 0
        self.impatient = 0

    @property
    def is_known(self) -> bool:
        """Whether its estimate decides."""
        return self.load.count >= _SAMPLES_MIN and not self.trials

    def learn(self, blocks: int, seconds: float) -> None:
        """Learn from a load; a second one that is as much faster than expected as this replaces the estimate."""
        self.trials = 1 if self.load.add(1.0, blocks, seconds) < 0 else 0


@dataclass(slots=True)
class GateCounts:
    """Decisions of the gate since the start.

    Attributes:
        loaded: Blocks loaded that the gate had weighed.
        recomputed: Blocks held by a tier and computed instead, because that was estimated to be faster.
        abandoned: Blocks whose load lagged behind its prediction.
        explored: Blocks read only to measure a tier.
        saved_s: Estimated seconds that loading saved requests and those that waited with them.
        lost_s: Estimated seconds that waiting for loads cost where it saved none.
    """

    loaded: int = 0
    recomputed: int = 0
    abandoned: int = 0
    explored: int = 0
    saved_s: float = 0.0
    lost_s: float = 0.0


class Gate:
    """Learns the speed of tiers and of computing, and weighs one against the other. Bounded memory; never waits.

    All blocks have the same length, so the throughput of a tier is in blocks.

    Args:
        tiers: Number of tiers; they are named by index.

    Attributes:
        counts: Its decisions.
    """

    def __init__(self, tiers: int) -> None:
        self.counts = GateCounts()
        self._tiers = [_Tier() for _ in range(tiers)]
        self._prefill = _Fit()
        self._step_s = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether the time of computing is known. Until then everything is loaded."""
        return self._prefill.count >= _SAMPLES_MIN

    def note_step(self, prefills: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learn from a step of the engine.

        Args:
            prefills: Scheduled tokens of each request and the tokens of context before them. Requests with few tokens
                decode; their time counts as the fixed part of a step.
            seconds: Duration of the step.
        """
        if not 0.0 < seconds < math.inf:
            return
        tokens = attended = 0.0
        for count, context in prefills:
            if count >= _PREFILL_TOKENS_MIN:
                tokens += count
                attended += count * (context + count / 2)
        if tokens:
            self._prefill.add(tokens, attended, max(0.0, seconds - self._step_s))
        elif not self._step_s or seconds < self._step_s / 3:
            # The first step may have compiled.
            self._step_s = seconds
        else:
            self._step_s += 0.1 * (min(seconds, 3 * self._step_s) - self._step_s)

    def note_load(self, tier: int, blocks: int, seconds: float) -> None:
        """Learn from a load.

        Args:
            tier: The tier.
            blocks: Blocks under way in the tier when the load began, its own included.
            seconds: From its submission to its end.
        """
        one = self._tiers[tier]
        usual_s = self.p95_s(tier, blocks)
        if usual_s is not None:
            one.tail = max(_TAIL_MIN, one.tail * (_TAIL_STEP if seconds > usual_s else _TAIL_STEP ** (-1 / 19)))
        one.learn(blocks, seconds)
        one.late = 0

    def note_late(self, tier: int, blocks: int) -> None:
        """Note that a load is abandoned. Nothing more is loaded from this tier until it reports a load."""
        one = self._tiers[tier]
        one.late += 1
        one.trials = 0
        self.counts.abandoned += blocks

    def note_late_end(self, tier: int, blocks: int, since: float, now: float) -> None:
        """Note the report of an abandoned load. Loads that a stall held up together count once.

        Args:
            tier: The tier.
            blocks: As for :meth:`note_load`.
            since: Time of its submission.
            now: Time of the report.
        """
        one = self._tiers[tier]
        one.late = max(0, one.late - 1)
        if since >= one.stall_ended or one.load.count < _SAMPLES_MIN:
            one.learn(blocks, now - since)
            one.stall_ended = now

    def note_answer(self, tier: int, seconds: float) -> None:
        """Learn the time that a tier took to answer a lookup (or has taken so far, if the request waits no longer)."""
        one = self._tiers[tier]
        one.answer_s += 0.2 * (min(max(0.0, seconds), 3 * one.answer_s + SLACK_S_MAX) - one.answer_s)

    def note_served(self, recompute_s: float, waited_s: float) -> None:
        """Count the time that loading saved all waiting requests, or cost: that of computing less that of loading."""
        if recompute_s >= waited_s:
            self.counts.saved_s += recompute_s - waited_s
        else:
            self.counts.lost_s += waited_s - recompute_s

    def recompute_s(self, start: int, end: int, waiting: int = 1) -> float:
        """Return the estimated time that waiting requests spend while tokens from ``start`` to ``end`` are computed."""
        tokens = max(0, end - start)
        return waiting * (self._prefill.p * tokens + self._prefill.q * tokens * (start + tokens / 2))

    def load_s(self, tier: int, blocks: int) -> float | None:
        """Return the estimated time of a load with so many blocks under way, itself included; None if unmeasured."""
        fit = self._tiers[tier].load
        return fit.p + fit.q * blocks if fit.count >= _SAMPLES_MIN else None

    def p95_s(self, tier: int, blocks: int) -> float | None:
        """Return a time that at least 95 % of such loads do not exceed; arguments as for :meth:`load_s`."""
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
        """Return how many blocks of a prefix to load: the number that saves most time; 0 if none saves any.

        Args:
            start: Tokens before the first block.
            ends: End of each block, in tokens.
            tiers: Tier of each block; -1 for a block that is in the primary tier or on its way there.
            queued: Blocks under way in each tier.
            unknown: Index of the first block whose tier has not answered yet; it and later ones are loaded after the
                answer.
            waiting: Requests that wait to be computed, this one included.
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
        """Return how far a load may lag behind its prediction, given the time of computing instead."""
        return min(SLACK_S_MAX, max(_SLACK_S_MIN, recompute_s))

    def deadline_s(self, tier: int, blocks: int, recompute_s: float) -> float:
        """Return the time after which a load with so many blocks under way is late, given that of computing."""
        expected_s = self.load_s(tier, blocks) or 0.0
        if self._tiers[tier].trials and expected_s > recompute_s:
            return _SLACK_S_MIN
        return expected_s + self.slack_s(recompute_s)

    def patience_s(self, tier: int, recompute_s: float) -> float:
        """Return how long to wait for a tier's answer to a lookup."""
        return min(self._tiers[tier].answer_s, recompute_s) + self.slack_s(recompute_s)

    def piece_blocks(self, tier: int, blocks: int) -> int:
        """Return the blocks of each job that a load is split into."""
        fit = self._tiers[tier].load
        by_time = math.ceil(_PIECE_S / fit.q) if fit.q * blocks > _PIECE_S else blocks
        return max(1, by_time, -(-blocks // _PIECES_MAX))

    def tries_anyway(self, tier: int) -> bool:
        """Whether to wait for the answer of a tier although it is estimated to take too long; counts the request."""
        one = self._tiers[tier]
        one.impatient += 1
        return not one.late and one.impatient % _WAIT_EVERY == 0

    def explores(self, tier: int, blocks: int) -> int:
        """Return the blocks of a probe of a tier of which a request has just declined ``blocks``; 0 for none."""
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
        """Note the end of a probe. If it was far faster than those before, a load is tried.

        The estimate of loads does not learn from probes: small reads may be fast where large ones are slow.

        Args:
            tier: The tier.
            blocks: As for :meth:`note_load`.
            seconds: As for :meth:`note_load`; NaN if it failed.
        """
        one = self._tiers[tier]
        hindered = one.hindered or one.late > 0
        one.probing = False
        if seconds < math.inf:
            one.late = 0
        if not hindered and one.probe.add(1.0, blocks, seconds) < 0:
            one.trials = 1
