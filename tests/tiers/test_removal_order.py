"""Removal of blocks that are being stored: in any order in the medium, they are absent afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import ClassVar

import pytest

from kvstore.backends.base import RecordWrite
from kvstore.backends.memory import MemoryBackend
from kvstore.namespace import Namespace
from kvstore.testing import TierRig
from kvstore.types import LookupResult, Outcome, TransferJob

_BLOCKS = 8


class Slow(MemoryBackend):
    """Blocks puts until the gate is open."""

    gate: ClassVar[threading.Event] = threading.Event()
    entered: ClassVar[threading.Event] = threading.Event()

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        self.entered.set()
        while not self.gate.is_set():
            await asyncio.sleep(0.001)
        return await super().put(writes)


@pytest.mark.parametrize("under_way", [False, True], ids=["same-step", "next-step"])
def test_removal_covers_stores_under_way(under_way: bool) -> None:
    """A removal covers every earlier store, and none of its blocks is found or held once both have ended."""
    Slow.gate.clear()
    Slow.entered.clear()
    keys = [bytes([number]) * 16 for number in range(_BLOCKS)]
    config = {"backend": f"{__name__}:Slow", "store_timeout": 60}
    with TierRig(config, namespace=Namespace({"model": "m"}), slot_bytes=4096, slots=_BLOCKS) as rig:
        tier = rig.tier
        tier.submit_store(TransferJob(1, keys, range(_BLOCKS)))
        if under_way:
            tier.flush()
            assert Slow.entered.wait(60)
        tier.remove(keys[:4])
        tier.flush()
        Slow.gate.set()
        assert tier.drain(60)
        tier.get_finished()
        assert [rig.lookup(key) for key in keys] == [LookupResult.MISS] * 4 + [LookupResult.HIT] * 4
        assert tier.stats().blocks == 4
        # The removal does not apply to later stores.
        assert rig.store(keys[:4]).success
        assert [rig.lookup(key) for key in keys] == [LookupResult.HIT] * _BLOCKS


def test_a_store_behind_a_removal_in_the_same_step_counts() -> None:
    """The order of calls decides, although loads and removals start first."""
    Slow.gate.set()
    key = b"k" * 16
    with TierRig({"backend": f"{__name__}:Slow"}, namespace=Namespace({"model": "m"}), slot_bytes=4096, slots=1) as rig:
        assert rig.store([key]).success
        rig.tier.remove([key])
        rig.tier.submit_store(TransferJob(2, [key], [0]))
        rig.tier.flush()
        assert rig.tier.drain(60)
        assert rig.lookup(key) is LookupResult.HIT
