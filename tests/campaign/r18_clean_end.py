"""R18: close returns in time and leaves no thread, process or descriptor behind.

Method: closing under frozen and failing disks, hung tiers and dead I/O processes.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/disk/test_dead.py",
        "tests/disk/test_frozen.py",
        "tests/runtime/test_process.py",
        "tests/runtime/test_host.py",
        "tests/contract/test_memory_tier.py",
        "-k",
        "close",
    )
