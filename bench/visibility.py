"""Delay from the store of a block until another engine on the machine finds it, in a shared directory.

    python bench/visibility.py [--quick] [--json FILE] [--directory DIR]

There are two tiers in one process, each with its I/O thread. The delay is the time from the report of the store by one
tier to the first hit in the other, which looks the block up every 50 microseconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

# The repository replaces this directory, whose modules have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, percentile, reporting, scratch, shared_memory
from kvstore import AsyncTier, LookupResult, Namespace, TransferJob, open_tier

_SLOT_BYTES = 128 * 1024
_COLUMNS = ["system", "op", "block_bytes", "stores", "latency_s_p50", "latency_s_p99", "latency_s_max"]
_LIMIT_S = 10.0


def visibility_row(directory: Path, stores: int) -> Row:
    """Store blocks in one engine, one at a time, and look each up in the other."""
    memory = memoryview(shared_memory(_SLOT_BYTES))
    options = {"backend": "file", "path": str(directory), "capacity": "1GiB", "reserve": 0}

    def engine() -> AsyncTier:
        return open_tier(options, primary=memory, slot_bytes=_SLOT_BYTES, namespace=Namespace({"bench": "visibility"}))

    delays: list[float] = []
    with engine() as storing, engine() as finding:
        for number in range(stores):
            key = b"%032d" % number
            storing.submit_store(TransferJob(number, keys=[key], slots=[0]))
            while not (results := list(storing.get_finished())):
                time.sleep(50e-6)
            assert results[0].success
            stored = time.perf_counter()
            while finding.lookup(key) is not LookupResult.HIT:
                finding.get_finished()
                assert time.perf_counter() < stored + _LIMIT_S, "the block is not found"
                time.sleep(50e-6)
            delays.append(time.perf_counter() - stored)
    return {
        "bench": "visibility", "system": "kvstore-file", "op": "lookup", "block_bytes": _SLOT_BYTES, "stores": stores,
        "latency_s_p50": percentile(delays, 0.5), "latency_s_p99": percentile(delays, 0.99),
        "latency_s_max": max(delays),
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the drive to measure")
    options = parser.parse_args()
    with reporting(options, _COLUMNS) as rows, scratch(options.directory) as directory:
        rows.append(visibility_row(directory, 50 if options.quick else 1000))


if __name__ == "__main__":
    main()
