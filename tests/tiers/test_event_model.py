"""Events of a disk tier and its directory: random stores, evictions, removals, process losses, restarts."""

from __future__ import annotations

import mmap
import random
import secrets
from pathlib import Path

import pytest

from kvstore.cli.holdings.medium import Medium as HeldMedium
from kvstore.cli.tier_argument import make_tier
from kvstore.namespace import Namespace
from kvstore.testing import eventually
from kvstore.tiers import AsyncTier, open_tier
from kvstore.types import BlockKey, TransferJob
from tests.sizes import sized

STORES = sized(4000, full=40_000)
SLOT, SLOTS, JOB = 4096, 256, 16
KEYS = [b"%036d" % i for i in range(1500)]


class Run:
    """A tier that is reopened repeatedly, and a consumer of its events."""

    def __init__(self, directory: Path) -> None:
        self.tier_options = {"backend": "file", "path": str(directory), "capacity": "4MiB"}
        self.memory = mmap.mmap(-1, SLOT * SLOTS)
        self.blocks: set[BlockKey] = set()
        self.jobs = self.left = 0
        self.tier = self.open()

    def open(self) -> AsyncTier:
        """Open the tier; a consumer drops an engine's blocks when it ends."""
        self.blocks.clear()
        return open_tier(self.tier_options, primary=self.memory, slot_bytes=SLOT, namespace=Namespace({"model": "m"}))

    def take(self) -> None:
        """Process events. They are exact: no block is stored twice, or removed without having been stored."""
        for event in self.tier.take_events():
            keys = set(event.keys)
            assert len(keys) == len(event.keys)
            if event.cause is None:
                assert not keys & self.blocks, "stored twice"
                self.blocks |= keys
            else:
                assert keys <= self.blocks, "removed without having been stored"
                self.blocks -= keys
                self.left += len(keys)

    def submit(self, keys: list[BlockKey], choose: random.Random, *, is_store: bool) -> None:
        """Submit a job with separate slots."""
        eventually(lambda: self.tier.get_finished() is not None and self.tier.stats().jobs_in_flight < SLOTS // JOB)
        self.jobs += 1
        first = self.jobs % (SLOTS // JOB) * JOB
        job = TransferJob(self.jobs, keys, list(range(first, first + len(keys))))
        (self.tier.submit_store if is_store else self.tier.submit_load)(job)

    def settle(self) -> None:
        """Wait until no job is running and all events are read."""

        def idle() -> bool:
            self.tier.get_finished()
            self.take()
            return not (self.tier.stats().jobs_in_flight or self.tier.has_unreported)

        eventually(idle, 60, what="all jobs and events")

    def agree(self, directory: Path, what: str) -> None:
        """Wait until the events match the disk."""

        def same() -> bool:
            self.settle()
            return self.blocks == on_disk(directory)

        eventually(same, 30, what=what)

    def close(self) -> None:
        """Close the tier."""
        self.tier.close()
        self.memory.close()


def on_disk(directory: Path) -> set[BlockKey]:
    """Return the keys that ``kvstore inspect`` finds."""
    with HeldMedium(make_tier("file", {"path": str(directory), "capacity": "4MiB"})) as medium:
        return {block.key for namespace in medium.namespaces() for block in medium.blocks(namespace)}


@pytest.mark.timeout(700)
def test_no_phantom_and_no_missing_block(tmp_path: Path) -> None:
    """After any number of stores, evictions, removals and restarts, the events match the disk."""
    seed = secrets.randbits(32)
    choose = random.Random(seed)
    run = Run(tmp_path)
    stored = restarts = checks = 0
    try:
        while stored < STORES:
            kind = choose.random()
            keys = choose.sample(KEYS, choose.randint(1, JOB))
            if kind < 0.7:
                run.submit(keys, choose, is_store=True)
                stored += len(keys)
            elif kind < 0.8:
                run.submit(keys, choose, is_store=False)
            elif kind < 0.9:
                run.tier.remove(keys)
            elif kind < 0.98:
                run.tier.touch(keys)
            elif kind < 0.99:
                run.settle()
                eventually(
                    lambda: run.settle() or run.blocks == on_disk(tmp_path), 30, what=f"same blocks, seed {seed}"
                )
                checks += 1
            else:
                if choose.random() < 0.5:
                    run.settle()
                run.tier.close()
                run.tier = run.open()
                restarts += 1
                run.agree(tmp_path, f"recovered, seed {seed}")
            run.tier.get_finished()
            run.take()
        run.agree(tmp_path, f"at the end, seed {seed}")
        assert run.left > STORES // 10, "something was evicted"
        assert len(run.blocks) > 100
        print(f"{stored} stores, {run.left} blocks left, {restarts} restarts, {checks} checks, seed {seed}")
    finally:
        run.close()
