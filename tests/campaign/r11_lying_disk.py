"""R11: a medium that damages or misdirects one read in three never gives a wrong block.

Method: a disk tier whose reads are flipped, shortened or misdirected at random; every loaded block is compared.
"""

from __future__ import annotations

import random
import tempfile
from functools import partial
from pathlib import Path

from kvstore.testing import Fault, FaultKind, FaultPlan, FaultyBackend
from tests.campaign.program import failed, passed, rounds
from tests.torture.blocks import Client, lent_by

UNIVERSE, JOBS, BLOCKS = 400, 400, 8
LIES = (FaultKind.FLIP_HEADER, FaultKind.FLIP_PAYLOAD, FaultKind.SHORT, FaultKind.MISDIRECT)

if __name__ == "__main__":
    reads = hits = lies = 0
    for seed in rounds():
        rng = random.Random(seed)
        plan = FaultPlan([Fault("get", kind, times=None, probability=0.1) for kind in LIES], seed=seed)
        with tempfile.TemporaryDirectory() as directory:
            config = {"backend": "file", "path": str(Path(directory) / "kv"), "capacity": "64MiB", "reserve": 0}
            # The breaker would leave a medium like this one alone, and nothing would be read.
            config |= {"breaker_failures": 1_000_000}
            client = Client(config, wrap_backend=partial(FaultyBackend, plan=plan))
            for _ in range(JOBS):
                numbers = rng.sample(range(UNIVERSE), BLOCKS)
                client.store(numbers)
                loaded = client.load(numbers)
                if wrong := client.wrong(numbers, loaded):
                    failed(f"seed {seed}: wrong bytes of blocks {wrong}; {plan}")
                reads, hits = reads + BLOCKS, hits + len(loaded.successful_keys)
            if any((lent := lent_by(client.tier)).values()):
                failed(f"seed {seed}: the idle tier has lent {lent}")
            client.close()
        lies += plan.injected.total()
    if not hits or lies < reads // 5:
        failed(f"{hits} hits, {lies} lies in {reads} reads: the medium did not lie as planned")
    passed(f"0 wrong in {reads:,} reads, {lies:,} of them damaged or misdirected, {hits:,} hits")
