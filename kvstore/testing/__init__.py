"""Contract suites and fault injection, for the backends, codecs and tiers that ship with kvstore and for yours."""

from kvstore.testing.backend_tests import BackendTests
from kvstore.testing.codec_tests import CodecTests
from kvstore.testing.faults import Fault, FaultKind, FaultPlan, FaultyBackend
from kvstore.testing.holdings_tests import HoldingsTests
from kvstore.testing.tier_rig import TierRig
from kvstore.testing.tier_tests import TierTests
from kvstore.testing.waiting import eventually

__all__ = [
    "BackendTests",
    "CodecTests",
    "Fault",
    "FaultKind",
    "FaultPlan",
    "FaultyBackend",
    "HoldingsTests",
    "TierRig",
    "TierTests",
    "eventually",
]
