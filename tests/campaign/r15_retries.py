"""R15: retries stay within a tenth of the load when every request fails.

Method: servers that count requests and fail them all; the budget alone.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/redis/test_hostile.py",
        "tests/s3/test_client.py",
        "tests/runtime/test_limits.py",
        "-k",
        "retries or attempt or budget",
    )
