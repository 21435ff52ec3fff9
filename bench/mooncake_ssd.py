"""Store and load blocks by Mooncake Store's client over its SSD offload, and print the seconds; bench/peers.py runs it.

    python -m bench.mooncake_ssd DIRECTORY SIZE_KIB JOBS

A job has 64 blocks. A client puts blocks into its memory and writes them to the SSD in the background, so a store ends
when all blocks have a replica there. Then their replicas in memory are removed, so that loads read the SSD; they are
buffered, so the files leave the page cache before. Every byte is compared.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common import needs

needs("mooncake.store")

from mooncake import store as mooncake

from bench.common import end_with_parent, leave_page_cache
from examples.serving import free_port

BLOCKS_PER_JOB = 64
WAIT_S = 120.0
LEASE_S = 1
OFFLOAD = {"MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1", "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "64"}
"""Write as often as it can, and buckets of a job: by default a bucket waits for 500 blocks."""


def start_master() -> tuple[str, subprocess.Popen[bytes]]:
    """Start a master; return its address and its process."""
    folder, port = Path(mooncake.__file__).parent, free_port()
    libraries = str(folder.parent / "mooncake_transfer_engine_non_cuda.libs")
    process = subprocess.Popen(
        [
            *(str(folder / "mooncake_master"), "--enable_offload=true", f"--default_kv_lease_ttl={LEASE_S * 1000}"),
            *("--rpc_address=127.0.0.1", f"--rpc_port={port}", f"--metrics_port={free_port()}"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "LD_LIBRARY_PATH": libraries},
        preexec_fn=end_with_parent,
    )
    return f"127.0.0.1:{port}", process


def until(is_true: Callable[[], bool], what: str) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        if time.monotonic() > deadline:
            sys.exit(f"mooncake_ssd: no {what} within {WAIT_S} s")
        time.sleep(0.01)


def memory(size: int, content: bytes = b"") -> tuple[bytearray, int]:
    """Return memory and its address."""
    made = bytearray(content or size)
    return made, ctypes.addressof(ctypes.c_char.from_buffer(made))


def opened(address: str, directory: Path, size_bytes: int) -> Any:
    """Return a client with room for all blocks in memory, and with SSD offload."""
    client = mooncake.MooncakeDistributedStore()
    segment = size_bytes + (256 << 20)
    setup = ("127.0.0.1", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", address, None, True, str(directory))
    until(lambda: client.setup(*setup) == 0, "connection to the master")
    # Blocks that are put before the master knows the SSD are never written to it.
    time.sleep(5)
    return client


def main() -> None:
    """Store all jobs, then load them; print the bytes and the seconds as JSON, in the last line."""
    directory, size, jobs = Path(sys.argv[1]), int(sys.argv[2]) << 10, int(sys.argv[3])
    os.environ |= OFFLOAD
    directory.mkdir(parents=True, exist_ok=True)
    address, master = start_master()
    count = jobs * BLOCKS_PER_JOB
    source, source_at = memory(count * size, os.urandom(count * size))
    target, target_at = memory(count * size)
    client = opened(address, directory, count * size)
    for at in (source_at, target_at):
        client.register_buffer(at, count * size)
    keys = [f"block-{number}" for number in range(count)]
    parts = [range(first, first + BLOCKS_PER_JOB) for first in range(0, count, BLOCKS_PER_JOB)]
    sizes = [size] * BLOCKS_PER_JOB

    started = time.perf_counter()
    for part in parts:
        if any(client.batch_put_from([keys[n] for n in part], [source_at + n * size for n in part], sizes)):
            sys.exit("mooncake_ssd: a block was not put")
    missing = list(keys)

    def is_on_ssd() -> bool:
        while missing and any(each.is_local_disk_replica() for each in client.get_replica_desc(missing[-1])):
            missing.pop()
        return not missing

    until(is_on_ssd, "replica of each block on the SSD")
    store_s = time.perf_counter() - started

    time.sleep(LEASE_S + 1)
    client.batch_replica_clear(keys, client.get_hostname())
    in_memory = [key for key in keys if any(each.is_memory_replica() for each in client.get_replica_desc(key))]
    if in_memory:
        sys.exit(f"mooncake_ssd: {len(in_memory)} of {count} blocks are still in memory")
    leave_page_cache(directory)
    started = time.perf_counter()
    for part in parts:
        if client.batch_get_into([keys[n] for n in part], [target_at + n * size for n in part], sizes) != sizes:
            sys.exit("mooncake_ssd: a block was not loaded")
    load_s = time.perf_counter() - started
    if source != target:
        sys.exit("mooncake_ssd: bytes were wrong")
    print(json.dumps({"bytes": count * size, "block_bytes": size, "store": store_s, "load": load_s}), flush=True)
    master.kill()
    os._exit(0)  # The client's threads would wait for the master.


if __name__ == "__main__":
    main()
