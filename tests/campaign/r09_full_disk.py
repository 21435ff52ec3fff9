"""R9: the capacity and the reserve hold, and a full disk stops stores only.

Method: eight processes on small ext4 and tmpfs mounts; disks filled by another process.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/disk/test_capacity.py",
        "tests/disk/test_full_disk.py",
        "tests/disk/test_room.py",
    )
