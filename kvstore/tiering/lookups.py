"""Lookups in the tiers, up to the limit that the gate sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from kvstore.tiering.core import Core
from kvstore.tiering.gate import Gate
from kvstore.tiering.link import TierLink
from kvstore.tiering.requests import RequestState, TierAnswer
from kvstore.tiering.tally import TIMED_EVERY
from kvstore.types import BlockKey, LookupResult, MissCause

_HERE = -1
"""A block of the primary tier, in the gate's list of tiers."""


class Lookups:
    """Finds the blocks of requests in the tiers, and limits their number by the gate once per request and step.

    At the first block of a step that the primary tier lacks, the tiers are queried for that block and its successors,
    up to the first block that no tier holds. Later lookups of the step reuse these answers.

    Args:
        waiting: The requests that have not begun to compute.
        measure: Loads blocks from a tier only to measure it; the request computes them.
    """

    def __init__(
        self,
        core: Core,
        waiting: Collection[str],
        measure: Callable[[TierLink, Sequence[BlockKey], RequestState], None],
    ) -> None:
        self._primary = core.primary
        self._links = core.links
        self._gate = core.gate
        self._clock = core.clock
        self._waiting = waiting
        self._measure = measure
        self.step = 0  # Number of the step. The tiers may answer differently in the next one.

    def find(self, key: BlockKey, state: RequestState) -> TierAnswer:
        """Return the tier to load a block from; if none, the tier to wait for. Both None: compute the block."""
        gate = self._gate
        # Requests that wait for another engine's prefill have a deadline of their own.
        if gate is None or state.ctx.patience_s:
            return self._ask(key, state)
        decision = state.gated
        if decision.step != self.step and key in state.weighed and gate.is_ready and not self._is_declined(key, state):
            decision.step = self.step
            self._decide(gate, state.keys.index(key), state)
        if decision.limit is not None and self._is_declined(key, state):
            state.missed.update((decision.declined,) if decision.declined is not None else ())
            return None, None
        found = decision.found.get(key) if decision.step == self.step else None
        return found or self._ask(key, state)

    def stop_waiting(self, key: BlockKey, state: RequestState) -> None:
        """End a request's wait for a tier's answer: it computes from this block on."""
        decision = state.gated
        if self._gate is None or decision.unknown is None:
            return
        tier, since, _ = decision.unknown
        decision.unknown = None
        decision.limit, decision.declined = state.ends.get(key, 1) - 1, (tier, MissCause.TIMEOUT)
        self._gate.note_answer(tier, self._clock() - since)

    def end_gated_wait(self, state: RequestState, keys: Sequence[BlockKey] = ()) -> None:
        """Note that a request uses the loaded ``keys``, or computes without loaded blocks."""
        decision = state.gated
        if self._gate is None or decision.since is None:
            return
        end = max((state.ends.get(key, 0) for key in keys), default=0)
        recompute_s = self._gate.recompute_s(decision.start, end, decision.waiting)
        self._gate.count_wait(recompute_s, self._clock() - decision.since)
        decision.since = None

    def _ask(self, key: BlockKey, state: RequestState) -> TierAnswer:
        """Return the first tier that holds a block; if none, the first tier without an answer yet."""
        failed = state.failed.get(key, 0) if state.failed else 0
        asked = state.asked.get(key, 0)
        unknown = None
        for link in state.load_links:
            bit = link.bit
            if failed & bit:
                state.missed[link.index] = state.failures[link.index]
                continue
            tally = link.tally
            started = 0.0 if tally.queries % TIMED_EVERY else time.perf_counter()
            result = link.lookup(key, state.ctx)
            if result is LookupResult.RETRY:
                unknown = unknown or link
                if not asked & bit:
                    state.retried.setdefault((key, bit), self._clock())
                continue
            if not asked & bit:
                asked = state.asked[key] = asked | bit
                tally.note_answer(result is LookupResult.HIT, started)
                if state.retried and (key, bit) in state.retried:
                    tally.wait_samples.append(self._clock() - state.retried.pop((key, bit)))
            if result is LookupResult.HIT:
                return link, None
            state.missed[link.index] = link.miss_cause
        return None, unknown

    @staticmethod
    def _is_declined(key: BlockKey, state: RequestState) -> bool:
        limit = state.gated.limit
        return limit is not None and state.ends.get(key, 0) > limit

    def _decide(self, gate: Gate, place: int, state: RequestState) -> None:
        """Query the tiers for a request's blocks from index ``place`` on, and decide how many of them to load."""
        decision, keys, ends = state.gated, state.keys, state.ends
        found = decision.found = {}
        previous = ends.get(keys[place - 1], 0) if place else 0
        # The first key of another group of layers, whose ends start from zero again, has no preceding end.
        start = last = previous if previous < ends.get(keys[place], 0) else 0
        stops: list[int] = []
        tiers: list[int] = []
        unknown: TierLink | None = None
        unknown_from: int | None = None
        for index in range(place, len(keys)):
            key = keys[index]
            end = ends.get(key, 0)
            if end <= last or (decision.limit is not None and end > decision.limit):
                break
            last = end
            if key in self._primary:
                tiers.append(_HERE)
            else:
                answer = found[key] = self._ask(key, state)
                link = answer[0] or answer[1]
                if link is None:
                    break
                if answer[1] is not None and unknown_from is None:
                    unknown, unknown_from = answer[1], len(tiers)
                tiers.append(link.index)
            stops.append(end)
        self._note_answer(gate, state, unknown)
        waiting = decision.waiting = max(1, len(self._waiting))
        count = gate.choose(start, stops, tiers, [link.loading for link in self._links], unknown_from, waiting)
        if count < len(tiers):
            if unknown is not None and count <= (unknown_from or 0) and gate.tries_anyway(unknown.index):
                count = len(tiers)
            else:
                self._decline(
                    gate, state, keys[place + count : place + len(tiers)], stops[count - 1] if count else start
                )
        recompute_s = gate.recompute_s(start, stops[count - 1], waiting) if count else 0.0
        decision.recompute_s = recompute_s
        if decision.since is None:
            decision.start = start
        decision.patience_s = (
            max(gate.slack_s(recompute_s), recompute_s)
            if unknown is None
            else gate.patience_s(unknown.index, recompute_s)
        )

    def _note_answer(self, gate: Gate, state: RequestState, unknown: TierLink | None) -> None:
        """Note the beginning or the end of a wait for a tier's answer."""
        decision, now = state.gated, self._clock()
        if unknown is not None:
            since = decision.unknown[1] if decision.unknown is not None else now
            decision.unknown = unknown.index, since, now
        elif decision.unknown is not None:
            # The answer arrived after the request's last lookup, possibly well before this step.
            tier, since, asked = decision.unknown
            gate.note_answer(tier, asked - since)
            decision.unknown = None

    def _decline(self, gate: Gate, state: RequestState, keys: Sequence[BlockKey], limit: int) -> None:
        """Make a request compute blocks that tiers hold, and sometimes measure the first of these tiers."""
        decision = state.gated
        decision.limit = limit
        first = next((found[0] or found[1] for key in keys if (found := decision.found.get(key))), None)
        decision.declined = None if first is None else (first.index, MissCause.GATE)
        held = [(key, link) for key in keys if (link := decision.found.get(key, (None, None))[0]) is not None]
        gate.counts.recomputed += len(held)
        if held:
            link = held[0][1]
            theirs = [key for key, other in held if other is link]
            size = gate.explores(link.index, len(theirs))
            if size:
                self._measure(link, theirs[:size], state)
