"""Redis clients side by side on one server: redis-py with hiredis, valkey-glide, kvstore, and redis-benchmark.

    python bench/redis.py [--quick] [--runs N] [--json FILE]

Each system moves the same number of values of the same length, so many at once, in one process on one event loop
(uvloop). redis-py and glide return bytes, which are thrown away: nothing is checked, and nothing is copied to where a
block belongs. kvstore does all of it: header, checksum on the way out; into the slot, length, header, key, namespace
and checksum on the way in. kvstore-tier is a whole tier with its owner, kvstore-client its client without all that.
redis-py-asyncio is redis-py on the loop that Python comes with, which is what most programs
have; it is measured at 2 MiB only. Sets go to a server that is full and evicts. Systems take turns, run by run; a row
is the median. CPU time is this process's. With a spinning thread, kvstore runs as a whole tier whose owner is what
spins. Interrupted (also by SIGTERM), it prints what it has.

Of redis-benchmark: on SET it sends a value by one call, as we do, and is a ceiling. On GET it receives 16 KiB a call at
most (``strace -f -e recvfrom``), 128 calls for 2 MiB, so that others may be quicker. ``--threads`` is no help: it then
ends at a tick of a quarter of a second, and shows 256 MiB as 1.07 GB/s, whatever it took.
"""

from __future__ import annotations

import asyncio
import csv
import io
import mmap
import os
import random
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
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

from bench.common import Row, arguments, at_once, median_row, percentile, print_table, write_json
from kvstore.backends.base import RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.redis import RedisBackend, RedisConfig
from kvstore.namespace import Namespace
from kvstore.runtime.buffers import SlotBuffers
from kvstore.runtime.messages import JobKind, SubmitJob
from kvstore.tiers.block_mover import BlockMover
from kvstore.tiers.opening import open_tier
from kvstore.tiers.tally import Tally
from kvstore.types import Outcome, TransferJob
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
        # As patient as the others: a loaded machine is no reason to fail here.
        self.backend = RedisBackend(RedisConfig(url=self.server.url, timeout=20, **options))
        namespace = Namespace({"bench": "redis", "size": self.size})
        await self.backend.open(namespace, RecordGeometry(256, self.size))
        rows = self.inflight
        self.memory = bytearray(random.Random(1).randbytes(self.size) * rows)
        slots = SlotBuffers(memoryview(self.memory), self.size)
        self.mover = BlockMover(self.backend, namespace, slots, 1 << 30, lambda keys: None)
        self.free = list(range(rows))

    async def close(self) -> None:
        await self.backend.close()
        self.mover.close()

    async def move(self, kind: JobKind, key: bytes) -> None:
        slot = self.free.pop()
        job = SubmitJob(1, kind, (key,), (slot,), time.monotonic() + 60)
        tally = Tally(1)
        (batch,) = self.mover.cut(job, tally)
        await self.mover.move(kind, batch)
        self.free.append(slot)
        if tally.outcomes[0] != Outcome.OK:
            raise RuntimeError(f"{kind}: {Outcome(tally.outcomes[0])!r} {tally.error}")

    def block_key(self, number: int, round_: int = 0) -> bytes:
        return number.to_bytes(16, "big") + round_.to_bytes(16, "big")

    async def set(self, number: int, round_: int) -> None:
        await self.move(JobKind.STORE, self.block_key(number, round_))

    async def get(self, number: int) -> None:
        await self.move(JobKind.LOAD, self.block_key(number))

    async def exists(self) -> None:
        await self.backend.exists([self.block_key(number) for number in range(EXISTS_KEYS)])


class KVStoreJob(KVStore):
    """The same blocks in flight as one job after another, which is how a tier gets those of a prompt."""

    in_jobs = True

    async def move_all(self, kind: JobKind, keys: Sequence[bytes]) -> None:
        tally = Tally(len(keys))
        job = SubmitJob(1, kind, tuple(keys), tuple(range(len(keys))), time.monotonic() + 60)
        await asyncio.gather(*(self.mover.move(kind, batch) for batch in self.mover.cut(job, tally)))
        if set(tally.outcomes) != {Outcome.OK}:
            raise RuntimeError(f"{kind}: {set(tally.outcomes)} {tally.error}")

    async def set(self, number: int, round_: int) -> None:
        first = number * self.inflight
        await self.move_all(JobKind.STORE, [self.block_key(first + i, round_) for i in range(self.inflight)])

    async def get(self, number: int) -> None:
        first = number * self.inflight
        await self.move_all(JobKind.LOAD, [self.block_key(first + i) for i in range(self.inflight)])


class KVStoreClient(KVStoreJob):
    """The client alone, without what makes a tier: no header is made, and nothing is hashed or verified."""

    name = "kvstore-client"
    verified = False

    async def move_all(self, kind: JobKind, keys: Sequence[bytes]) -> None:
        rows = memoryview(self.memory)
        header = memoryview(bytearray(256))
        pairs = [(header, rows[i * self.size : (i + 1) * self.size]) for i in range(len(keys))]
        if kind is JobKind.STORE:
            writes = [RecordWrite(key, pair) for key, pair in zip(keys, pairs, strict=True)]
            outcomes = await self.backend.put(writes)
        else:
            outcomes = await self.backend.get_into([RecordRead(k, pair) for k, pair in zip(keys, pairs, strict=True)])
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
    per_job, workers = (inflight, 1) if system.in_jobs else (1, inflight)
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
        with Spinner(spin) as spinner:
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
        if spin:
            row["spin_rate"] = spinner.rate_share
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
    with _shared(size * inflight) as primary:
        view = memoryview(primary)
        options: dict[str, Any] = {"backend": "redis", "url": server.url, "io": host, "timeout": 20}
        options |= {"store_timeout": 60, "load_timeout": 60}
        tier = open_tier(options, primary=view, slot_bytes=size, namespace=Namespace({"spin": random.getrandbits(60)}))
        try:
            if op == "get":
                _wipe(server)
                _drive(tier.submit_store, tier, count, inflight, per_job, spin=spin)
            alone = Spinner.alone or Spinner._spin_for(0.3)
            Spinner.alone = alone
            submit = tier.submit_load if op == "get" else tier.submit_store
            cpu_s = time.process_time()
            seconds, turns, latencies = _drive(submit, tier, count, inflight, per_job, spin=spin)
            cpu_s = time.process_time() - cpu_s
        finally:
            tier.close()
            view.release()
    name = KVStore.name if spin else "kvstore-tier"
    row: Row = {"bench": "redis", "system": name, "op": op, "jobs": inflight // per_job, "blocks_per_job": per_job}
    row |= {"tls": False, "host": host, "spin": spin, "verified": op == "get", "block_bytes": size}
    row |= {"gb_per_s": count * size / 1e9 / seconds, "ops_per_s": count / seconds}
    row |= {"spin_rate": turns / seconds / alone} if spin else {"cpu_s_per_gb": cpu_s / (count * size / 1e9)}
    return row | {"latency_s_p50": percentile(latencies, 0.5), "latency_s_p99": percentile(latencies, 0.99)}


def _drive(
    submit: Callable[[TransferJob], None], tier: Any, count: int, inflight: int, per_job: int, *, spin: bool
) -> tuple[float, int, list[float]]:
    """Keep so many blocks in flight, spinning meanwhile or not; return seconds, turns of the spin, and latencies."""
    latencies: list[float] = []
    free = [range(first, first + per_job) for first in range(0, inflight, per_job)]
    begun, number, turns = {}, 0, 0
    started = time.perf_counter()
    while len(latencies) < count // per_job:
        while free and number < count // per_job:
            slots = free.pop()
            begun[number] = (slots, time.perf_counter())
            keys = [(number * per_job + i).to_bytes(32, "big") for i in range(per_job)]
            submit(TransferJob(number, keys, slots))
            number += 1
        tier.flush()
        for result in tier.get_finished():
            if not result.success:
                raise RuntimeError(f"a job failed: {result}")
            slots, at = begun.pop(result.job_id)
            free.append(slots)
            latencies.append(time.perf_counter() - at)
        if spin:
            turns += _turn()
        else:
            time.sleep(1e-4)
    return time.perf_counter() - started, turns, latencies


def _shared(size: int) -> mmap.mmap:
    """Return memory that a process host can map, filled."""
    descriptor = os.memfd_create("kvstore-bench")
    os.truncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    memory[:] = os.urandom(1 << 16) * (size >> 16)
    return memory


class Spinner:
    """A thread that spins in Python, as a busy scheduler does; and how much of its speed it kept."""

    alone: float = 0.0

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.rate_share: float | None = None

    def __enter__(self) -> Spinner:
        if self.wanted:
            if not Spinner.alone:
                Spinner.alone = self._spin_for(0.3)
            self._stop, self._turns = threading.Event(), 0
            self._started = time.perf_counter()
            self._thread = threading.Thread(target=self._spin)
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.wanted:
            self._stop.set()
            self._thread.join()
            self.rate_share = self._turns / (time.perf_counter() - self._started) / Spinner.alone

    def _spin(self) -> None:
        stop = self._stop
        while not stop.is_set():
            self._turns += _turn()

    @staticmethod
    def _spin_for(seconds: float) -> float:
        turns, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            turns += _turn()
        return turns / seconds


def _turn() -> int:
    total = 0
    for number in range(100):
        total += number
    return 1 if total else 0


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


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Return how kvstore compares with redis-py, on the loop that most programs have and on uvloop, doing the same."""
    names = {RedisPyAsyncio.name: "redis-py, asyncio's loop", RedisPy.name: "redis-py, uvloop"}
    found = []
    same = ("op", "block_bytes", "tls", "spin")
    for ours in (row for row in rows if row["system"] == KVStore.name):
        inflight = ours["jobs"] * ours["blocks_per_job"]
        for theirs in rows:
            if theirs["system"] not in names or theirs["jobs"] != inflight:
                continue
            if any(theirs.get(name) != ours.get(name) for name in same):
                continue
            line = {name: ours.get(name) for name in (*same, "jobs", "blocks_per_job", "host", "of_ceiling")}
            line |= {"against": names[theirs["system"]], "speed": ours["ops_per_s"] / theirs["ops_per_s"]}
            if ours.get("cpu_s_per_gb"):
                line["cpu"] = ours["cpu_s_per_gb"] / theirs["cpu_s_per_gb"]
            found.append(line)
    return found


def main() -> None:
    """Start the servers, measure, print what there is (also when it is interrupted)."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, help="runs of each system, of which a row is the median")
    options = parser.parse_args()
    runs = max(1, options.runs or (1 if options.quick else 3))
    # A time limit around it ends it by SIGTERM: the servers are stopped and the table is printed then, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
        print("\nkvstore-redis against redis-py (speed: more is better; cpu: less is better) and redis-benchmark\n")
        columns = ["op", "block_bytes", "jobs", "blocks_per_job", "tls", "spin", "host", "against", "speed", "cpu"]
        print_table(ratios(rows), [*columns, "of_ceiling"])
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
    for inflight in depths:
        rows += compare(clear, "exists", 4 * KIB, inflight, 30, runs)
    for op in ("get", "set"):
        for size in (128 * KIB, 2 * MIB):
            rows += compare(clear, op, size, 4, total // 4, runs, spin=True)
    for server, server_total in ((clear, total), (secret, total // 4)):
        for size in sizes:
            for op in ("get", "set"):
                for inflight in depths:
                    rows += compare(server, op, size, inflight, server_total, runs)


if __name__ == "__main__":
    main()
