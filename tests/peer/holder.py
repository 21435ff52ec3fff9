"""An engine that holds blocks and serves them."""

from __future__ import annotations

from typing import Any

from kvstore.namespace import Namespace
from kvstore.primary import PrimaryTier, Region
from kvstore.primary.lending import Lender
from kvstore.tiers import AsyncTier, open_tier
from tests.peer.ports import free_port

NAMESPACE = Namespace({"suite": "peer"})


SLOT_BYTES = 16384


class Holder:
    """An engine that serves blocks: a primary tier and a peer tier."""

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
        """Add a block."""
        (slot,) = self.primary.allocate([key]) or ()
        with self.primary.row(slot) as row:
            row[:] = payload
        self.primary.commit([key])

    def reset(self) -> None:
        """Reset as the manager does."""
        self.primary.clear()
        self.tier.begin_epoch()

    def close(self) -> None:
        """Close both tiers."""
        self.tier.close()
        self.primary.close()
