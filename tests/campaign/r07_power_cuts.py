"""R7: a power cut leaves every block right or missing; with durability "data" each reported block is there.

Method: recorded writes of an engine replayed up to a random point, unsynced pages kept or lost at random; and a QEMU
guest on ext4, xfs and btrfs that is killed and verified at its next boot, where KVSTORE_GUEST names its directory.
"""

from __future__ import annotations

import os
import subprocess
import sys

from kvstore.testing.seeds import SEED_VARIABLE, fresh_seed
from tests.campaign.program import ROOT, failed, figure_of_tests, passed, run_tests, seconds

CYCLE_S = 40
"""About what a cycle of the guest takes on a busy machine."""

if __name__ == "__main__":
    guest = os.environ.get("KVSTORE_GUEST")
    if guest is None:
        run_tests("tests/disk/test_power_cut.py")
    seed = fresh_seed()
    replayed = figure_of_tests([seed], "tests/disk/test_power_cut.py")
    cycles = max(2, int(seconds() / 6 / CYCLE_S))
    command = [sys.executable, "-m", "tests.campaign.power_cuts", guest, "--cycles", str(cycles), "--seed", str(seed)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    last = done.stdout.strip().splitlines()[-1]
    if done.returncode:
        failed(f"{SEED_VARIABLE}={seed}: {last}")
    passed(f"{last}; {replayed} of recorded writes")
