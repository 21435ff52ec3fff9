"""R4: cancelled calls return no wrong bytes, leak nothing and leave buffers alone afterwards.

Method: calls of Redis, S3 and disk backends cancelled at random points.
"""

from __future__ import annotations

from tests.campaign.program import run_tests, seconds

if __name__ == "__main__":
    run_tests(
        "tests/redis/test_cancellation.py",
        "tests/s3/test_operations.py::test_many_cancelled",
        "tests/disk/test_buffers.py",
        scaled={"KVSTORE_TEST_CANCELLED": min(100_000, 2000 + int(100 * seconds()))},
    )
