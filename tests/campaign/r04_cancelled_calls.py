"""R4: cancelled calls return no wrong bytes, leak nothing and leave buffers alone afterwards.

Method: calls of Redis (100,000), S3 and disk backends cancelled at random points.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/redis/test_cancellation.py",
        "tests/s3/test_operations.py::test_many_cancelled",
        "tests/disk/test_buffers.py",
    )
