"""The hits of an LRU cache of prefix blocks, in forty lines; the replay must agree with them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

from kvstore.cli.bench.traces import Trace


def lru_hits(trace: Trace, capacity: float = float("inf"), *, step_blocks: int = 16, piece: int = 0) -> int:
    """Return the number of hit blocks: those before the first miss of each request.

    Args:
        trace: Requests.
        capacity: Capacity in blocks.
        step_blocks: Blocks computed, and stored, at a time.
        piece: Blocks evicted at a time, unless a step needs more.
    """
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace:
        blocks = request.hash_ids
        hit = next((index for index, block in enumerate(blocks) if block not in held), len(blocks))
        hits += hit
        use(held, blocks[:hit])
        # Blocks over the capacity are not stored; the start of a prompt is worth more than its end.
        fitting = blocks[: int(min(capacity, len(blocks)))]
        for start in range(hit, len(fitting), step_blocks):
            step = fitting[start : start + step_blocks]
            need = len(held.keys() | step) - capacity
            if need > 0:
                coldest = (block for block in list(held) if block not in step)
                for block in itertools.islice(coldest, int(max(need, piece))):
                    del held[block]
            held.update(dict.fromkeys(step))
            use(held, step)
        use(held, blocks)
    return hits


def use(held: OrderedDict[int, None], blocks: Sequence[int]) -> None:
    """Move held blocks to the most recent end, the first one last."""
    for block in reversed(blocks):
        if block in held:
            held.move_to_end(block)
