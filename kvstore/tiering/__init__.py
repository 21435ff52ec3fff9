"""The manager of all tiers: cascade, promotion, offload policy, events."""

from kvstore.tiering.config import Backfill, TieringConfig
from kvstore.tiering.events import BlockEvent
from kvstore.tiering.link import TierFlow
from kvstore.tiering.manager import StorePlan, TieringManager
from kvstore.tiering.policy import OffloadPolicy
from kvstore.tiering.stats import LookupCounts, TieringStats

__all__ = [
    "Backfill",
    "BlockEvent",
    "LookupCounts",
    "OffloadPolicy",
    "StorePlan",
    "TierFlow",
    "TieringConfig",
    "TieringManager",
    "TieringStats",
]
