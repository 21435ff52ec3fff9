"""Redis clients side by side on one server: redis-py with hiredis, valkey-glide, kvstore, and redis-benchmark.

    python bench/redis.py [--quick] [--runs N] [--sizes KIB ...] [--mib N] [--json FILE]

Each system moves the same number of values of the same length, with the same number in flight, in one process on one
event loop (uvloop). redis-py and glide return bytes, which are discarded without checks and without a copy into a slot.
kvstore does the whole work: header and checksum for a set; for a get, reading into the slot, and checks of length,
header, key, namespace and checksum. kvstore-tier is a whole tier under kvstore-bench's driver; kvstore-client is its
client alone, without headers and checksums. Both have two jobs in flight. redis-py-asyncio is redis-py on Python's own
event loop, as in most programs; it is measured at 2 MiB only. Sets go to a full server that evicts, and gets to one
without a limit. Systems take turns, run by run; a row is the median. CPU time is that of this process. Beside a
spinning thread, kvstore runs as a whole tier, and the spinning thread is the one that calls it each millisecond, as a
scheduler does; the other clients submit their requests on their own loop. After an interruption (also by SIGTERM), the
complete rows are printed.

redis-benchmark sends a value of a SET in one call, like kvstore, and is an upper bound there. For a GET it receives at
most 16 KiB per call (``strace -f -e recvfrom``), so 128 calls for 2 MiB, and others may be faster. ``--threads`` does
not help: it then ends on a tick of a quarter of a second, and reports 1.07 GB/s for 256 MiB regardless of the actual
time.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import io
import os
import random
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

# The repository replaces this directory, whose module redis would hide the package of that name.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import (
    Row,
    arguments,
    bytes_of,
    driven_row,
    in_turns,
    median_row,
    needs,
    print_table,
    reporting,
    run_phase,
    runs_of,
)

needs("cryptography", "glide", "redis", "uvloop", programs=["redis-server", "redis-cli", "redis-benchmark"])

import glide
import redis.asyncio
import uvloop

from bench.clients import Client, MovedSlots, at_once, measured
from kvstore.backends.base import RecordRead, RecordWrite
from kvstore.backends.redis import RedisBackend, RedisConfig
from kvstore.cli.bench.driver import Driver
from kvstore.cli.bench.payload import Payload
from kvstore.cli.bench.systems import TierSystem, cpu_seconds_of
from kvstore.cli.bench.workload import Mix, Workload
from kvstore.namespace import Namespace
from kvstore.primary import Region
from kvstore.runtime.messages import JobKind
from kvstore.types import Outcome
from tests.redis.servers import PASSWORD, Server, cli, plain, running, secured

KIB, MIB = 1024, 1024**2
COLUMNS = [
    "system", "op", "block_bytes", "jobs", "blocks_per_job", "tls", "spin", "host",
    "gb_per_s", "ops_per_s", "cpu_s_per_gb", "latency_s_p50", "latency_s_p99", "spin_rate", "of_ceiling", "verified",
    "runs",
]  # fmt: skip
MEMORY = "1gb"
"""Capacity of a server that evicts."""
ADMIN = {"username": "admin", "password": PASSWORD}


class RedisClient(Client):
    """One system under test. ``round`` makes the keys of each run different."""

    own_loop = False

    def __init__(self, server: Server, size: int, inflight: int) -> None:
        super().__init__(size, inflight)
        self.server = server
        self.round = 0

    def key(self, number: int) -> bytes:
        return number.to_bytes(16, "big") + self.round.to_bytes(16, "big")


class RedisPy(RedisClient):
    """redis-py's asyncio client with hiredis, one pool."""

    name = "redis-py"

    async def open(self) -> None:
        self.client = plain_client(self.server, max_connections=self.inflight)
        await asyncio.gather(*(self.client.ping() for _ in range(self.inflight)))

    async def close(self) -> None:
        await self.client.aclose()

    async def set(self, number: int) -> None:
        await self.client.set(self.key(number), self.value(number), nx=True, ex=3600)

    async def get(self, number: int) -> None:
        self.check(await self.client.get(self.key(number)))


class RedisPyAsyncio(RedisPy):
    """The same on asyncio's own loop."""

    name = "redis-py-asyncio"
    own_loop = True


class Glide(RedisClient):
    """valkey-glide's asyncio client, with one connection, because it multiplexes requests."""

    name = "valkey-glide"

    async def open(self) -> None:
        options: dict[str, Any] = {}
        if self.server.tls_ca:
            tls = glide.TlsAdvancedConfiguration(root_pem_cacerts=self.server.tls_ca.read_bytes())
            options = {
                "use_tls": True,
                "credentials": glide.ServerCredentials(PASSWORD, "admin"),
                "advanced_config": glide.AdvancedGlideClientConfiguration(tls_config=tls),
            }
        address = glide.NodeAddress("localhost" if self.server.tls_ca else "127.0.0.1", self.server.port)
        config = glide.GlideClientConfiguration([address], request_timeout=20000, **options)
        self.client = await glide.GlideClient.create(config)

    async def close(self) -> None:
        await self.client.close()

    async def set(self, number: int) -> None:
        await self.client.set(
            self.key(number), self.value(number), conditional_set=glide.ConditionalChange.ONLY_IF_DOES_NOT_EXIST,
            expiry=glide.ExpirySet(glide.ExpiryType.SEC, 3600),
        )  # fmt: skip

    async def get(self, number: int) -> None:
        self.check(await self.client.get(self.key(number)))


class KVStore(RedisClient):
    """kvstore with a tier's work: slots, headers, checksums, verification on worker threads."""

    name = "kvstore-redis"
    verified = True

    async def open(self) -> None:
        options = {"tls_ca": self.server.tls_ca, **ADMIN} if self.server.tls_ca else {}
        # The same timeout as the other clients; long enough for a loaded machine.
        self.backend = RedisBackend(RedisConfig(url=self.server.url, timeout=20, **options))
        namespace = Namespace({"bench": "redis", "size": self.size})
        self.slots = MovedSlots(self.backend, namespace, self.size, self.per_job * self.workers)
        await self.slots.open()

    async def close(self) -> None:
        await self.slots.close()

    async def move(self, kind: JobKind, keys: Sequence[bytes]) -> None:
        await self.slots.move(kind, keys)

    async def set(self, number: int) -> None:
        await self.move(JobKind.STORE, [self.key(each) for each in self.numbers_of(number)])

    async def get(self, number: int) -> None:
        await self.move(JobKind.LOAD, [self.key(each) for each in self.numbers_of(number)])


class KVStoreJob(KVStore):
    """The same number of blocks in flight, in one job at a time, like the blocks of a prompt in a tier."""

    blocks_per_job = None


class KVStoreClient(KVStoreJob):
    """The client alone, without headers, hashes and verification."""

    name = "kvstore-client"
    verified = False
    # The same number of jobs in flight as in measure_tier().
    jobs = 2

    async def open(self) -> None:
        await super().open()
        self.free = list(range(self.jobs))

    async def move(self, kind: JobKind, keys: Sequence[bytes]) -> None:
        place = self.free.pop()
        rows = memoryview(self.slots.memory)[place * self.inflight * self.size :]
        pairs = [(memoryview(bytearray(256)), rows[i * self.size : (i + 1) * self.size]) for i in range(len(keys))]
        if kind is JobKind.STORE:
            outcomes = await self.backend.put([RecordWrite(k, pair) for k, pair in zip(keys, pairs, strict=True)])
        else:
            outcomes = await self.backend.get_into([RecordRead(k, pair) for k, pair in zip(keys, pairs, strict=True)])
        self.free.append(place)
        if set(outcomes) != {Outcome.OK}:
            raise RuntimeError(f"{kind}: {set(outcomes)} {self.backend.last_error}")


def plain_client(server: Server, **options: Any) -> redis.asyncio.Redis:
    """Return redis-py's client of a server."""
    if server.tls_ca:
        options |= {"ssl": True, "ssl_ca_certs": str(server.tls_ca), **ADMIN}
    return redis.asyncio.Redis(host="127.0.0.1", port=server.port, **options)


def measure(kind: type[Any], server: Server, op: str, size: int, inflight: int, total: int, spin: bool) -> Row:
    """Make one run of a client in a loop of its own; return its row."""

    async def run() -> Row:
        client = kind(server, size, inflight)
        count = max(inflight * 4, total // size) // client.per_job
        await client.open()
        try:
            if op == "get":
                wipe(server)
                await at_once(client.workers, range(count), client.set)
                await at_once(client.workers, range(min(count, 2 * client.workers)), client.get)
            else:
                # The server is full and evicts, like a cache; each run has keys of its own.
                client.round = random.getrandbits(60)
            work = client.get if op == "get" else client.set
            return await measured(client, op, range(count), work, spin=spin)
        finally:
            await client.close()

    row = (asyncio.run if kind.own_loop else uvloop.run)(run())
    return {"bench": "redis", "host": "thread", "tls": bool(server.tls_ca), **row}


def measure_tier(
    server: Server, op: str, size: int, inflight: int, total: int, *, host: str = "thread", spin: bool = False
) -> Row:
    """Make one run through a whole tier: two concurrent jobs, or beside a spinning thread jobs of one block."""
    per_job, jobs = (1, inflight) if spin else (inflight, 2)
    count = max(inflight * 4, total // size) // per_job
    workload = Workload(
        size, per_job, jobs, Mix(float(op == "set")), duration_s=600.0, ops_max=count, warmup_s=0.0,
        working_set_bytes=count * per_job * size, verify="none", spin=spin,
    )  # fmt: skip
    options = {
        "backend": "redis",
        "url": server.url,
        "io": host,
        "timeout": 20,
        "store_timeout": 60,
        "load_timeout": 60,
    }
    with Region.create(workload.slots, size) as region:
        namespace = Namespace({"run": random.getrandbits(60)})
        name = KVStore.name if spin else "kvstore-tier"
        system = TierSystem(options, region.view(), size, namespace, name=name)
        system.looks_up = False  # The other clients make no lookups either.
        blocks = Payload("random", size, 1).prepare(region)
        try:
            driver = Driver(system, blocks)
            if op == "get":
                wipe(server)
                driver.fill(workload)
            server_s = cpu_seconds_of(server.pid)
            row = driven_row("redis", driver, workload, run_phase(driver, workload))
            if not spin:  # The CPU time of a phase includes that of children.
                row["cpu_s_per_gb"] -= (cpu_seconds_of(server.pid) - server_s) / (count * per_job * size / 1e9)
        finally:
            system.close()
            blocks.release()
    return row | {"op": op, "tls": False, "verified": op == "get"}


def ceiling(server: Server, op: str, size: int, inflight: int, total: int) -> Row:
    """Return the row of redis-benchmark (a C program that discards values) on the same server."""
    count = max(inflight * 4, total // size)
    options = ["-p", str(server.port), "-c", str(inflight), "-n", str(count), "--csv", "-d", str(size)]
    if server.tls_ca:
        options += ["--tls", "--cacert", str(server.tls_ca), "--user", "admin", "-a", PASSWORD]
    if op == "get":
        # As many distinct values as the others use, because a single value would stay in the server's CPU cache.
        command = ["-r", str(count), "get", "kv:ceiling:__rand_int__"]
        wipe(server)
        fill(server, count, size)
    else:
        # Random keys, nearly always new.
        command = ["-r", str(10**11), "-t", "set"]
    done = subprocess.run(
        ["redis-benchmark", *options, *command], capture_output=True, text=True, timeout=300, check=True
    )
    found = next(csv.DictReader(io.StringIO(done.stdout[done.stdout.index('"test"') :])))
    rate = float(found["rps"])
    return {
        "bench": "redis", "system": "redis-benchmark", "op": op, "jobs": inflight, "tls": bool(server.tls_ca),
        "spin": False, "verified": False, "block_bytes": size, "ops_per_s": rate, "gb_per_s": rate * size / 1e9,
        "latency_s_p50": float(found["p50_latency_ms"]) / 1e3, "latency_s_p99": float(found["p99_latency_ms"]) / 1e3,
    }  # fmt: skip


def fill(server: Server, count: int, size: int, name: str = "ceiling") -> None:
    """Set values with redis-py."""
    value = os.urandom(size)

    async def run() -> None:
        async with plain_client(server) as client:
            for number in range(count + 1):
                await client.set(f"kv:{name}:{number:012}", value)

    asyncio.run(run())


def wipe(server: Server) -> None:
    """Empty the server between runs; it is the benchmark's own."""
    administer(server, "FLUSHALL")


def administer(server: Server, *command: str) -> None:
    """Run a command as the server's administrator.

    Raises:
        RuntimeError: The answer is not OK.
    """
    admin = replace(server, username="admin", password=PASSWORD) if server.tls_ca else server
    answer = cli(admin, *command)
    if answer.strip() != "OK":
        raise RuntimeError(f"redis-server answered {command} with {answer!r}")


def compare(
    server: Server, op: str, size: int, inflight: int, total: int, runs: int, *, spin: bool = False
) -> list[Row]:
    """Return one row per system, its runs taken in turns with the others'."""
    # Buffers of connections also count, so a server with a limit could evict values before a client reads them.
    administer(server, "CONFIG", "SET", "maxmemory", MEMORY if op == "set" else "0")
    if op == "set":
        wipe(server)
        fill(server, 600, 2 * MIB, "filler")
    case = (server, op, size, inflight, total)
    kinds: list[type[RedisClient]] = [RedisPy, Glide]
    systems: dict[str, Callable[[], Row]] = {}
    if not spin:
        systems["redis-benchmark"] = partial(ceiling, *case)
        kinds = [*([RedisPyAsyncio] if size == 2 * MIB else []), *kinds, KVStore]
        kinds += [KVStoreJob, KVStoreClient] if inflight > 1 else []
    systems |= {kind.__name__: partial(measure, kind, *case, spin) for kind in kinds}
    if spin:
        systems |= {host: partial(measure_tier, *case, host=host, spin=True) for host in ("thread", "process")}
    elif not server.tls_ca and inflight > 1:
        systems["tier"] = partial(measure_tier, *case)
    rows = [median_row(of_one) for of_one in in_turns(runs, systems).values()]
    for row in rows:
        if not spin:
            row["of_ceiling"] = row["gb_per_s"] / rows[0]["gb_per_s"]
        print(f"  {row['system']:16} {op} {size:>8} x{inflight:<3} {row['gb_per_s']:.2f} GB/s", file=sys.stderr)
    return rows


def acceptance(rows: Sequence[Row]) -> list[Row]:
    """Compare kvstore with the others where it has a goal: 8 blocks in flight, 4 beside a spinning thread; no TLS."""
    others = [RedisPy.name, Glide.name]
    goals: list[tuple[str, int, float, str, dict[str, Any], list[str]]] = [
        ("get", 128 * KIB, 1.0, KVStore.name, {"jobs": 1, "spin": False}, others[:1]),
        ("set", 128 * KIB, 0.9, KVStore.name, {"jobs": 1, "spin": False}, others[:1]),
        ("get", 128 * KIB, 0.45, "kvstore-tier", {"jobs": 2, "spin": False}, [KVStoreClient.name]),
        ("set", 128 * KIB, 0.45, "kvstore-tier", {"jobs": 2, "spin": False}, [KVStoreClient.name]),
        ("get", 2 * MIB, 1.25, KVStore.name, {"jobs": 8, "spin": False}, others),
        # The other clients send values without a checksum.
        ("set", 2 * MIB, 0.65, KVStore.name, {"jobs": 8, "spin": False}, others),
        ("set", 2 * MIB, 0.95, KVStoreClient.name, {"jobs": 2, "spin": False}, others),
    ]
    for op, size, wanted in (
        ("get", 128 * KIB, 2.0), ("set", 128 * KIB, 0.3), ("get", 2 * MIB, 10.0), ("set", 2 * MIB, 1.0),
    ):  # fmt: skip
        goals.append((op, size, wanted, KVStore.name, {"host": "process", "spin": True}, others[:1]))
    found = []
    for op, size, wanted, system, more, against in goals:
        same = {"op": op, "block_bytes": size, "tls": False, "spin": more["spin"]}
        ours = rates(rows, [system], {**same, **more})
        theirs = rates(rows, against, same)
        if ours and theirs:
            line = {**same, "system": system, **more, "gb_per_s": ours[0], "against": " and ".join(against)}
            found.append(line | {"theirs": max(theirs), "ratio": ours[0] / max(theirs), "wanted": wanted})
    return found


def rates(rows: Sequence[Row], systems: Sequence[str], what: Row) -> list[float]:
    """Return the GB/s of rows of these systems with 8 blocks in flight, or 4 beside a spinning thread."""
    depth = 4 if what["spin"] else 8
    return [
        row["gb_per_s"]
        for row in rows
        if row["system"] in systems
        and (row.get("jobs") == depth or row.get("blocks_per_job") == depth)
        and all(row.get(name) == value for name, value in what.items())
    ]


def measure_all(clear: Server, secret: Server, rows: list[Row], options: argparse.Namespace) -> None:
    """Measure everything, adding to the rows."""
    runs, quick = runs_of(options, 3), options.quick
    sizes = [kib * KIB for kib in options.sizes or ([128, 2048] if quick else [128, 512, 2048, 8192])]
    depths = [8] if quick else [1, 4, 8, 16]
    # At least some fifty milliseconds: redis-benchmark counts whole milliseconds, and new connections are slow.
    total = bytes_of(options, 384, 192)
    for size in sizes:
        for op in ("get", "set"):
            for inflight in depths:
                rows += compare(clear, op, size, inflight, total, runs)
    for size in [size for size in sizes if size in (128 * KIB, 2 * MIB)]:
        for op in ("get", "set"):
            # Beside a spinning thread some clients take 5 ms per call, so fewer bytes are enough.
            rows += compare(clear, op, size, 4, total // 8 if quick else total // 4, runs, spin=True)
    for size in sizes[-1:] if quick else sizes:
        for op in ("get", "set"):
            for inflight in depths:
                rows += compare(secret, op, size, inflight, total // 4, runs)


def main() -> None:
    """Start the servers, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", help="KiB per value")
    parser.add_argument("--mib", type=int, help="MiB per run (default: 384, with --quick 192)")
    options = parser.parse_args()
    libraries = {"redis-py": redis.__version__, "openssl": ssl.OPENSSL_VERSION, "uvloop": uvloop.__version__}
    with (
        reporting(options, COLUMNS, server="redis-server from Debian", libraries=libraries) as rows,
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as directory,
    ):
        clear, secret = plain("redis", Path(directory) / "plain"), secured(Path(directory) / "tls")
        with running(clear, secret):
            measure_all(clear, secret, rows, options)
    print("\nkvstore against the better of some, both in GB/s, and the ratio that it is to have at least\n")
    columns = ["op", "block_bytes", "system", "spin", "host", "gb_per_s", "against", "theirs", "ratio", "wanted"]
    print_table(acceptance(rows), columns)


if __name__ == "__main__":
    main()
