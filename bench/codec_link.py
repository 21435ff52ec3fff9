"""Loads over links of three speeds, stored raw, compressed, and as ``auto`` decides: is it near the better of the two?

    python bench/codec_link.py [--backend redis|s3] [--quick] [--runs N] [--json FILE]

A real server (Redis, or SeaweedFS for S3) on this machine, and between it and the tier bench/throttle.py at 100 MB/s
and at 1 GB/s; "none" is no proxy. Each run stores the same blocks (bench/kv_tensors.py, bf16) under new keys, then
loads them three times, each time in one job into other slots, and compares them. The three tiers take turns. Before the
runs each tier works, until ``auto`` has had time to decide. ``gb_per_s`` is plain bytes by the time of a job;
``of_best`` the time of ``auto`` by the shorter of the other two; ``encodes`` whether ``auto`` was encoding at the end.
Interrupted, it prints what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, print_table, write_json
from bench.kv_tensors import kv_blocks
from bench.throttle import throttled
from bench.tiers import key_of
from kvstore import Namespace, TransferJob, open_tier
from tests.redis import servers as redis_servers
from tests.s3 import servers as s3_servers

COLUMNS = [
    "system",
    "link",
    "codec",
    "op",
    "ratio",
    "gb_per_s",
    "latency_s_p50",
    "of_best",
    "encodes",
    "verified",
    "runs",
]
LINKS: dict[str, float] = {"100 MB/s": 100e6, "1 GB/s": 1e9, "none": 0.0}
CODECS = {"raw": "raw", "byteplane+zstd:1": "byteplane+zstd:1", "auto": "auto"}
LOADS = 3
"""Loads after each store; a row is the median of those of all runs."""
SETTLE_S = 5.0
"""Time that each tier works before it is measured; ``auto`` decides within one or two seconds of traffic."""


class Tier:
    """A tier over a link, with blocks in the first half of its slots and room for them in the second."""

    def __init__(self, codec: str, options: dict[str, Any], blocks: np.ndarray) -> None:
        self.count, self.block_bytes = blocks.shape
        self._map = mmap.mmap(-1, 2 * blocks.nbytes)
        self._slots = np.frombuffer(self._map, np.uint8).reshape(2, *blocks.shape)
        self._slots[0] = blocks
        self._number = 0
        self._job_id = 0
        self.tier = open_tier(
            {
                **options, "codec": CODECS[codec], "namespace": codec, "load_timeout": 300, "store_timeout": 300,
                "store_backlog_bytes": "4GiB", "breaker_failures": 1000,
            },
            primary=memoryview(self._map), slot_bytes=self.block_bytes, namespace=Namespace({"dtype": "bfloat16"}),
        )  # fmt: skip

    def turn(self) -> tuple[float, list[float], bool]:
        """Store all blocks under new keys, load them some times; return the times, and whether the bytes are right."""
        keys = [key_of(self._number + i) for i in range(self.count)]
        self._number += self.count
        store_s = self._run("store", keys, range(self.count))
        loads_s, right = [], True
        for _ in range(LOADS):
            self._slots[1] = 0
            loads_s.append(self._run("load", keys, range(self.count, 2 * self.count)))
            right = right and bool(np.array_equal(self._slots[0], self._slots[1]))
        return store_s, loads_s, right

    def ratio(self) -> float:
        """Return stored by plain bytes since the start."""
        codec = self.tier.stats().codec
        return codec.get("ratio", 1.0)

    def encodes(self) -> bool | None:
        """Return whether it encodes now; None for a tier that has no choice."""
        found = self.tier.stats().codec.get("auto_encodes")
        return None if found is None else found > 0

    def close(self) -> None:
        """End it."""
        self.tier.drain(60)
        self.tier.close()

    def _run(self, op: str, keys: Sequence[bytes], slots: Sequence[int]) -> float:
        self._job_id += 1
        job = TransferJob(self._job_id, keys, slots)
        started = time.perf_counter()
        (self.tier.submit_store if op == "store" else self.tier.submit_load)(job)
        self.tier.flush()
        while True:
            for result in self.tier.get_finished():
                if not result.success:
                    raise SystemExit(f"A {op} failed: {self.tier.stats().last_error}")
                self.tier.take_events()
                return time.perf_counter() - started
            # A scheduler's step; to spin would take the GIL from what is measured.
            time.sleep(0.0005)


@contextlib.contextmanager
def served(backend: str, directory: Path) -> Iterator[tuple[int, Any]]:
    """Run a server; yield its port, and what makes a tier's options of the port to use."""
    if backend == "redis":
        with redis_servers.running(redis_servers.plain("redis", directory, memory="2gb")) as (server,):
            yield server.port, lambda port: {"backend": "redis", "url": f"redis://127.0.0.1:{port}"}
        return
    with s3_servers.running(s3_servers.weed(directory)) as server:
        host, _, port_text = server.url.rpartition(":")
        credentials = {"access_key_id": server.access_key, "secret_access_key": server.secret_key}
        options = {"backend": "s3", "bucket": server.bucket, "region": server.region, **credentials}
        yield int(port_text), lambda port: {**options, "endpoint": f"{host}:{port}"}


def measure_link(
    backend: str, link: str, options: dict[str, Any], blocks: np.ndarray, runs: int, settle_s: float
) -> list[Row]:
    """Measure all codecs over one link; return their rows."""
    tiers = {codec: Tier(codec, options, blocks) for codec in CODECS}
    stores_s: dict[str, list[float]] = {codec: [] for codec in CODECS}
    loads_s: dict[str, list[float]] = {codec: [] for codec in CODECS}
    wrong: set[str] = set()
    try:
        for codec, tier in tiers.items():
            ended = time.monotonic() + (settle_s if codec == "auto" else 0)
            tier.turn()
            while time.monotonic() < ended:
                tier.turn()
        for number in range(runs):
            # Each goes first once in three runs: whoever comes after another finds the machine as that one left it.
            for codec in np.roll(list(tiers), number):
                store_s, turn_s, right = tiers[codec].turn()
                stores_s[codec].append(store_s)
                loads_s[codec] += turn_s
                wrong |= set() if right else {codec}
        encodes = {codec: tier.encodes() for codec, tier in tiers.items()}
        ratios = {codec: tier.ratio() for codec, tier in tiers.items()}
    finally:
        for tier in tiers.values():
            tier.close()
    found: list[Row] = []
    for op, times in (("store", stores_s), ("load", loads_s)):
        seconds = {codec: statistics.median(of_one) for codec, of_one in times.items()}
        best_s = min(value for codec, value in seconds.items() if codec != "auto")
        for codec, of_one in times.items():
            found.append({
                "bench": "codec_link", "system": f"kvstore-{backend}", "link": link, "codec": codec, "op": op,
                "block_bytes": blocks.shape[1], "blocks_per_job": len(blocks), "ratio": ratios[codec],
                "gb_per_s": blocks.nbytes / seconds[codec] / 1e9, "latency_s_p50": seconds[codec],
                "of_best": seconds[codec] / best_s if codec == "auto" and op == "load" else None,
                "encodes": encodes[codec], "verified": codec not in wrong, "runs": len(of_one),
            })  # fmt: skip
    return found


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--backend", choices=("redis", "s3"), default="redis")
    parser.add_argument("--runs", type=int, metavar="N", help="runs that a row is the median of (11; quick: 3)")
    parser.add_argument("--links", default=",".join(LINKS), help="comma-separated, of: " + ", ".join(LINKS))
    options = parser.parse_args()
    runs = options.runs or (3 if options.quick else 11)
    blocks = kv_blocks("bf16", tokens=512 if options.quick else 2048, layers=8)
    finished: list[Row] = []
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            served(options.backend, Path(directory) / "server") as (port, of),
        ):
            for link in options.links.split(","):
                proxy = throttled(port, LINKS[link]) if LINKS[link] else contextlib.nullcontext(port)
                with proxy as link_port:
                    settle_s = SETTLE_S / 2 if options.quick else SETTLE_S
                    finished += measure_link(options.backend, link, of(link_port), blocks, runs, settle_s)
    except KeyboardInterrupt:
        print("Interrupted; this is what was finished.", file=sys.stderr)
    print_table(finished, COLUMNS)
    write_json(options.json, finished)


if __name__ == "__main__":
    main()
