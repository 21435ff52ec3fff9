"""The two halves of a tier: what the scheduler calls, and what does the I/O."""

from kvstore.tiers.async_tier import AsyncTier
from kvstore.tiers.base import SecondaryTierManager
from kvstore.tiers.opening import open_tier
from kvstore.tiers.stats import JobSample, TierStats

__all__ = ["AsyncTier", "JobSample", "SecondaryTierManager", "TierStats", "open_tier"]
