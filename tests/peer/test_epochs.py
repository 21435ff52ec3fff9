"""Two engines that reset their caches: rows of new weights are never served under the old namespace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier, Region
from kvstore.primary.lending import Lender
from kvstore.testing.tier_rig import TierRig
from kvstore.tiers import AsyncTier, open_tier
from kvstore.types import LookupResult
from tests.peer.ports import free_port

NAMESPACE = Namespace({"suite": "peer"})
SLOT_BYTES = 16384


class Holder:
    """An engine that serves: a primary tier, and its tier."""

    def __init__(self, region: Region, **options: Any) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.primary = PrimaryTier(region.view(), SLOT_BYTES)
        self.lender = Lender(self.primary)
        self.tier: AsyncTier = open_tier(
            {"backend": "peer", "listen": self.address, **options},
            primary=region.view(),
            slot_bytes=SLOT_BYTES,
            namespace=NAMESPACE,
            lender=self.lender,
        )

    def store(self, key: bytes, payload: bytes) -> None:
        """Have a block."""
        (slot,) = self.primary.allocate([key]) or ()
        with self.primary.row(slot) as row:
            row[:] = payload
        self.primary.commit([key])

    def reset(self) -> None:
        """Do what the manager does at a reset."""
        self.primary.clear()
        self.tier.begin_epoch()

    def close(self) -> None:
        """Close all."""
        self.tier.close()
        self.primary.close()


def rig_of(holder: Holder, **options: Any) -> TierRig:
    """Return an engine that asks."""
    config = {"backend": "peer", "peers": [holder.address], "negative_ttl": "1ms", "positive_ttl": "1ms", **options}
    quick = {"breaker_cooldown": "20ms", "breaker_cooldown_max": "50ms", "lookup_timeout": 2}
    return TierRig({**config, **quick}, namespace=NAMESPACE, slot_bytes=SLOT_BYTES, slots=4)


def test_after_a_reset_nothing_is_served_to_the_old_epoch() -> None:
    """What is computed after a reset has the old keys and other bytes: an engine that was not reset does not get it."""
    with Region.create(slots=4, slot_bytes=SLOT_BYTES) as region:
        holder = Holder(region)
        try:
            with rig_of(holder) as rig:
                holder.store(b"key", rig.payload(b"key"))
                assert rig.lookup(b"key") is LookupResult.HIT and rig.load([b"key"]).success
                holder.reset()
                assert not holder.lender.is_open
                holder.store(b"key", b"\1" * SLOT_BYTES)
                # While the epoch changes, and when it has changed; the rig proves what is said to be loaded.
                for _ in range(20):
                    assert not rig.load([b"key"]).success
                    holder.tier.get_finished()
                rig.until(lambda: holder.tier.get_finished() or holder.lender.is_open, "the new epoch")
                for _ in range(20):
                    assert not rig.load([b"key"]).success
        finally:
            holder.close()


def test_engines_with_a_named_epoch_share_again(tmp_path: Path) -> None:
    """Engines that enter the same named epoch find each other's blocks of it, and none of the one before."""
    name = tmp_path / "epoch"
    name.write_text("step-1")
    epoch = {"epoch": {"file": str(name)}}
    with Region.create(slots=4, slot_bytes=SLOT_BYTES) as region:
        holder = Holder(region, **epoch)
        try:
            with rig_of(holder, **epoch) as rig:
                holder.store(b"old", rig.payload(b"old"))
                assert rig.load([b"old"]).success
                name.write_text("step-2")
                holder.reset()
                assert rig.begin_epoch() == "step-2"
                rig.until(lambda: holder.tier.get_finished() or holder.lender.is_open, "the new epoch of the other")
                holder.store(b"new", rig.payload(b"new"))
                rig.until(lambda: rig.lookup(b"new") is LookupResult.HIT, "the block of the new epoch")
                assert rig.load([b"new"]).success
                assert not rig.load([b"old"]).success
        finally:
            holder.close()
