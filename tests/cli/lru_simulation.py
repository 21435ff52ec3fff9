"""Twenty lines that say what an LRU cache of prefix blocks hits; the replay has to agree with them."""

from __future__ import annotations

from collections import OrderedDict

from kvstore.cli.replaying.traces import Trace


def lru_hits(trace: Trace, capacity: float = float("inf")) -> int:
    """Return how many blocks are hit: those before the first miss of each request."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace:
        blocks = request.hash_ids
        hits += next((index for index, block in enumerate(blocks) if block not in held), len(blocks))
        # What does not fit even alone is not stored; the start of a prompt is worth more than its end.
        for block in reversed(blocks[: int(min(capacity, len(blocks)))]):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
        for block in reversed(blocks):
            if block in held:
                held.move_to_end(block)
    return hits
