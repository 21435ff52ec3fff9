"""The primary tier: memory shared with the workers, its slots, and the layout of their bytes."""

from kvstore.primary.layout import (
    CopyRun,
    GroupLayout,
    KVLayout,
    LayerLayout,
    LayerPlan,
    PageOrder,
    PagePart,
    RankPlan,
    attention_layer,
    latent_layer,
    opaque_layer,
)
from kvstore.primary.region import PAGE_BYTES, Region, Rows, rounded_up
from kvstore.primary.tier import PrimaryStats, PrimaryTier, SlotState

__all__ = [
    "PAGE_BYTES",
    "CopyRun",
    "GroupLayout",
    "KVLayout",
    "LayerLayout",
    "LayerPlan",
    "PageOrder",
    "PagePart",
    "PrimaryStats",
    "PrimaryTier",
    "RankPlan",
    "Region",
    "Rows",
    "SlotState",
    "attention_layer",
    "latent_layer",
    "opaque_layer",
    "rounded_up",
]
