"""R23: links, devices, FIFOs and files of other users in a directory are neither followed nor waited for.

Method: planted objects in place of each file and directory of the disk backend.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/disk/test_recovery.py",
        "tests/disk/test_open.py",
        "tests/disk/test_impostors.py",
    )
