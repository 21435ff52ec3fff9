"""Lookups in the tiers, as far as the gate considers loading worthwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvstore.primary.tier import PrimaryTier
from kvstore.tiering.gate import Gate
from kvstore.tiering.link import TierLink
from kvstore.tiering.promotions import Promotions
from kvstore.tiering.requests import RequestState
from kvstore.types import BlockKey

__all__ = ["Lookups"]

_HERE = -1
"""A block of the primary tier, in the gate's list of tiers."""


class Lookups:
    """Finds the blocks of requests in the tiers, and asks the gate once per request and step how many to load.

    At the first block of a step that the primary tier lacks, the tiers are asked about it and the blocks after it, up
    to the first that none has. The answers serve the lookups that follow in this step.

    Args:
        primary: The primary tier.
        promotions: Asks the tiers.
        links: The tiers, in order.
        gate: Decides; None to load everything.
        clock: Monotonic seconds.
        waiting: The requests that have not begun to compute.
    """

    def __init__(
        self,
        primary: PrimaryTier,
        promotions: Promotions,
        links: Sequence[TierLink],
        gate: Gate | None,
        clock: Callable[[], float],
        waiting: Collection[str],
    ) -> None:
        self._primary = primary
        self._promotions = promotions
        self._links = links
        self._gate = gate
        self._clock = clock
        self._waiting = waiting
        self._step = 0

    def find(self, key: BlockKey, state: RequestState) -> tuple[TierLink | None, TierLink | None]:
        """Return the tier to load a block from; if none, the tier whose answer to wait for. Both None: compute it."""
        decision = state.gated
        if self._is_declined(key, state):
            return None, None
        if self._gate is not None and state.places and self._gate.is_ready and decision.step != self._step:
            place = state.places.get(key)
            if place is not None:
                decision.step = self._step
                self._decide(self._gate, place, state)
                if self._is_declined(key, state):
                    return None, None
        found = decision.found.get(key) if decision.step == self._step else None
        return self._promotions.find(key, state) if found is None else found

    def stop_waiting(self, key: BlockKey, state: RequestState) -> None:
        """Note that a request waited long enough for a tier's answer: it computes from this block on."""
        decision = state.gated
        if self._gate is None or decision.unknown is None:
            return
        tier, since, _ = decision.unknown
        decision.unknown = None
        decision.limit = state.ends.get(key, 1) - 1
        self._gate.note_answer(tier, self._clock() - since)

    def note_served(self, state: RequestState, keys: Sequence[BlockKey] = ()) -> None:
        """Note that a request uses the loaded ``keys``, or computes without any."""
        decision = state.gated
        if self._gate is None or decision.since is None:
            return
        end = max((state.ends.get(key, 0) for key in keys), default=0)
        recompute_s = self._gate.recompute_s(decision.start, end, decision.waiting)
        self._gate.note_served(recompute_s, self._clock() - decision.since)
        decision.since = None

    def end_step(self) -> None:
        """End the step: the tiers may answer differently in the next one."""
        self._step += 1

    @staticmethod
    def _is_declined(key: BlockKey, state: RequestState) -> bool:
        limit = state.gated.limit
        return limit is not None and state.ends.get(key, 0) > limit

    def _decide(self, gate: Gate, place: int, state: RequestState) -> None:
        """Ask the tiers about a request's blocks from one on, and decide how many of them to load."""
        decision, keys, ends = state.gated, state.keys, state.ends
        found = decision.found = {}
        before = ends.get(keys[place - 1], 0) if place else 0
        # The blocks of the next group of layers begin with shorter prefixes.
        start = last = before if before < ends.get(keys[place], 0) else 0
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
                answer = found[key] = self._promotions.find(key, state)
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
            gate.slack_s(recompute_s) if unknown is None else gate.patience_s(unknown.index, recompute_s)
        )

    def _note_answer(self, gate: Gate, state: RequestState, unknown: TierLink | None) -> None:
        """Note the beginning or the end of a wait for a tier's answer."""
        decision, now = state.gated, self._clock()
        if unknown is not None:
            since = decision.unknown[1] if decision.unknown is not None else now
            decision.unknown = unknown.index, since, now
        elif decision.unknown is not None:
            # The answer may have waited for the engine's step; it was not there when the request asked last.
            tier, since, asked = decision.unknown
            gate.note_answer(tier, asked - since)
            decision.unknown = None

    def _decline(self, gate: Gate, state: RequestState, keys: Sequence[BlockKey], limit: int) -> None:
        """Let a request compute blocks that tiers hold, and sometimes measure the first such tier."""
        decision = state.gated
        decision.limit = limit
        held = [(key, link) for key in keys if (link := decision.found.get(key, (None, None))[0]) is not None]
        gate.counts.recomputed += len(held)
        if held:
            link = held[0][1]
            theirs = [key for key, other in held if other is link]
            size = gate.explores(link.index, len(theirs))
            if size:
                self._promotions.measure(link, theirs[:size], state)
