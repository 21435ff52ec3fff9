"""R19: memory stays flat at ten times the load of the medium; the excess is shed.

Method: jobs are submitted to a disk tier without waiting, each as soon as the last ones were shed or ended; every
loaded block is compared. Resident memory at the end against a fifth of the way.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from pathlib import Path

import psutil

from kvstore import Namespace, open_tier
from kvstore.testing.seeds import fresh_seed
from kvstore.types import Outcome, TransferJob
from tests.campaign.program import failed, passed, seconds
from tests.torture.blocks import key_of, lent_by, payload_of

SLOTS, SLOT_BYTES, UNIVERSE = 512, 65536, 2000
QUEUED = 400
"""Jobs submitted at once: ten times the eighty or so that a disk has in flight."""

GROWTH_BYTES_MAX = 4 << 20
"""Two jobs in a thousand that leave a slot behind, or some hundred bytes of each job, are more in the shortest run."""

DRAIN_S = 60.0
"""Every job must have been reported so long after the last one."""


def take_finished() -> None:
    """Count the jobs that have ended, and compare the loaded blocks."""
    for result in tier.get_finished():
        slot, number, is_store = running.pop(result.job_id)
        good = bool(result.successful_keys)
        if is_store:
            counts["stored" if good else "shed" if Outcome.SHED in result.outcomes else "failed"] += 1
        else:
            counts["loaded" if good else "missed"] += 1
        if good and not is_store and view[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] != payloads[number]:
            failed(f"seed {seed}: wrong bytes of block {number}")
        free.append(slot)


if __name__ == "__main__":
    rng = random.Random(seed := fresh_seed())
    length = max(20.0, seconds())
    process = psutil.Process()
    payloads = [payload_of(number, SLOT_BYTES) for number in range(UNIVERSE)]
    memory = bytearray(SLOTS * SLOT_BYTES)
    counts = dict.fromkeys(("jobs", "stored", "shed", "failed", "loaded", "missed"), 0)
    with tempfile.TemporaryDirectory() as directory:
        config = {"backend": "file", "path": str(Path(directory) / "kv"), "capacity": "64MiB", "reserve": 0}
        config |= {"inflight_bytes": "4MiB", "store_backlog_bytes": "8MiB"}
        tier = open_tier(config, primary=memory, slot_bytes=SLOT_BYTES, namespace=Namespace({"campaign": 19}))
        view = memoryview(memory)
        free, running = list(range(SLOTS)), {}
        started, early = time.monotonic(), 0
        while (passed_s := time.monotonic() - started) < length:
            while free and len(running) < QUEUED:
                slot, number = free.pop(), rng.randrange(UNIVERSE)
                counts["jobs"] += 1
                is_store = rng.random() < 0.6
                place = view[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
                place[:] = payloads[number] if is_store else bytes(SLOT_BYTES)
                running[counts["jobs"]] = (slot, number, is_store)
                submit = tier.submit_store if is_store else tier.submit_load
                submit(TransferJob(counts["jobs"], [key_of(number)], [slot]))
            take_finished()
            if not early and passed_s > length / 5:
                gc.collect()
                early = process.memory_info().rss
            time.sleep(0.001)
        gc.collect()
        late = process.memory_info().rss
        while running and time.monotonic() - started < length + DRAIN_S:
            take_finished()
            time.sleep(0.01)
        if running:
            failed(f"seed {seed}: {len(running)} jobs were not reported within {DRAIN_S:.0f} s")
        if any((lent := lent_by(tier)).values()):
            failed(f"seed {seed}: the idle tier has lent {lent}")
        view.release()
        tier.close()
    growth = late - early
    jobs = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    figure = f"{growth / 1e6:+.1f} MB ({growth / early:+.1%}) resident memory over {length:.0f} s, 0 wrong; {jobs}"
    if growth > GROWTH_BYTES_MAX or not all(counts[name] for name in ("stored", "shed", "loaded")):
        failed(f"seed {seed}: {figure}")
    passed(figure)
