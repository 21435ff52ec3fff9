"""Belady's optimum: the most hits that any eviction policy could have, because it knows the rest of the trace."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque

from kvstore.cli.replaying.traces import Trace

__all__ = ["OPTIMUM", "optimal_hits"]

OPTIMUM = "belady"
"""Name in place of an eviction policy."""


def optimal_hits(trace: Trace, slots: int) -> list[int]:
    """Return the hit blocks of each request in a cache that always drops the block used last in the future.

    A block may also be dropped immediately. Of blocks used next by the same request the end of the prompt is dropped
    first, because a request finds only an unbroken prefix. Requests run one after the other.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal, 1966.
    """
    uses: defaultdict[int, deque[int]] = defaultdict(deque)
    for number, request in enumerate(trace):
        for block in request.hash_ids:
            uses[block].append(number)
    cached: dict[int, float] = {}
    """Number of the next request that uses each cached block."""
    line: list[tuple[float, int, int]] = []
    """Heap of the cached blocks, the one used last in the future first. Entries of other next uses are outdated."""
    hits: list[int] = []
    for request in trace:
        found = 0
        while found < len(request.hash_ids) and request.hash_ids[found] in cached:
            found += 1
        hits.append(found)
        for place, block in enumerate(request.hash_ids):
            uses[block].popleft()
            after = cached[block] = uses[block][0] if uses[block] else math.inf
            heapq.heappush(line, (-after, -place, block))
        while len(cached) > slots:
            after, _, block = heapq.heappop(line)
            if cached.get(block) == -after:
                del cached[block]
    return hits
