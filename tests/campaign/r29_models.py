"""R29: the manager agrees with a reference model, and events with the disk, over random steps.

Method: 100,000 steps of programs that hypothesis draws, 50,000 of random walks, each invariant checked after each;
40,000 stores with evictions, removals and restarts.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/tiering/test_model.py",
        "tests/tiering/test_walk.py",
        "tests/tiers/test_event_model.py",
        "-m",
        "not walk",
    )
