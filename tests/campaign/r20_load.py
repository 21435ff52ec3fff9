"""R20: eight processes load verified blocks at 0.8 of the rate of a bare read-and-hash loop or more.

Method: eight engines share a directory on a drive, each with a primary tier of its own, and load the blocks that they
stored. In turns with them, eight processes read as many bytes of one file each, one piece of the same size after the
other, and hash each piece. All use direct I/O; the ratio is the median of five turns. Needs an otherwise idle machine.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import xxhash

from kvstore import Namespace, open_tier
from kvstore.types import BlockKey, TransferJob
from tests.campaign.program import ROOT, failed, not_run, passed
from tests.torture.blocks import key_of

PROCESSES, TURNS, RATIO_MIN = 8, 5, 0.8
BLOCK_BYTES, BLOCKS, JOB_BLOCKS = 2 << 20, 64, 16
"""Length and number of the blocks of a process, and blocks of one job; all jobs are submitted at once."""

BUSY_MAX = 20.0
"""Percentage of the CPUs that others may use."""


Work = tuple[Callable[[], None], Callable[[], None]]
"""The measured function of a process, and the one that checks its result before the next turn."""


def load(directory: str, number: int) -> Work:
    """Store the blocks of an engine; return the function that loads them, and one that compares and clears them."""
    memory = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)
    memory[:] = os.urandom(BLOCK_BYTES * BLOCKS)
    content, nothing = xxhash.xxh3_128_digest(memory), bytes(BLOCK_BYTES * BLOCKS)
    config = {
        "backend": "file", "path": f"{directory}/tier", "capacity": "4GiB", "reserve": 0, "store_timeout": 60,
        "direct": "on", "load_timeout": 60, "store_backlog_bytes": "4GiB", "inflight_bytes": "1GiB",
    }  # fmt: skip
    tier = open_tier(config, primary=memory, slot_bytes=BLOCK_BYTES, namespace=Namespace({"campaign": 20}))
    keys: list[BlockKey] = [key_of(number * BLOCKS + i) for i in range(BLOCKS)]
    jobs = [range(start, start + JOB_BLOCKS) for start in range(0, BLOCKS, JOB_BLOCKS)]

    def run(submit: Callable[[TransferJob], None]) -> None:
        for job_id, places in enumerate(jobs):
            submit(TransferJob(job_id, [keys[i] for i in places], list(places)))
        tier.flush()
        left = len(jobs)
        while left:
            for result in tier.get_finished():
                if len(result.successful_keys) != JOB_BLOCKS:
                    raise RuntimeError(f"blocks failed: {tier.stats().last_error}")
                left -= 1
            time.sleep(0.0002)

    def check() -> None:
        if xxhash.xxh3_128_digest(memory) != content:
            raise RuntimeError("wrong bytes were loaded")
        memory[:] = nothing

    run(tier.submit_store)
    check()
    return partial(run, tier.submit_load), check


def read(directory: str, number: int) -> Work:
    """Write a file; return the function that reads and hashes it, and one without a task."""
    path = Path(directory) / f"plain-{number}"
    path.write_bytes(os.urandom(BLOCK_BYTES) * BLOCKS)
    descriptor, piece = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, BLOCK_BYTES)
    os.fsync(descriptor)

    def run() -> None:
        for i in range(BLOCKS):
            if os.preadv(descriptor, [piece], i * BLOCK_BYTES) != BLOCK_BYTES:
                raise RuntimeError("a short read")
            xxhash.xxh3_128_digest(piece)

    return run, lambda: None


def work(kind: Callable[[str, int], Work], directory: str, number: int, orders: Connection) -> None:
    """Be one of the processes: run once for each order, and report when that began and ended."""
    run, check = kind(directory, number)
    orders.send(None)
    while orders.recv():
        started = time.monotonic()
        run()
        ended = time.monotonic()
        check()
        orders.send((started, ended))
    os._exit(0)


def seconds_of(processes: list[Connection]) -> float:
    """Let all processes run once, together; return the time from the first start to the last end."""
    for orders in processes:
        orders.send(True)
    found = [orders.recv() for orders in processes]
    return max(ended for _, ended in found) - min(started for started, _ in found)


def started(kind: Callable[[str, int], Work], directory: str) -> list[Connection]:
    """Start the processes; return the ends of their pipes when all are ready."""
    context, ends = multiprocessing.get_context("spawn"), []
    for number in range(PROCESSES):
        here, there = context.Pipe()
        context.Process(target=work, args=(kind, directory, number, there), daemon=True).start()
        ends.append(here)
    for orders in ends:
        orders.recv()
    return ends


def main() -> None:
    """Measure in turns."""
    if psutil.cpu_percent(2.0) > BUSY_MAX:
        not_run("a rate needs an idle machine")
    # Not in /tmp, which may be in memory.
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".campaign-") as directory:
        readers, engines = started(read, directory), started(load, directory)
        os.sync()
        ratios, rates = [], []
        for turn in range(TURNS + 1):
            bare_s, tier_s = seconds_of(readers), seconds_of(engines)
            if turn:  # The first does not count.
                ratios.append(bare_s / tier_s)
                rates.append(PROCESSES * BLOCKS * BLOCK_BYTES / 1e9 / tier_s)
        for orders in [*readers, *engines]:
            orders.send(False)
    ratio = statistics.median(ratios)
    figure = (
        f"{ratio:.2f} of the bare loop ({min(ratios):.2f} to {max(ratios):.2f}), {statistics.median(rates):.2f} GB/s"
    )
    if ratio < RATIO_MIN:
        failed(figure)
    passed(figure)


if __name__ == "__main__":
    main()
