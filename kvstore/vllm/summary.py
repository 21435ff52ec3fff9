"""One line in the log about the hits of the last minute, if there was traffic."""

from __future__ import annotations

import logging
import time
from typing import Final

from kvstore.tiering import TieringStats
from kvstore.tiering.tally import Tally

logger = logging.getLogger("kvstore.vllm.summary")

_INTERVAL_S: Final = 60.0


class HitSummary:
    """Logs hits of each tier and bytes moved, at most once a minute and only if blocks were looked up or moved."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._counts: tuple[tuple[int, int], ...] = ()

    def note(self, now: float, stats: TieringStats, tally: Tally, slot_bytes: int) -> None:
        """Log the summary if it is due.

        Args:
            now: ``time.monotonic()``.
            stats: The manager's statistics.
            tally: The manager's counts since the start.
            slot_bytes: Bytes per block.
        """
        if now - self._since < _INTERVAL_S:
            return
        found = [(each.hits, each.queries) for each in (tally.primary, *tally.tiers)]
        moved = [(sum(flow.loaded for flow in stats.tiers), sum(flow.stored for flow in stats.tiers))]
        counts = tuple(found + moved)
        before = self._counts or ((0, 0),) * len(counts)
        *hits, (loaded, stored) = [(new[0] - old[0], new[1] - old[1]) for new, old in zip(counts, before, strict=True)]
        if counts != before:
            names = ["primary", *(flow.name for flow in stats.tiers)]
            logger.info(
                "Hits of the last %.0f s: %s; %.1f MB loaded, %.1f MB stored",
                now - self._since,
                ", ".join(f"{name} {hit} of {asked} blocks" for name, (hit, asked) in zip(names, hits, strict=True)),
                loaded * slot_bytes / 1e6,
                stored * slot_bytes / 1e6,
            )
        self._since, self._counts = now, counts
