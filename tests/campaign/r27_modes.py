"""R27: files and directories are readable by their owner only, whatever the umask.

Method: modes of everything made under umask 000.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/disk/test_recovery.py",
        "tests/disk/test_open.py",
        "-k",
        "modes or umask or everybody",
    )
