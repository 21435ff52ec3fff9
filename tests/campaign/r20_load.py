"""R20: eight processes load verified blocks at 0.8 of the rate of a bare read-and-hash loop or more.

Method: bench/disk.py, on an idle machine.
"""

from __future__ import annotations

from tests.campaign.program import not_run

if __name__ == "__main__":
    not_run("a rate needs an idle machine: run bench/disk.py, and see docs/performance.md")
