"""The two halves of a tier: the scheduler half answers lookups and submits jobs, the I/O half runs them."""

from kvstore.tiers.async_tier import AsyncTier
from kvstore.tiers.base import JobSample, SecondaryTierManager, TierStats
from kvstore.tiers.opening import open_tier

__all__ = ["AsyncTier", "JobSample", "SecondaryTierManager", "TierStats", "open_tier"]
