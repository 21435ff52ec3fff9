"""The contract of a secondary tier as a test suite, to be subclassed."""

from __future__ import annotations

from kvstore.testing.tier_epochs import TierEpochTests
from kvstore.testing.tier_faults import TierFaultTests
from kvstore.testing.tier_values import TierValueTests

__all__ = ["TierTests"]


class TierTests(TierValueTests, TierEpochTests, TierFaultTests):
    """What a tier has to do on top of a backend, in about thirty tests.

    It proves the whole way from a scheduler to the medium and back: subclass it with the configuration of a tier over
    your backend::

        class TestMyTier(TierTests):
            persistent = False

            def make_config(self) -> dict[str, Any]:
                return {"backend": "my_package.my_module:MyBackend", "url": "…"}

    Plain pytest runs it; no plugin is needed. A failure names the seed that repeats it.
    """
