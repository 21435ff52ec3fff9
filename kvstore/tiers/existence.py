"""Questions to the medium about keys of which nothing is known: single-flighted, batched, with a deadline."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.types import BlockKey

__all__ = ["Existence"]

_BATCH_MAX = 4096
"""Keys per question; a request of 500,000 tokens has about as many blocks."""

_PENDING_MAX = 1 << 16
"""Keys asked for at once; beyond it lookups answer MISS, which is always allowed."""


class Existence:
    """Who waits for which answer. Plain decisions; the caller sends the questions and passes on the answers."""

    def __init__(self, timeout_s: float, error_pause_s: float) -> None:
        self._timeout_s = timeout_s
        self._error_pause_s = error_pause_s
        self._pending: dict[BlockKey, float] = {}
        self._unasked: list[BlockKey] = []
        self._batches: dict[int, tuple[BlockKey, ...]] = {}
        self._quiet_until = 0.0
        self._next_batch_id = 0

    def wants_answer(self, key: BlockKey, now: float) -> bool:
        """Ask for a key unless that was done; return whether it is worth waiting for the answer."""
        deadline = self._pending.get(key)
        if deadline is None:
            # After an error nothing is known, and asking again in every step would only add to the trouble.
            if now < self._quiet_until or len(self._pending) >= _PENDING_MAX:
                return False
            deadline = self._pending[key] = now + self._timeout_s
            self._unasked.append(key)
        return now < deadline

    def take_questions(self, now: float) -> list[tuple[int, tuple[BlockKey, ...], float]]:
        """Return what is to be asked now, as (batch id, keys, deadline)."""
        questions = []
        for start in range(0, len(self._unasked), _BATCH_MAX):
            keys = tuple(self._unasked[start : start + _BATCH_MAX])
            self._next_batch_id += 1
            self._batches[self._next_batch_id] = keys
            questions.append((self._next_batch_id, keys, now + self._timeout_s))
        self._unasked.clear()
        return questions

    def answered(self, batch_id: int, now: float, *, failed: bool) -> Sequence[BlockKey]:
        """Note an answer; return the keys it is about."""
        keys = self._batches.pop(batch_id, ())
        for key in keys:
            self._pending.pop(key, None)
        if failed:
            self._quiet_until = now + self._error_pause_s
        return keys

    @property
    def unasked(self) -> bool:
        """Whether ``take_questions`` has something to return."""
        return bool(self._unasked)
