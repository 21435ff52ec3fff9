"""Runs in the guest of power_cuts.py: verifies the blocks on /data, then stores new ones until the power is cut."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

from tests.torture.blocks import Client, key_of

BLOCKS_PER_JOB = 6

SYNCED_SHARE = 0.05
"""Share of stores before which another program syncs the disk, if kvstore does not."""


def main() -> None:
    """Print ``FOUND [numbers]``, ``WRONG [numbers]``, then ``STORED n`` for each block that was reported as stored."""
    words = dict(re.findall(r"kv(\w+)=(\S+)", Path("/proc/cmdline").read_text()))
    config = {"backend": "file", "path": "/data/kv", "capacity": "96MiB", "reserve": 0, "load_timeout": 120}
    config |= {"store_timeout": 120, "durability": words["durability"], "direct": words["direct"]}
    client = Client(config)
    found: list[int] = []
    wrong: list[int] = []
    number = int(words["first"])
    for start in range(0, number, BLOCKS_PER_JOB):
        some = list(range(start, start + BLOCKS_PER_JOB))
        loaded = client.load(some)
        wrong += client.wrong(some, loaded)
        found += [n for n in some if key_of(n) in loaded.successful_keys]
    print(f"\nFOUND {json.dumps(found)}\nWRONG {json.dumps(wrong)}", flush=True)
    while True:
        # Without a sync by anyone, a filesystem keeps nothing of the first half minute (XFS) or few seconds.
        if words["durability"] == "none" and random.random() < SYNCED_SHARE:
            os.sync()
        some = list(range(number, number + BLOCKS_PER_JOB))
        result = client.store(some)
        done = [n for n in some if key_of(n) in result.successful_keys]
        print(f"\nSTORED {json.dumps(done)}", flush=True)
        number += BLOCKS_PER_JOB


if __name__ == "__main__":
    main()
