"""Redis clients side by side on one server: redis-py with hiredis, valkey-glide, kvstore, and redis-benchmark.

    python bench/redis.py [--quick] [--runs N] [--json FILE]

Each system moves the same number of values of the same length, so many at once, in one process on one event loop
(uvloop). redis-py and glide return bytes, which are thrown away: nothing is checked, and nothing is copied to where a
block belongs. kvstore does all of it: header, checksum on the way out; into the slot, length, header, key, namespace
and checksum on the way in. kvstore-tier is a whole tier with its owner; kvstore-client is its client alone, without
headers and checksums. Both have two jobs in flight. redis-py-asyncio is redis-py on the loop that Python comes with, as
in most programs; it is measured at 2 MiB only. Sets go to a server that is full and evicts. Systems take turns, run by
run; a row is the median. CPU time is this process's. With a spinning thread, kvstore runs as a whole tier whose owner
is what spins. Interrupted (also by SIGTERM), it prints what it has.

Of redis-benchmark: on SET it sends a value by one call, as we do, and is a ceiling. On GET it receives 16 KiB a call at
most (``strace -f -e recvfrom``), 128 calls for 2 MiB, so that others may be quicker. ``--threads`` is no help: it then
ends at a tick of a quarter of a second, and shows 256 MiB as 1.07 GB/s, whatever it took.
"""

from __future__ import annotations

import asyncio
import csv
import functools
import io
import os
import random
import ssl
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

# In place of this directory, where a module named redis would hide the package of that name: this one.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

import glide
import redis.asyncio
import uvloop

from bench.common import (
    Row,
    arguments,
    at_once,
    beside_spinner,
    median_row,
    percentile,
    print_table,
    shared_memory,
    write_json,
)
from bench.slots import MovedSlots
from bench.tiers import run_jobs
from kvstore.backends.base import RecordRead, RecordWrite
from kvstore.backends.redis import RedisBackend, RedisConfig
from kvstore.cli.measuring.spinner import PythonWork
from kvstore.cli.measuring.systems import TierSystem
from kvstore.namespace import Namespace
from kvstore.runtime.messages import JobKind
from kvstore.types import Outcome
from tests.redis.servers import PASSWORD, Server, cli, plain, running, secured

KIB, MIB = 1024, 1024**2
COLUMNS = [
    "system", "op", "block_bytes", "jobs", "blocks_per_job", "tls", "spin", "host",
    "gb_per_s", "ops_per_s", "cpu_s_per_gb", "latency_s_p50", "latency_s_p99", "spin_rate", "of_ceiling", "verified",
    "runs",
]  # fmt: skip
EXISTS_KEYS = 1000


class Client(ABC):
    """One system under test. Values are numbered; ``round_`` tells the sets of one run from those of another."""

    name: str
    verified = False
    in_jobs = False
    jobs = 1
    own_loop = False

    def __init__(self, server: Server, size: int, count: int, inflight: int) -> None:
        self.server, self.size, self.count, self.inflight = server, size, count, inflight

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def set(self, number: int, round_: int) -> None: ...

    @abstractmethod
    async def get(self, number: int) -> None: ...

    @abstractmethod
    async def exists(self) -> None: ...

    def make_values(self) -> None:
        """Make what the others set: as many values as are in flight, which is the memory that our slots take, too."""
        value = os.urandom(self.size)
        self.values = [number.to_bytes(8, "big") + value[8:] for number in range(self.inflight)]

    def value(self, number: int) -> bytes:
        return self.values[number % self.inflight]

    def key(self, number: int, round_: int = 0) -> bytes:
        return b"kv:bench:%d:%d:%012d" % (self.size, round_, number)


class RedisPy(Client):
    """redis-py's asyncio client with hiredis, one pool."""

    name = "redis-py"

    async def open(self) -> None:
        options: dict[str, Any] = {"max_connections": max(self.inflight, 1)}
        if self.server.tls_ca:
            options |= {"ssl": True, "ssl_ca_certs": str(self.server.tls_ca), "username": "admin", "password": PASSWORD}
        self.client = redis.asyncio.Redis(host="127.0.0.1", port=self.server.port, **options)
        self.make_values()
        await asyncio.gather(*(self.client.ping() for _ in range(self.inflight)))

    async def close(self) -> None:
        await self.client.aclose()

    async def set(self, number: int, round_: int) -> None:
        await self.client.set(self.key(number, round_), self.value(number), nx=True, ex=3600)

    async def get(self, number: int) -> None:
        value = await self.client.get(self.key(number))
        if value is None or len(value) != self.size:
            raise RuntimeError("a value is missing")

    async def exists(self) -> None:
        async with self.client.pipeline(transaction=False) as pipe:
            for number in range(EXISTS_KEYS):
                pipe.exists(self.key(number))
            await pipe.execute()


class RedisPyAsyncio(RedisPy):
    """The same on asyncio's own loop."""

    name = "redis-py-asyncio"
    own_loop = True


class Glide(Client):
    """valkey-glide's asyncio client; one connection, as it multiplexes by itself."""

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
        self.make_values()

    async def close(self) -> None:
        await self.client.close()

    async def set(self, number: int, round_: int) -> None:
        await self.client.set(
            self.key(number, round_),
            self.value(number),
            conditional_set=glide.ConditionalChange.ONLY_IF_DOES_NOT_EXIST,
            expiry=glide.ExpirySet(glide.ExpiryType.SEC, 3600),
        )

    async def get(self, number: int) -> None:
        value = await self.client.get(self.key(number))
        if value is None or len(value) != self.size:
            raise RuntimeError("a value is missing")

    async def exists(self) -> None:
        batch = glide.Batch(is_atomic=False)
        for number in range(EXISTS_KEYS):
            batch.exists([self.key(number)])
        await self.client.exec(batch, raise_on_error=True)


class KVStore(Client):
    """kvstore as a tier does it: slots, headers, checksums, verification on worker threads."""

    name = "kvstore-redis"
    verified = True

    async def open(self) -> None:
        options: dict[str, Any] = {}
        if self.server.tls_ca:
            options = {"tls_ca": self.server.tls_ca, "username": "admin", "password": PASSWORD}
        # As patient as the others: a loaded machine must not fail this.
        self.backend = RedisBackend(RedisConfig(url=self.server.url, timeout=20, **options))
        namespace = Namespace({"bench": "redis", "size": self.size})
        self.slots = MovedSlots(self.backend, namespace, self.size, self.inflight * self.jobs)
        await self.slots.open()

    async def close(self) -> None:
        await self.slots.close()

    def block_key(self, number: int, round_: int = 0) -> bytes:
        return number.to_bytes(16, "big") + round_.to_bytes(16, "big")

    async def set(self, number: int, round_: int) -> None:
        await self.slots.move(JobKind.STORE, [self.block_key(number, round_)])

    async def get(self, number: int) -> None:
        await self.slots.move(JobKind.LOAD, [self.block_key(number)])

    async def exists(self) -> None:
        await self.backend.exists([self.block_key(number) for number in range(EXISTS_KEYS)])


class KVStoreJob(KVStore):
    """The same blocks in flight as one job after another, which is how a tier gets those of a prompt."""

    in_jobs = True

    async def move(self, kind: JobKind, keys: Sequence[bytes]) -> None:
        await self.slots.move(kind, keys)

    async def set(self, number: int, round_: int) -> None:
        first = number * self.inflight
        await self.move(JobKind.STORE, [self.block_key(first + i, round_) for i in range(self.inflight)])

    async def get(self, number: int) -> None:
        first = number * self.inflight
        await self.move(JobKind.LOAD, [self.block_key(first + i) for i in range(self.inflight)])


class KVStoreClient(KVStoreJob):
    """The client alone, without what makes a tier: no header is made, and nothing is hashed or verified."""

    name = "kvstore-client"
    verified = False
    # As many as measure_tier() has in flight.
    jobs = 2

    async def open(self) -> None:
        await super().open()
        self.free = list(range(self.jobs))

    async def move(self, kind: JobKind, keys: Sequence[bytes]) -> None:
        place = self.free.pop()
        rows = memoryview(self.slots.memory)[place * self.inflight * self.size :]
        pairs = [(memoryview(bytearray(256)), rows[i * self.size : (i + 1) * self.size]) for i in range(len(keys))]
        if kind is JobKind.STORE:
            writes = [RecordWrite(key, pair) for key, pair in zip(keys, pairs, strict=True)]
            outcomes = await self.backend.put(writes)
        else:
            outcomes = await self.backend.get_into([RecordRead(k, pair) for k, pair in zip(keys, pairs, strict=True)])
        self.free.append(place)
        if set(outcomes) != {Outcome.OK}:
            raise RuntimeError(f"{kind}: {set(outcomes)} {self.backend.last_error}")


SYSTEMS: list[type[Client]] = [RedisPy, Glide, KVStore]


def measure(system: type[Client], server: Server, op: str, size: int, inflight: int, total: int, spin: bool) -> Row:
    """Make one run in a loop of its own; return its row."""
    run = asyncio.run if system.own_loop else uvloop.run
    return run(_measure(system, server, op, size, inflight, total, spin))


async def _measure(
    system: type[Client], server: Server, op: str, size: int, inflight: int, total: int, spin: bool
) -> Row:
    count = max(inflight * 4, total // size) if op != "exists" else total
    per_job, workers = (inflight, system.jobs) if system.in_jobs else (1, inflight)
    row: Row = {"bench": "redis", "system": system.name, "op": op, "jobs": workers, "blocks_per_job": per_job}
    row |= {"tls": bool(server.tls_ca), "host": "thread", "spin": spin, "verified": system.verified and op == "get"}
    client = system(server, size, count, inflight)
    # Sets find a full server that evicts, as a cache is; each run has keys of its own.
    round_ = random.getrandbits(60) if op == "set" else 0
    await client.open()
    try:
        if op == "get":
            _wipe(server)
            await at_once(workers, range(count // per_job), lambda number: client.set(number, 0))
        work: Callable[[int], Coroutine[Any, Any, None]] = {
            "get": client.get,
            "set": lambda number: client.set(number, round_),
            "exists": lambda number: client.exists(),
        }[op]
        if op != "set":
            await at_once(workers, range(min(count // per_job, 2 * workers)), work)
        with beside_spinner(spin) as spun:
            seconds, cpu_s, latencies = await at_once(workers, range(count // per_job), work)
        row["ops_per_s"] = count // per_job * per_job / seconds
        row |= {"latency_s_p50": percentile(latencies, 0.5), "latency_s_p99": percentile(latencies, 0.99)}
        if op != "exists":
            gigabytes = count // per_job * per_job * size / 1e9
            row |= {"block_bytes": size, "gb_per_s": gigabytes / seconds}
            # The spinning thread's CPU time can't be told from the client's.
            row |= {} if spin else {"cpu_s_per_gb": cpu_s / gigabytes}
        else:
            row["keys"] = EXISTS_KEYS
        row |= spun
    finally:
        await client.close()
    return row


def measure_tier(server: Server, op: str, size: int, inflight: int, total: int, host: str, *, per_job: int = 0) -> Row:
    """Make one run through a whole tier, whose owner spins in Python between polls, as a scheduler does.

    With ``per_job`` blocks a job, two jobs at once are under way, and the owner does nothing else.
    """
    spin, per_job = not per_job, per_job or 1
    inflight = inflight if spin else 2 * per_job
    count = max(inflight * 4, total // size) // per_job * per_job
    jobs = [[(number + i).to_bytes(32, "big") for i in range(per_job)] for number in range(0, count, per_job)]
    work = _short_steps()
    turns = 0

    def pause() -> None:
        nonlocal turns
        if spin:
            work.step()
            turns += 1
        else:
            time.sleep(1e-4)

    with shared_memory(size * inflight) as primary:
        primary[:] = os.urandom(1 << 16) * (len(primary) >> 16)
        view = memoryview(primary)
        options: dict[str, Any] = {"backend": "redis", "url": server.url, "io": host, "timeout": 20}
        options |= {"store_timeout": 60, "load_timeout": 60}
        namespace = Namespace({"spin": random.getrandbits(60)})
        tier = TierSystem(options, view, size, namespace, name=KVStore.name if spin else "kvstore-tier")
        try:
            if op == "get":
                _wipe(server)
                run_jobs(tier, "store", jobs, inflight // per_job, pause)
            turns, cpu_s = 0, time.process_time()
            found = run_jobs(tier, "load" if op == "get" else "store", jobs, inflight // per_job, pause)
            cpu_s = time.process_time() - cpu_s
        finally:
            tier.close()
            view.release()
    row: Row = {"bench": "redis", "system": tier.name, "op": op, "jobs": inflight // per_job, "blocks_per_job": per_job}
    row |= {"tls": False, "host": host, "spin": spin, "verified": op == "get", "block_bytes": size}
    row |= {"gb_per_s": count * size / 1e9 / found.seconds, "ops_per_s": count / found.seconds}
    row |= (
        {"spin_rate": work.share_of(turns, found.seconds)} if spin else {"cpu_s_per_gb": cpu_s / (count * size / 1e9)}
    )
    return row | {"latency_s_p50": percentile(found.latencies, 0.5), "latency_s_p99": percentile(found.latencies, 0.99)}


@functools.cache
def _short_steps() -> PythonWork:
    """Return work in steps of a few microseconds, so that a scheduler that spins looks at its tier often."""
    return PythonWork(loops=100)


def ceiling(server: Server, op: str, size: int, inflight: int, total: int) -> Row:
    """Return what redis-benchmark (a C program that throws values away) gets from the same server."""
    count = max(inflight * 4, total // size)
    options = [
        "-h",
        "127.0.0.1",
        "-p",
        str(server.port),
        "-c",
        str(inflight),
        "-n",
        str(count),
        "--csv",
        "-d",
        str(size),
    ]
    if server.tls_ca:
        options += ["--tls", "--cacert", str(server.tls_ca), "--user", "admin", "-a", PASSWORD]
    # Values of their own, as many as the others use: one value again and again would stay in the server's cache.
    options += ["-r", str(count)]
    command = ["get", "kv:ceiling:__rand_int__"]
    if op == "get":
        _wipe(server)
        _fill(server, count, size)
    else:
        # Keys that are new nearly always.
        options[options.index("-r") + 1] = str(10**11)
        command = ["-t", "set"]
    done = subprocess.run(
        ["redis-benchmark", *options, *command], capture_output=True, text=True, timeout=300, check=True
    )
    found = next(csv.DictReader(io.StringIO(done.stdout[done.stdout.index('"test"') :])))
    rate = float(found["rps"])
    row: Row = {"bench": "redis", "system": "redis-benchmark", "op": op, "jobs": inflight, "tls": bool(server.tls_ca)}
    row |= {"spin": False, "verified": False, "block_bytes": size, "ops_per_s": rate, "gb_per_s": rate * size / 1e9}
    row |= {
        "latency_s_p50": float(found["p50_latency_ms"]) / 1e3,
        "latency_s_p99": float(found["p99_latency_ms"]) / 1e3,
    }
    return row


def _fill(server: Server, count: int, size: int, name: str = "ceiling") -> None:
    value = os.urandom(size)

    async def fill() -> None:
        async with _plain_client(server) as client:
            for number in range(count + 1):
                await client.set(f"kv:{name}:{number:012}", value)

    asyncio.run(fill())


def _wipe(server: Server) -> None:
    """Empty the server between runs; it is the benchmark's own."""
    server.username, server.password, kept = "admin", PASSWORD, (server.username, server.password)
    cli(server, "FLUSHALL")
    server.username, server.password = kept


@asynccontextmanager
async def _plain_client(server: Server) -> AsyncIterator[redis.asyncio.Redis]:
    options: dict[str, Any] = {}
    if server.tls_ca:
        options = {"ssl": True, "ssl_ca_certs": str(server.tls_ca), "username": "admin", "password": PASSWORD}
    client = redis.asyncio.Redis(host="127.0.0.1", port=server.port, **options)
    try:
        yield client
    finally:
        await client.aclose()


def compare(
    server: Server, op: str, size: int, inflight: int, total: int, runs: int, *, spin: bool = False
) -> list[Row]:
    """Return one row per system, its runs taken in turns with the others'."""
    found: dict[str, list[Row]] = {}
    if op == "set":
        _wipe(server)
        _fill(server, 600, 2 * MIB, "filler")
    for number in range(runs):
        systems = (
            [*SYSTEMS, KVStoreJob, KVStoreClient] if op != "exists" and inflight > 1 and not spin else list(SYSTEMS)
        )
        if op != "exists" and size == 2 * MIB and not spin:
            systems.insert(1, RedisPyAsyncio)
        if spin:
            systems.remove(KVStore)
            for host in ("thread", "process"):
                found.setdefault(f"tier {host}", []).append(measure_tier(server, op, size, inflight, total, host))
        systems = systems[number % len(systems) :] + systems[: number % len(systems)]
        if op != "exists" and not spin:
            found.setdefault("redis-benchmark", []).append(ceiling(server, op, size, inflight, total))
            if not server.tls_ca and inflight > 1:
                row = measure_tier(server, op, size, inflight, total, "thread", per_job=inflight)
                found.setdefault("tier job", []).append(row)
        for system in systems:
            found.setdefault(system.__name__, []).append(measure(system, server, op, size, inflight, total, spin))
    classes = [system.__name__ for system in (RedisPyAsyncio, *SYSTEMS, KVStoreJob, KVStoreClient)]
    order = ["redis-benchmark", *classes, "tier job", "tier thread", "tier process"]
    rows = [median_row(found[name]) for name in order if name in found]
    top = rows[0].get("gb_per_s") if rows[0]["system"] == "redis-benchmark" else None
    for row in rows:
        if top:
            row["of_ceiling"] = row["gb_per_s"] / top
        speed = f"{row['gb_per_s']:.2f} GB/s" if "gb_per_s" in row else f"{row['ops_per_s']:.0f} a second"
        print(f"  {row['system']:16} {op:6} {size:>8} x{inflight:<3} {speed}", file=sys.stderr)
    return rows


def acceptance(rows: Sequence[Row]) -> list[Row]:
    """Return how kvstore compares with the others where it has a goal: 8 blocks in flight, 4 beside a spin; no TLS."""
    others = [RedisPy.name, Glide.name]
    goals: list[tuple[str, int, float, str, dict[str, Any], list[str]]] = [
        ("get", 128 * KIB, 1.0, KVStore.name, {"jobs": 1, "spin": False}, others[:1]),
        ("set", 128 * KIB, 1.0, KVStore.name, {"jobs": 1, "spin": False}, others[:1]),
        ("get", 128 * KIB, 0.9, "kvstore-tier", {"jobs": 2, "spin": False}, [KVStoreClient.name]),
        ("set", 128 * KIB, 0.9, "kvstore-tier", {"jobs": 2, "spin": False}, [KVStoreClient.name]),
        ("get", 2 * MIB, 1.3, KVStore.name, {"jobs": 8, "spin": False}, others),
        ("set", 2 * MIB, 0.95, KVStore.name, {"jobs": 8, "spin": False}, others),
    ]
    for size in (128 * KIB, 2 * MIB):
        for op in ("get", "set"):
            goals.append((op, size, 1.0, KVStore.name, {"host": "process", "spin": True}, others[:1]))
    found = []
    for op, size, wanted, system, more, against in goals:
        same = {"op": op, "block_bytes": size, "tls": False, "spin": more["spin"]}
        ours = _rates(rows, [system], {**same, **more})
        theirs = _rates(rows, against, same)
        if ours and theirs:
            line = {**same, "system": system, **more, "gb_per_s": ours[0], "against": " and ".join(against)}
            found.append(line | {"theirs": max(theirs), "ratio": ours[0] / max(theirs), "wanted": wanted})
    return found


def _rates(rows: Sequence[Row], systems: Sequence[str], what: Row) -> list[float]:
    """Return the GB/s of the rows of some systems in which so many blocks are in flight."""
    depth = 4 if what["spin"] else 8
    return [
        row["gb_per_s"]
        for row in rows
        if row["system"] in systems
        and (row.get("jobs") == depth or row.get("blocks_per_job") == depth)
        and all(row.get(name) == value for name, value in what.items())
    ]


def main() -> None:
    """Start the servers, measure, print what there is (also when it is interrupted)."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, help="runs of each system, of which a row is the median")
    options = parser.parse_args()
    runs = max(1, options.runs or (1 if options.quick else 3))
    rows: list[Row] = []
    load_before = os.getloadavg()[0]
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as directory:
            clear = plain("redis", Path(directory) / "plain", memory="1gb")
            secret = secured(Path(directory) / "tls", memory="1gb")
            with running(clear, secret):
                measure_all(clear, secret, rows, runs, quick=options.quick)
    except KeyboardInterrupt:
        print("\nInterrupted: what there is by now.\n", file=sys.stderr)
    finally:
        print_table(rows, COLUMNS)
        print("\nkvstore against the better of some, both in GB/s, and the ratio that it is to have at least\n")
        columns = ["op", "block_bytes", "system", "spin", "host", "gb_per_s", "against", "theirs", "ratio", "wanted"]
        print_table(acceptance(rows), columns)
        load = {"before": load_before, "after": os.getloadavg()[0]}
        print(f"\nload average of the machine, ours included: {load}")
        libraries = {"redis-py": redis.__version__, "openssl": ssl.OPENSSL_VERSION, "uvloop": uvloop.__version__}
        write_json(options.json, rows, server="redis-server from Debian", libraries=libraries, load_average=load)


def measure_all(clear: Server, secret: Server, rows: list[Row], runs: int, *, quick: bool) -> None:
    """Measure everything, adding to the rows."""
    sizes = [128 * KIB, 2 * MIB] if quick else [128 * KIB, 512 * KIB, 2 * MIB, 8 * MIB]
    depths = [8] if quick else [1, 4, 8, 16]
    # Some fifty milliseconds at least: redis-benchmark counts in whole ones, and connections begin slowly.
    total = 192 * MIB if quick else 384 * MIB
    for size in sizes:
        for op in ("get", "set"):
            for inflight in depths:
                rows += compare(clear, op, size, inflight, total, runs)
    for size in (128 * KIB, 2 * MIB):
        for op in ("get", "set"):
            # Beside a spin some clients take 5 ms for each call: a second is long enough.
            rows += compare(clear, op, size, 4, total // 8 if quick else total // 4, runs, spin=True)
    for inflight in depths:
        rows += compare(clear, "exists", 4 * KIB, inflight, 30, runs)
    for size in sizes[-1:] if quick else sizes:
        for op in ("get", "set"):
            for inflight in depths:
                rows += compare(secret, op, size, inflight, total // 4, runs)


if __name__ == "__main__":
    main()
