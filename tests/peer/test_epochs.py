"""Two engines that reset their caches: rows of new weights are never served under the old namespace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.primary import Region
from kvstore.testing.tier_rig import TierRig
from kvstore.types import LookupResult
from tests.peer.holder import NAMESPACE, SLOT_BYTES, Holder


def rig_of(holder: Holder, **options: Any) -> TierRig:
    """Return an engine that loads from the holder."""
    config = {"backend": "peer", "peers": [holder.address], "negative_ttl": "1ms", "positive_ttl": "1ms", **options}
    quick = {"breaker_cooldown": "20ms", "breaker_cooldown_max": "50ms", "lookup_timeout": 2}
    return TierRig({**config, **quick}, namespace=NAMESPACE, slot_bytes=SLOT_BYTES, slots=4)


def test_after_a_reset_nothing_is_served_to_the_old_epoch() -> None:
    """Blocks computed after a reset have the old keys and other bytes: an engine without the reset never gets them."""
    with Region.create(slots=4, slot_bytes=SLOT_BYTES) as region:
        holder = Holder(region)
        try:
            with rig_of(holder) as rig:
                holder.store(b"key", rig.payload(b"key"))
                assert rig.lookup(b"key") is LookupResult.HIT and rig.load([b"key"]).success
                holder.reset()
                assert not holder.lender.is_open
                holder.store(b"key", b"\1" * SLOT_BYTES)
                # During and after the change of epoch; the rig verifies all loaded blocks.
                for _ in range(20):
                    assert not rig.load([b"key"]).success
                    holder.tier.get_finished()
                rig.until(lambda: holder.tier.get_finished() or holder.lender.is_open, "the new epoch")
                for _ in range(20):
                    assert not rig.load([b"key"]).success
        finally:
            holder.close()


def test_engines_with_a_named_epoch_share_again(tmp_path: Path) -> None:
    """Engines in the same named epoch find each other's blocks of it, and none of the previous epoch."""
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
