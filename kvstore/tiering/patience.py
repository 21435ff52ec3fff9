"""The time for which a request waits for blocks that another engine is still computing."""

from __future__ import annotations

from typing import Final

from kvstore.tiering.gate import Gate
from kvstore.tiering.requests import HandOverWait, RequestState
from kvstore.types import BlockKey

_HEARD_SHARE: Final = 0.5
"""Share of the computing time for which the other engine may not know of the request yet."""


class Patience:
    """Limits waits by the estimated time to compute the prompt here.

    Without a block, a request waits for as long as it takes to compute the rest of its prompt; each block that arrives
    extends the wait by the time to compute that block. So it waits on while blocks arrive faster than they are computed
    here, and waiting and computing the rest take at most twice the time of computing everything.

    Args:
        gate: Estimates computing times; None if nothing does.
    """

    def __init__(self, gate: Gate | None) -> None:
        self._gate = gate

    def end(self, key: BlockKey, state: RequestState, now: float) -> float | None:
        """Return the time at which a request stops waiting for its first missing block.

        Returns:
            The time; None for requests that wait for no other engine, or while the computing speed is unknown.
        """
        gate, ctx = self._gate, state.ctx
        if gate is None or not gate.is_ready or not ctx.patience_s or key not in state.ends:
            return None
        before = state.ends[key] - state.ends[state.keys[0]]
        if state.handed_over is None:
            total_s = gate.recompute_s(before, max(state.ends.values()))
            state.handed_over = HandOverWait(now, before, total_s)
            ctx.unheard_s = min(ctx.patience_s, max(ctx.unheard_s, now - ctx.since + _HEARD_SHARE * total_s))
        wait = state.handed_over
        extra_s = gate.recompute_s(wait.start, before)
        return wait.since + max(gate.slack_s(wait.total_s), wait.total_s) + extra_s
