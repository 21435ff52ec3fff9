"""R16: no network fault gives wrong bytes or a call that hangs.

Method: a thousand S3 requests under each fault; hostile Redis servers and peers; cut, stalled and flipped connections;
a thousand requests under each fault of a peer; ten thousand connections of peers changed by a man in the middle.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/s3/test_faults.py",
        "tests/redis/test_hostile.py",
        "tests/redis/test_operations.py::test_bad_network",
        "tests/peer/test_faults.py",
        "tests/peer/test_fault_requests.py",
        "tests/peer/test_walk.py",
        "tests/peer/test_relay.py",
        "tests/peer/test_middle.py",
    )
