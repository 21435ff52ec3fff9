"""kvstore without an engine and without a GPU: store a prompt's KV cache under one parallel size, load it under others.

Run it: ``python examples/library.py [DIRECTORY]``. A model of two layers is "served" by four ranks, which store the
blocks of a prompt into the primary tier and from there into a file tier. The primary tier is too small for all blocks,
so it evicts some. Then everything is closed, and servers of 1, 2, 4 and 8 ranks find the blocks on disk, promote them,
and compare every byte.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore import LookupResult, Namespace, RequestContext, open_tier
from kvstore.primary import GroupLayout, KVLayout, PrimaryTier, Region, attention_layer
from kvstore.runtime.messages import JobKind
from kvstore.tiering import TieringConfig, TieringManager
from kvstore.transfer import BlockCopies, HostTransfer

LAYERS, HEADS, TOKENS, HEAD_BYTES = 2, 4, 16, 256
BLOCKS = 40
SLOTS = 16
"""Fewer slots than blocks, so that the primary tier evicts."""
BATCH = 8
"""Blocks stored or loaded at a time."""
WAIT_S = 30.0

Cache = dict[str, npt.NDArray[np.uint8]]

LAYOUT = KVLayout(
    (
        GroupLayout(
            tuple(
                attention_layer(f"layer.{i}", kv_heads=HEADS, key_bytes=HEAD_BYTES, block_tokens=TOKENS, order="hnd")
                for i in range(LAYERS)
            ),
            TOKENS,
        ),
    )
)


class Server:
    """The parts of an engine that kvstore uses: KV caches of its ranks, the primary tier, a file tier, the manager."""

    def __init__(self, directory: str, ranks: int) -> None:
        self.ranks = ranks
        self.region = Region.create(SLOTS, LAYOUT.slot_bytes())
        namespace = Namespace({"model": "example", **LAYOUT.fields()})
        primary = PrimaryTier(self.region.view(), self.region.slot_bytes)
        disk = {"backend": "file", "path": directory, "capacity": "64MiB"}
        tier = open_tier(disk, primary=self.region.view(), slot_bytes=self.region.slot_bytes, namespace=namespace)
        # By default a tier's unfinished stores may pin a quarter of the slots, too few with this number of slots.
        self.manager = TieringManager(primary, [tier], TieringConfig(store_share=0.5))
        self.caches: list[Cache] = [_empty_cache(ranks) for _ in range(ranks)]
        self._transfers = [
            HostTransfer(LAYOUT.plan(tp_size=ranks, tp_rank=rank), cache, self.region)
            for rank, cache in enumerate(self.caches)
        ]

    def store(self, keys: Sequence[bytes], blocks: Sequence[int], ctx: RequestContext) -> None:
        """Copy blocks of the KV caches into the primary tier; the manager sends them on to the file tier."""
        deadline = time.monotonic() + WAIT_S
        while (plan := self.manager.prepare_store(keys, ctx)) is None:
            self._step(deadline)
        block_of = dict(zip(keys, blocks, strict=True))
        self._copy([block_of[key] for key in plan.keys], plan.slots, JobKind.STORE)
        self.manager.complete_store(plan.keys, ctx)
        while self.manager.has_pending_work:
            self._step(deadline)

    def load(self, keys: Sequence[bytes], blocks: Sequence[int], ctx: RequestContext) -> None:
        """Copy blocks into the KV caches, after promoting them from the file tier if necessary."""
        deadline = time.monotonic() + WAIT_S
        while {self.manager.lookup(key, ctx) for key in keys} != {LookupResult.HIT}:
            self._step(deadline)
        slots = self.manager.prepare_load(keys, ctx)
        assert slots is not None, "a block that was a hit in this step can be loaded"
        self._copy(blocks, slots, JobKind.LOAD)
        self.manager.complete_load(keys, ctx)

    def close(self) -> None:
        """Close everything, the memory last."""
        for transfer in self._transfers:
            transfer.close()
        assert self.manager.close(), "nothing touches the memory any more"
        self._transfers.clear()
        self.manager.primary.close()
        self.region.close()

    def _copy(self, blocks: Sequence[int], slots: Sequence[int], kind: JobKind) -> None:
        """Copy the heads of every rank; a block is complete when all ranks are done."""
        for transfer in self._transfers:
            transfer.submit([BlockCopies.of(blocks, slots)], kind)
        for transfer in self._transfers:
            assert transfer.wait(timeout_s=WAIT_S)
            assert all(result.success for result in transfer.poll())

    def _step(self, deadline: float) -> None:
        """End a step, as an engine does, and check the deadline."""
        assert time.monotonic() < deadline, "took too long"
        self.manager.on_step_end()
        time.sleep(0.001)


def main(directory: str) -> None:
    """Store with four ranks; restart with 1, 2, 4 and 8 ranks, load and compare."""
    rng = np.random.default_rng(7)
    model = {f"layer.{i}": _random(rng) for i in range(LAYERS)}
    keys = [hashlib.sha256(f"prompt block {number}".encode()).digest() for number in range(BLOCKS)]
    batches = [range(first, first + BATCH) for first in range(0, BLOCKS, BATCH)]

    server = Server(directory, ranks=4)
    for rank, cache in enumerate(server.caches):
        _fill(cache, model, rank, 4)
    ctx = RequestContext("first")
    server.manager.on_new_request(ctx)
    for batch in batches:
        server.store([keys[number] for number in batch], batch, ctx)
    server.manager.on_request_finished(ctx)
    stats = server.manager.stats()
    print(
        f"4 ranks stored {stats.tiers[0].stored} blocks; the primary tier of {SLOTS} evicted {stats.primary.evicted}."
    )
    server.close()

    for ranks in (1, 2, 4, 8):
        server = Server(directory, ranks)
        ctx = RequestContext(f"again with {ranks}")
        server.manager.on_new_request(ctx)
        for batch in batches:
            server.load([keys[number] for number in batch], batch, ctx)
        expected = _empty_cache(ranks)
        for rank, cache in enumerate(server.caches):
            _fill(expected, model, rank, ranks)
            assert all((cache[name] == expected[name]).all() for name in model), f"rank {rank} of {ranks}"
        server.manager.on_request_finished(ctx)
        print(f"{ranks} ranks loaded {server.manager.stats().tiers[0].loaded} blocks; every byte is right.")
        server.close()


def _heads(ranks: int) -> int:
    """Return the number of KV heads of a rank; with more ranks than heads, several ranks share one."""
    return max(1, HEADS // ranks)


def _empty_cache(ranks: int) -> Cache:
    shape = (BLOCKS, _heads(ranks), TOKENS, 2 * HEAD_BYTES)
    return {f"layer.{i}": np.zeros(shape, dtype=np.uint8) for i in range(LAYERS)}


def _random(rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    return rng.integers(0, 256, (BLOCKS, HEADS, TOKENS, 2 * HEAD_BYTES), dtype=np.uint8)


def _fill(cache: Cache, model: Cache, rank: int, ranks: int) -> None:
    """Copy a rank's part of the model's KV cache."""
    first = rank * HEADS // ranks
    for name, whole in model.items():
        cache[name][:] = whole[:, first : first + _heads(ranks)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
