"""Loads over links of three speeds, stored raw, compressed, and as ``auto`` decides: is it near the better of the two?

    python bench/codec_link.py [--backend redis|s3] [--quick] [--runs N] [--json FILE]

A real server (Redis, or SeaweedFS for S3) on this machine, and between it and the tier bench/throttle.py at 100 MB/s
and at 1 GB/s; "none" is no proxy. In each run each tier stores the same blocks (bench/kv_tensors.py, bf16) under new
keys; then all load them, one after the other, each in one job into other slots, three times over, and compare them.
The order is drawn anew each time: whoever comes after another finds the machine as that one left it. Before the runs
each tier works, until ``auto`` has had time to decide.

``gb_per_s`` is plain bytes by the time of a job. ``of_best`` is the median, over all loads, of the time of ``auto`` by
that of the same round of one of the other two: of the one whose median over all loads is the better. ``low`` and
``high`` are the ends of its 95 % interval, and ``within`` says whether it is at most 1.05: "unclear" if the interval
has 1.05 inside of it. A second raw tier is
compared with the first one in the same way. It is the same thing twice, so what its row shows is the machine's doing:
if that is not 1, a difference of this size in the row of ``auto`` says nothing. ``encodes`` is whether ``auto`` was
encoding at the end. Interrupted, it prints what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, median_interval, print_table, write_json
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
    "low",
    "high",
    "within",
    "encodes",
    "verified",
    "runs",
]
LINKS: dict[str, float] = {"100 MB/s": 100e6, "1 GB/s": 1e9, "none": 0.0}
CONTROL = "raw again"
CODECS = {"raw": "raw", "byteplane+zstd:1": "byteplane+zstd:1", "auto": "auto", CONTROL: "raw"}
WITHIN = 1.05
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
        self._keys: list[bytes] = []
        self._job_id = 0
        self.tier = open_tier(
            {
                **options, "codec": CODECS[codec], "namespace": codec.replace(" ", "-"), "load_timeout": 300,
                "store_timeout": 300, "store_backlog_bytes": "4GiB", "breaker_failures": 1000,
            },
            primary=memoryview(self._map), slot_bytes=self.block_bytes, namespace=Namespace({"dtype": "bfloat16"}),
        )  # fmt: skip

    def store(self) -> float:
        """Store all blocks under new keys; return the time."""
        self._keys = [key_of(self._number + i) for i in range(self.count)]
        self._number += self.count
        return self._run("store", self._keys, range(self.count))

    def load(self) -> tuple[float, bool]:
        """Load them; return the time, and whether the bytes are right."""
        self._slots[1] = 0
        seconds = self._run("load", self._keys, range(self.count, 2 * self.count))
        return seconds, bool(np.array_equal(self._slots[0], self._slots[1]))

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
    """Measure all codecs over one link; return their rows, of as many runs as there were before an interruption."""
    tiers = {codec: Tier(codec, options, blocks) for codec in CODECS}
    stores_s: dict[str, list[float]] = {codec: [] for codec in CODECS}
    loads_s: dict[str, list[float]] = {codec: [] for codec in CODECS}
    wrong: set[str] = set()
    rng = random.Random(runs)

    def one_round(stores: dict[str, list[float]], loads: dict[str, list[float]]) -> None:
        for codec in rng.sample(list(tiers), len(tiers)):
            stores[codec].append(tiers[codec].store())
        for _ in range(LOADS):
            for codec in rng.sample(list(tiers), len(tiers)):
                seconds, right = tiers[codec].load()
                loads[codec].append(seconds)
                wrong.update(set() if right else {codec})

    try:
        settled: dict[str, list[float]] = {codec: [] for codec in CODECS}
        while sum(settled["auto"]) < settle_s:
            one_round(settled, settled)
        with contextlib.suppress(KeyboardInterrupt):
            for _ in range(runs):
                one_round(stores_s, loads_s)
        interrupted = len(loads_s["raw"]) < runs * LOADS
        measured = {codec: (tier.ratio(), tier.encodes()) for codec, tier in tiers.items()}
    finally:
        for tier in tiers.values():
            tier.close()
    found = rows_of(backend, link, blocks, stores_s, loads_s)
    for row in found:
        row["ratio"], row["encodes"] = measured[row["codec"]]
        row["verified"] = row["codec"] not in wrong
    if interrupted:
        raise Interrupted(found)
    return found


class Interrupted(Exception):
    """Somebody has had enough of it; ``rows`` is what was measured of a link until then."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__()
        self.rows = rows


def rows_of(
    backend: str, link: str, blocks: np.ndarray, stores_s: dict[str, list[float]], loads_s: dict[str, list[float]]
) -> list[Row]:
    """Return the rows of one link, by the times of its stores and loads."""
    found: list[Row] = []
    for op, times in (("store", stores_s), ("load", loads_s)):
        if not all(times.values()):
            continue
        seconds = {codec: statistics.median(of_one) for codec, of_one in times.items()}
        best = min(("raw", "byteplane+zstd:1"), key=lambda codec: seconds[codec])
        for codec, of_one in times.items():
            row = {
                "bench": "codec_link", "system": f"kvstore-{backend}", "link": link, "codec": codec, "op": op,
                "block_bytes": blocks.shape[1], "blocks_per_job": len(blocks), "runs": len(of_one),
                "gb_per_s": blocks.nbytes / seconds[codec] / 1e9, "latency_s_p50": seconds[codec],
            }  # fmt: skip
            if op == "load" and codec in ("auto", CONTROL):
                other = times["raw" if codec == CONTROL else best]
                row |= compared([mine / its for mine, its in zip(of_one, other, strict=False)])
            found.append(row)
    return found


def compared(ratios: Sequence[float]) -> dict[str, Any]:
    """Return the median of ratios, its 95 % interval, and the verdict."""
    (low, high), middle = median_interval(ratios), statistics.median(ratios)
    within = "unclear" if low <= WITHIN < high else "yes" if middle <= WITHIN else "no"
    return {"of_best": middle, "low": low, "high": high, "within": within}


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
    except (KeyboardInterrupt, Interrupted) as error:
        finished += error.rows if isinstance(error, Interrupted) else []
        print("Interrupted; this is what was finished.", file=sys.stderr)
    print_table(finished, COLUMNS)
    write_json(options.json, finished)


if __name__ == "__main__":
    main()
