"""R8: whichever system call fails, nothing wrong is read, no descriptor leaks, and work continues afterwards.

Method: the Nth call of each kind fails, once and for a while, on io_uring and on threads.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/disk/test_errors.py",
    )
