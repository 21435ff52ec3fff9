"""Blocks that a disk tier of a given capacity holds, by codec chain.

    python bench/density.py [--quick] [--capacity 10GiB] [--codecs raw byteplane+zstd] [--json FILE] [--directory DIR]

bf16 blocks of bench/kv_tensors.py are stored under new keys until a third of the capacity was evicted. ``of_first`` is
the number of blocks divided by that of the first chain.
"""

from __future__ import annotations

import sys
from pathlib import Path

# The repository replaces this directory, whose modules have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import needs

needs("torch", "transformers", "zstandard")

import numpy as np

from bench.common import Row, arguments, reporting, scratch, shared_memory
from bench.kv_tensors import kv_blocks
from kvstore import Namespace, TransferJob, open_tier
from kvstore.quantity import ByteSize

_COLUMNS = ["codec", "capacity_bytes", "block_bytes", "blocks", "of_first", "stored"]
_PAGE = 4096
_LIMIT_S = 120.0


def held_blocks(directory: Path, codec: str, capacity_bytes: int, blocks: np.ndarray) -> Row:
    """Fill a tier until a third of it was evicted; return how many blocks it holds."""
    count, block_bytes = blocks.shape
    slot_bytes = -(-block_bytes // _PAGE) * _PAGE
    memory = memoryview(shared_memory(count * slot_bytes))
    rows = np.frombuffer(memory, np.uint8).reshape(count, slot_bytes)
    rows[:, :block_bytes] = blocks
    options = {"backend": "file", "path": str(directory), "capacity": capacity_bytes, "reserve": 0, "codec": codec}
    stored = 0
    namespace = Namespace({"bench": "density", "dtype": "bfloat16"})
    with open_tier(options, primary=memory, slot_bytes=slot_bytes, namespace=namespace) as tier:
        while tier.stats().backend_counters.get("evicted_blocks", 0) * slot_bytes * 3 < capacity_bytes:
            keys = [b"%032d" % number for number in range(stored, stored + count)]
            tier.submit_store(TransferJob(stored, keys=keys, slots=range(count)))
            tier.flush()
            assert tier.drain(_LIMIT_S)
            assert all(result.success for result in tier.get_finished()), tier.stats().last_error
            stored += count
        found = tier.stats().blocks
    return {
        "bench": "density", "codec": codec, "capacity_bytes": capacity_bytes, "block_bytes": block_bytes,
        "blocks": found, "stored": stored,
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="on the drive to fill")
    parser.add_argument("--capacity", type=ByteSize, default=ByteSize("10GiB"))
    parser.add_argument("--codecs", nargs="*", default=["raw", "byteplane+zstd"])
    options = parser.parse_args()
    capacity_bytes = (256 << 20) if options.quick else options.capacity
    blocks = kv_blocks("bf16", tokens=256 if options.quick else 1024, layers=8)
    with reporting(options, _COLUMNS) as rows, scratch(options.directory) as directory:
        for codec in options.codecs:
            row = held_blocks(directory / codec, codec, capacity_bytes, blocks)
            rows.append({**row, "of_first": row["blocks"] / (rows[0]["blocks"] if rows else row["blocks"])})


if __name__ == "__main__":
    main()
