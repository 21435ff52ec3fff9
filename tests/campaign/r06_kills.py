"""R6: after SIGKILLs at random points no block is wrong, directories are adopted, and the capacity holds.

Method: 500 kills of three writers in one directory; kills of owners under a reader; four engines racing to adopt;
kills of the I/O process.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/disk/test_kills.py",
        "tests/disk/test_killed_owners.py",
        "tests/disk/test_io_process.py",
    )
