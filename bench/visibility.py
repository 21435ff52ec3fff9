"""How long after its store another engine on the machine finds a block, in a directory that both use.

    python bench/visibility.py [--quick] [--json FILE] [--directory DIR]

Two tiers in one process, each with its I/O thread. The delay counts from the moment the one reports the store to the
first lookup of the other that is a hit; a lookup every 50 microseconds asks.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

# In place of this directory, where modules have the names of packages: the repository.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, percentile, print_table, shared_memory, write_json
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
    parser.add_argument("--directory", type=Path, default=Path("bench-visibility.tmp"), help="on the drive to measure")
    options = parser.parse_args()
    try:
        rows = [visibility_row(options.directory, 50 if options.quick else 1000)]
    finally:
        shutil.rmtree(options.directory, ignore_errors=True)
    print_table(rows, _COLUMNS)
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
