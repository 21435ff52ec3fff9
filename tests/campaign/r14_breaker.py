"""R14: a dead medium is skipped after a few failures, probed at intervals and used again.

Method: the breaker alone, under failing loads and stores, and under S3 faults.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/runtime/test_breaker.py",
        "tests/s3/test_faults.py::test_breaker",
        "tests/tiers/test_async_tier.py",
    )
