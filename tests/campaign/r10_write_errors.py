"""R10: a failed write or sync publishes nothing, and the tier recovers.

Method: failed, short and lost writes and syncs in the disk backend; order of writes; a disk that fails for a while.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/disk/test_errors.py",
        "tests/disk/test_write_order.py",
        "tests/disk/test_dead.py",
        "-k",
        "write or written or fails or order or say or forgets",
    )
